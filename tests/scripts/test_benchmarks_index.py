# SPDX-License-Identifier: Apache-2.0
"""The indices of benchmarks/ and of its results name every file, and no benchmark edits sys.path."""

from __future__ import annotations

import re
from itertools import product

import pytest

from benchmarks import harness
from tests.architecture.sources import ROOT

MODULES = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if path.name not in ("__init__.py", "harness.py"))


def expanded(name: str) -> list[str]:
    """ "a.{b,c}" -> ["a.b", "a.c"]."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def test_every_module_is_in_the_index():
    index = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    missing = [f"{path.parent.name}.{path.stem}" for path in MODULES if f"`{path.parent.name}.{path.stem}`" not in index]
    assert not missing
    named = set(re.findall(r"`((?:kernels|comm|tune|models|engine|executor|deploy|serve|planner)\.\w+)`", index))
    assert named == {f"{path.parent.name}.{path.stem}" for path in MODULES}


def test_every_result_is_in_the_index_and_exists():
    index = harness.RESULTS / "README.md"
    section, named = "", set()
    for line in index.read_text(encoding="utf-8").splitlines():
        section = "serving" if "`serving/`" in line else "" if line.startswith("#") else section
        cell = line.split("|")[1] if line.startswith("| `") else ""
        for name in re.findall(r"`([^`]+)`", cell):
            named |= {str((harness.RESULTS / section / one).resolve().relative_to(harness.RESULTS)) for one in expanded(name)}
    folders = {name for name in named if (harness.RESULTS / name).is_dir()}
    files = {str(path.relative_to(harness.RESULTS)) for path in harness.RESULTS.rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith(("README.md", "tables.toml"))}
    files = {name for name in files if not any(name.startswith(f"{one}/") for one in folders)}
    assert named - folders == files


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_benchmark_edits_the_import_path(path):
    assert "sys.path" not in path.read_text(encoding="utf-8")


def test_sizes_of_the_gemms_of_published_shapes():
    assert harness.SHAPES["tp4"] == {"qkv": (2560, 8192), "o": (8192, 2048), "gate_up": (14336, 8192), "down": (8192, 7168)}
    assert harness.SHAPES["8b"] == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
