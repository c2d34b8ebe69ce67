# SPDX-License-Identifier: Apache-2.0
"""Sizes are alarms: a file of 600 lines, a function of 60, a package of 20 files. What is larger is listed here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import ROOT, SRC, module_name, nodes_of, of_each, python_files, tree_of
from tests.conftest import SLOW_FILES

MAX_FILE, MAX_FUNCTION, MAX_PACKAGE = 600, 60, 20
LONG_FILES: dict[str, str] = {
    "phalanx.worker.worker": "the life of a rank from its first message to its last; what each phase does is in files of its own",
}
LONG_FUNCTIONS: dict[str, str] = {
    "phalanx.bench.prediction.cli.simulate": "32 parameters, one line for each flag of the command, and 37 lines of body",
    "phalanx.kernels.gemm.int4_skinny._int4_skinny": "a pipeline: one function has its buffers and barriers",
}
LARGE_PACKAGES: dict[str, str] = {
    "phalanx.config": "30 files, of which config.json has twelve: one for each of its objects, and their tables",
    "phalanx.engine": "24 files, of which five make steps: one scheduler, that of several indices, what both are, drafts of steps",
    "phalanx.kernels.gemm": "21 files, a kernel each for one kind of weights and of sizes, of which six are of 4-bit integers",
    "phalanx.serve": "21 files, of which three read tokenizers: what they give, transformers' files, and the ranks of tiktoken",
    "phalanx.serve.openai": "24 files, of which eight have the routes: what they share stands beside them",
}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{module_name(path)}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def packages() -> Iterator[tuple[str, int]]:
    for folder in [SRC, *(path.parent for path in SRC.rglob("__init__.py"))]:
        yield (
            ".".join(("phalanx", *folder.relative_to(SRC).parts)),
            len([p for p in folder.glob("*.py") if p.name != "__init__.py"]),
        )


@of_each(python_files())
def test_file_and_function_sizes(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE or module_name(path) in LONG_FILES, f"{path} has {lines} lines"
    for name, size in functions(path):
        assert size <= MAX_FUNCTION or name in LONG_FUNCTIONS, f"{name} has {size} lines"


def test_package_sizes():
    for name, count in packages():
        assert count <= MAX_PACKAGE or name in LARGE_PACKAGES, f"{name} has {count} files"


def test_every_exception_is_needed_and_has_a_reason():
    lengths = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {name for name in LONG_FILES if lengths.get(name, 0) <= MAX_FILE} == set()
    long = {name for path in python_files() for name, size in functions(path) if size > MAX_FUNCTION}
    assert set(LONG_FUNCTIONS) <= long
    assert set(LARGE_PACKAGES) <= {name for name, count in packages() if count > MAX_PACKAGE}
    assert all({**LONG_FILES, **LONG_FUNCTIONS, **LARGE_PACKAGES}.values())


@of_each(python_files())
def test_every_file_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), f"{path}: the licence line is missing"
    assert ast.get_docstring(tree_of(path)), f"{path}: the module docstring is missing"


@of_each(python_files())
def test_names_state_the_act(path):
    banned = {"utils", "util", "common", "base", "manager", "impl", "v2", "helpers", "misc"}
    assert not banned & set(path.stem.split("_")), f"{path}: the name says nothing"


def test_tests_mirror_the_source():
    """Each tests/<package>/test_<stem>.py has a source of that stem (or a subpackage), except the tests that span packages."""
    spans = {"architecture", "acceptance", "scripts", "gpu"}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        package = test.relative_to(ROOT / "tests").parts[:-1]
        if package and package[0] in spans:
            continue
        stem = test.stem.removeprefix("test_")
        sources = [path.stem for path in SRC.joinpath(*package).glob("*") if path.name != "__pycache__"]
        assert any(stem == s or stem.startswith(s + "_") for s in sources), f"{test}: no source {'/'.join(package)}/{stem}.py"


def test_helpers_of_tests_are_in_support():
    """Beside tests stand only conftest.py and `__init__.py`; helpers are in tests/support, GPU scripts in tests/gpu."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        folder = path.relative_to(ROOT / "tests").parts[0]
        if folder not in {"support", "gpu"} and path.name not in {"conftest.py", "__init__.py"}:
            assert path.stem.startswith("test_") or path.relative_to(ROOT) == Path("tests/architecture/sources.py"), path


def test_slow_files_exist():
    assert [name for name in SLOW_FILES if not (ROOT / "tests" / name).is_file()] == []
