# SPDX-License-Identifier: Apache-2.0
"""Words that must not stand in the repository: paths of one machine, hosts of package registries, retired names; names in the
sources that say which act gave a value instead of what it is; and names of classes that stand for two things."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, module_name, nodes_of, of_each, python_files, tree_of

BANNED = {
    "an absolute path of a machine": re.compile(r"(?<![\w.}])/(?:work|root|home/(?!phalanx)\w+)/"),
    "a package registry's host": re.compile(r"pypi\.org|pythonhosted|registry\.npmjs|pytorch\.org/whl", re.I),
}
RETIRED = ROOT / "tests" / "architecture" / "retired_words.txt"
SELF = {"tests/architecture/test_words.py", "tests/architecture/retired_words.txt"}
ACTS = {"found", "held", "asked", "made", "said", "told", "seen", "mine", "given", "got", "whole", "wide"}
TWICE = {
    "ReasoningText": "a piece of reasoning, in a request and in an output; the first is a component of /openapi.json",
}
"""Names of two classes -> why both keep it."""
ALLOWED = {
    "src/phalanx/errors.py": {"held"},  # a part of PhalanxError, and of its wire format
}


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file() and name not in SELF]
    assert len(names) > 20, "git lists no files: run from a checkout"
    return tuple(name for name in names if Path(name).suffix not in {".safetensors", ".png", ".pyc"})


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("what", BANNED)
def test_no_banned_words(what):
    for name in tracked():
        match = BANNED[what].search(text_of(name))
        assert not match, f"{name} names {what}: {match.group(0)}"


@cache
def retired() -> dict[str, str]:
    """Retired word -> what took its place, of lines "word -> replacement"."""
    lines = [line for line in RETIRED.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {line.split(" -> ", 1)[0]: line.split(" -> ", 1)[1] for line in lines}


def test_retired_words_have_a_replacement():
    assert len(retired()) > 60
    assert all(re.fullmatch(r"\w+", word) and replacement.strip() for word, replacement in retired().items())


def test_no_retired_word_comes_back():
    """Whole words, case-sensitive, in code, tests, benchmarks, scripts and documents; results keep the names of their commits."""
    pattern = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, retired())) + r")(?!\w)")
    places = ("src/", "tests/", "scripts/", "docs/", "dashboards/", "README.md", "CONTRIBUTING.md", "Makefile", "Dockerfile")
    faults = []
    for name in tracked():
        if not (name.startswith(places) or (name.startswith("benchmarks/") and name.endswith(".py"))) or "demo_model" in name:
            continue
        for number, line in enumerate(text_of(name).splitlines(), 1):
            faults += [f"{name}:{number}: {word} (now {retired()[word]})" for word in pattern.findall(line)]
    assert not faults, "\n".join(faults)


def bindings(path: Path) -> Iterator[tuple[str, int]]:
    """Every name that the file binds: variables, parameters, attributes of self and of classes, functions, imports."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name, node.lineno


def checked_files() -> list[str]:
    names = [name for name in tracked() if name.startswith(("src/", "tests/", "benchmarks/", "scripts/"))]
    return [name for name in names if name.endswith(".py")]


@of_each(checked_files())
def test_names_are_of_things(name):
    """`blocks`, `error` or `logits`, not `found`, `HELD` or `_made`, in sources, tests, benchmarks and scripts."""
    acts = [(bound, line) for bound, line in bindings(ROOT / name) if bound.lower().strip("_") in ACTS]
    faults = [f"{name}:{line}: {bound}" for bound, line in acts if bound not in ALLOWED.get(name, set())]
    assert not faults, "\n".join(faults)


def test_one_name_of_a_class_has_one_meaning():
    """No two modules of src define a public class of one name, at their top level."""
    modules = defaultdict(list)
    for path in python_files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(module_name(path))
    assert len(modules) > 500
    twice = {name: places for name, places in modules.items() if len(places) > 1}
    faults = [f"{name}: {', '.join(places)}" for name, places in twice.items() if name not in TWICE]
    assert not faults, "\n".join(faults)
    assert twice.keys() == TWICE.keys()
