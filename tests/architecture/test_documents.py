# SPDX-License-Identifier: Apache-2.0
"""Documents are true: links lead somewhere, names exist, every option and API field is described, every command is parsed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest

from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.serving import ServeOptions
from phalanx.deploy.options import ComposeOptions, K8sOptions
from phalanx.serve.openai.schema import ChatRequest, CompletionRequest
from tests.architecture.sources import ROOT, SRC
from tests.support.command_line import command_line, require_parsed
from tests.support.documents import PAGES, Command, blocks, commands

NAME = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+)\.py:([A-Za-z_][\w.]*)`")
FILE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`")
COMMANDS = [command for page in PAGES for command in commands(page)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


# ---- pages -----------------------------------------------------------------------------------------------------------------


def test_readme_is_a_front_page():
    text = read("README.md")
    assert text.index("make demo") < text.index("make test") < text.index("\n## ")
    assert len(text.splitlines()) <= 120
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name})" in text, f"README's map of the documents lacks docs/{page.name}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]+)?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert anchor[1:] in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, (
                f"{page.name}: {anchor}"
            )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_prose_keeps_to_132_columns(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S).splitlines()
    long = [line for line in prose if len(line) > 132 and not line.lstrip().startswith("|") and "](" not in line[:140]]
    assert not long, long[0]


# ---- names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_named_functions_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for file, dotted in NAME.findall(text):
        thing: Any = importlib.import_module("phalanx." + file.replace("/", "."))
        for part in dotted.split("."):
            assert hasattr(thing, part) or part in getattr(thing, "__annotations__", {}), f"{page.name}: no {file}.py:{dotted}"
            thing = getattr(thing, part, None)
    for file in FILE.findall(text):
        assert (SRC / file).exists() or (ROOT / file).exists(), f"{page.name} names {file}, which does not exist"


def test_the_architecture_page_follows_the_code():
    assert len(NAME.findall(read("docs/architecture.md"))) >= 40
    packages = {path.parent.name for path in SRC.glob("*/__init__.py")} - {"demo_model"}
    table = read("docs/architecture.md")
    assert {name for name in packages if f"`{name}`" not in table} == set()


def test_the_picture_names_files_that_exist():
    root = ElementTree.fromstring(read("docs/architecture.svg"))
    lines = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text") if element.get("class") == "m"]
    assert len(lines) > 15
    for line in lines:
        package = ""
        for name in line.partition(":")[0].split(", "):  # "engine/blocks, prefix: ..." names two files
            package = name.rpartition("/")[0] or package
            path = SRC / (name if "/" in name or (SRC / name).is_dir() else f"{package}/{name}").rstrip("/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"docs/architecture.svg: {line}"


def test_the_glossary_names_things_that_exist():
    """Identifiers in a row's first cell: CamelCase, and words with an underscore."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SRC.rglob("*.py"))
    cells = re.findall(r"^\| ([^|]+) \|", read("docs/glossary.md"), re.M)
    names = {name for cell in cells for name in re.findall(r"\b(?:[A-Z][a-z]\w*[A-Z]\w+|[a-z0-9]+_\w+)\b", cell)}
    assert len(names) > 40
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


QUESTION = re.compile(r"^\| (Where [^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", re.M)


def test_a_newcomers_questions_are_answered_by_grep():
    """By the command that CONTRIBUTING prints, with counts. The file is one of at most 15 that match. Its name has a word of the
    term (the first four letters of it), or no file has more lines that match, and at most two as many."""
    text = read("CONTRIBUTING.md")
    (printed,) = re.findall(r"`(grep [^`]*TERM[^`]*)`", text)
    questions = QUESTION.findall(text)
    assert len(questions) >= 25
    for question, term, file in questions:
        command = shlex.split(printed.replace("-rlE", "-rcE").replace("TERM", shlex.quote(term)))
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
        counts = {path.removeprefix("src/phalanx/"): int(count) for path, _, count in (line.rpartition(":") for line in lines)}
        matches = sorted((path for path, count in counts.items() if count), key=lambda path: -counts[path])
        assert file in matches, f"{question} {term!r} leads to {matches}, not to {file}"
        assert len(matches) <= 15, f"{question} {term!r} leads to {len(matches)} files"
        words = {word[:4] for word in re.findall(r"[a-z]{4,}", term.lower())}
        named = any(word in Path(file).stem.replace("_", "") for word in words)
        first = [path for path in matches if counts[path] == counts[matches[0]]]
        assert named or (file in first and len(first) <= 3), f"{question} {term!r}: {file} does not stand out of {matches}"


# ---- options and fields ----------------------------------------------------------------------------------------------------


def test_options_page_is_what_the_models_say():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "options_page.py", "--check"], check=False)
    assert done.returncode == 0, "run: python scripts/options_page.py"


def test_fields_of_requests_are_what_the_table_says():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "http_fields.py", "--check"], check=False)
    assert done.returncode == 0, "run: python scripts/http_fields.py"


@pytest.mark.parametrize("model", [EngineOptions, ServeOptions, K8sOptions, ComposeOptions], ids=lambda model: model.__name__)
def test_every_option_is_documented(model):
    page = read("docs/options.md")
    for name, field in model.model_fields.items():
        assert f"| `{name.rstrip('_')}` |" in page
        assert field.description, f"{name} has no description"


def test_every_field_of_a_request_is_documented():
    page = read("docs/http_api.md")
    names = {name for model in (ChatRequest, CompletionRequest) for name in model.model_fields}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_every_sampling_parameter_is_documented():
    page = read("docs/python_api.md")
    assert {name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in page} == set()


def test_every_flag_in_prose_exists():
    """`--flag` in a page is an option of some verb, of a script that the line runs, or of a tool that it names."""
    parameters = [parameter for verb in (command_line(), *_verbs(command_line())) for parameter in verb.params]
    known = {_underscored(option) for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    tools = (
        "torchrun",
        "docker",
        "kubectl",
        "--ipc",
        "--max-restarts",
        "nvlink --status",
        "ray start",
        "grep -",
        "sglang",
        "smg launch",
        "litellm --",
        "open-webui serve",
        "vllm serve",
    )
    for page in PAGES:
        text = re.sub(r"^```text\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)  # has what is refused, too
        for line in text.splitlines():
            line = re.sub(r"^\| `--[\w-]+` \|", "", line) if page.name == "coming_from.md" else line  # another engine's
            scripts = [(ROOT / name).read_text(encoding="utf-8") for name in re.findall(r"python (scripts/[\w/]+\.py)", line)]
            for flag in re.findall(r"(?<![\w-])(--[a-z][a-z_-]+)", line):
                if any(f'"{flag}"' in script for script in scripts):
                    continue
                assert _underscored(flag) in known or any(tool in line for tool in tools), f"{page.name} names {flag}: {line}"


def _underscored(flag: str) -> str:
    return "--" + flag.lstrip("-").replace("-", "_")


def _verbs(command: Any) -> list[Any]:
    """The commands below a group. By its shape: typer may bring a click of its own."""
    subcommands = getattr(command, "commands", None)
    return [command] if subcommands is None else [each for sub in subcommands.values() for each in _verbs(sub)]


# ---- commands --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page.name}: {c.line[:60]}")
def test_command_is_understood(command: Command):
    """Parsed by what would run it. tests/acceptance/test_documents.py runs those of the quick start and the check of an
    installation, on the demo model."""
    program, *arguments = command.words
    checks = {
        "make": _is_a_target, "pip": _names_extras, "phalanx": require_parsed, "curl": _is_a_request, "python": _is_a_script,
        "docker": _fits_the_dockerfile,
    }  # fmt: skip
    assert program in checks, f"{program}: no check of such a command"
    checks[program](arguments)


def _is_a_target(arguments: list[str]) -> None:
    assert arguments
    for target in arguments:
        assert re.search(rf"^{target}:", read("Makefile"), re.M), f"no target {target}"


def _names_extras(arguments: list[str]) -> None:
    verb, what = arguments
    assert verb == "install"
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    match = re.fullmatch(r"(?:phalanx|\.)(?:\[([a-z,]+)\])?", what)
    assert match
    assert set((match[1] or "gpu").split(",")) <= set(extras)


def _is_a_request(arguments: list[str]) -> None:
    url = urlparse(next(word for word in arguments if word.startswith("http")))
    from phalanx.serve.openai import chat, completions, experts, status, tokenize

    paths = {route.path for part in (chat, completions, experts, status, tokenize) for route in part.router.routes}
    assert url.path in paths, f"the server has no {url.path}"
    if "-d" in arguments:
        body = arguments[arguments.index("-d") + 1]
        json.loads(body)
        kind = ChatRequest if "chat" in url.path else CompletionRequest
        kind.model_validate_json(body)


def _is_a_script(arguments: list[str]) -> None:
    script = ROOT / arguments[0]
    assert script.is_file()
    text = script.read_text(encoding="utf-8")
    for flag in (word for word in arguments[1:] if word.startswith("--")):
        assert flag in text, f"{script.name} has no {flag}"


def _fits_the_dockerfile(arguments: list[str]) -> None:
    assert (ROOT / "Dockerfile").is_file()
    if arguments[0] == "run":
        image = arguments.index("phalanx")
        require_parsed(["serve", *arguments[image + 1 :]])
    else:
        assert arguments == ["build", "-t", "phalanx", "."]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_blocks_compile(page):
    for block in blocks(page):
        if block.kind.startswith("python"):
            compile(block.text, page.name, "exec")
