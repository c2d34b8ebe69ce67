# SPDX-License-Identifier: Apache-2.0
"""Sizes to aim for: a file 400 lines, a function 60 lines, a room 14 files. An exception carries its reason."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import ROOT, SRC, module_name, python_files, tree_of

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
FULL_ROOMS: dict[str, str] = {
    "health": "three verbs, and what each of them needs",
    "health/checks": "one file per check",
}


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_file_and_function_sizes(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400 or module_name(path) in LONG_FILES, f"{path} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{module_name(path)}.{node.name}"
            assert size <= 60 or name in LONG_FUNCTIONS, f"{name} has {size} lines"


def test_rooms_are_not_full():
    for room in [SRC, *(p for p in SRC.rglob("*") if p.is_dir() and p.name != "__pycache__")]:
        count = len([p for p in room.glob("*.py") if p.name != "__init__.py"])
        assert count <= 14 or str(room.relative_to(SRC)) in FULL_ROOMS, f"{room} holds {count} files"


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_every_file_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), f"{path}: the licence line is missing"
    assert ast.get_docstring(tree_of(path)), f"{path}: the module docstring is missing"


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_names_state_the_act(path):
    banned = {"utils", "util", "common", "base", "manager", "impl", "v2", "helpers", "misc"}
    assert not banned & set(path.stem.split("_")), f"{path}: the name says nothing"


def test_tests_mirror_the_source():
    """Each file of tests/<room>/test_<stem>.py has a source of that stem (or a subroom), except the tests that span rooms."""
    spans = {"house", "acceptance", "scripts"}
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        room = test.relative_to(ROOT / "tests").parts[:-1]
        if room and room[0] in spans:
            continue
        stem = test.stem.removeprefix("test_")
        sources = [p.stem for p in (SRC.joinpath(*room)).glob("*") if p.name != "__pycache__"]
        assert any(stem == s or stem.startswith(s + "_") for s in sources), f"{test}: no source {'/'.join(room)}/{stem}.py"
