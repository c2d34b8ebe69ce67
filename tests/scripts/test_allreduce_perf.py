# SPDX-License-Identifier: Apache-2.0
"""The two scripts keep the flags, files and folders of their namesakes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from phalanx.hardware.fingerprint import Fingerprint
from tests.architecture.sources import ROOT
from tests.support.tune_benchmarks import NVLINK2, SMALL, folder_of

pytestmark = pytest.mark.usefixtures("forked_python")

SCRIPTS = ROOT / "scripts" / "allreduce_perf"


def script(name, *arguments, folder):
    return subprocess.run([sys.executable, SCRIPTS / name, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_code_from_a_folder(tmp_path):
    folder_of(tmp_path / "csvs", NVLINK2, Fingerprint(100, "nvlink", 2), **SMALL)
    ran = script("allreduce_heuristic_code_gen.py", "--data_dir", "csvs", "--sm_version", "90", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    path = tmp_path / "csvs" / "gen_heuristic_code" / "generated_lookup_table.cpp"
    text = path.read_text(encoding="utf-8")
    assert "AllReduceBestStrategyTableSM90" in text
    assert "SM100" not in text
    assert "written to: csvs/gen_heuristic_code/generated_lookup_table.cpp" in ran.stdout
    assert text in ran.stdout


def test_pictures_of_the_default_folder(tmp_path):
    folder_of(tmp_path / "data", NVLINK2, **SMALL | {"fusions": "NONE"})
    ran = script("allreduce_perf_viz.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    names = {path.name for path in (tmp_path / "data" / "viz" / "NONE").iterdir()}
    assert names == {f"benchmark.tp2.sm90_{kind}.png" for kind in ("heatmap", "best_strategy", "strategy_difference_heatmap")}


@pytest.mark.parametrize("name", ["allreduce_heuristic_code_gen.py", "allreduce_perf_viz.py"])
def test_no_data(name, tmp_path):
    ran = script(name, "--data_dir", "nowhere", folder=tmp_path)
    assert ran.returncode == 1
    assert "nowhere holds no benchmark" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.iterdir())


def test_the_three_functions_by_name():
    spec = importlib.util.spec_from_file_location("allreduce_perf_viz", SCRIPTS / "allreduce_perf_viz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("visualize_2d_heatmap", "visualize_2d_best_strategy", "visualize_strategy_difference_heatmaps"):
        assert callable(getattr(module, name))
