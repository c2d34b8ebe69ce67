# SPDX-License-Identifier: Apache-2.0
"""Every picture lies where it is looked for; the report needs nothing beside it."""

from __future__ import annotations

import base64
import re

import pytest

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune import html_report, plots, records
from phalanx.tune.sweep import Task
from tests.support.tune_benchmarks import LAYERS, NVLINK2, SMALL, bench, folder_of

PLAIN = ["NCCL", "ONESHOT", "TWOSHOT", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED", "RS_NORM_AG"]


def test_pictures_and_report(tmp_path):
    benchmark = bench(NVLINK2, **SMALL)
    benchmark.skips[Task("bf16", Fusion.NONE, 2, 128, Choice(Strategy.ONESHOT))] = "<it hangs>"
    records.write(benchmark, tmp_path)
    folder_of(tmp_path, Fingerprint(0, "shm", 4), **SMALL | {"fusions": "NONE"})
    files = []
    paths = html_report.draw(tmp_path, files.append)
    kinds = ("heatmap", "best_strategy", "strategy_difference_heatmap")
    expected = [f"viz/NONE/benchmark.tp4.sm0_{kind}.png" for kind in kinds]
    expected += [f"viz/{fusion}/benchmark.tp2.sm90_{kind}.png" for fusion in ("NONE", "RESIDUAL_RMS_NORM") for kind in kinds]
    assert [str(path.relative_to(tmp_path)) for path in paths] == [*expected, "viz/report.html"]
    assert files == [str(path) for path in paths[:-1]]
    page = paths[-1].read_text(encoding="utf-8")
    embedded = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert embedded == [path.read_bytes() for path in paths[:-1]]
    assert not re.search(r'(src|href)="(?!data:)', page)
    for words in ("sm90.nvlink.tp2", "sm0.shm.tp4", "GLOO", "regret of the seed", "us per MiB", "&lt;it hangs&gt;", "synthetic"):
        assert words in page


def test_layers_with_their_gemm_have_pictures_of_their_own(tmp_path):
    size = {"tokens": "16,256", "hidden": "1024", "fusions": "RESIDUAL_RMS_NORM"}
    folder_of(tmp_path, NVLINK2, strategies=LAYERS, **size)
    paths = html_report.draw(tmp_path)
    kinds = ("heatmap", "best_strategy", "strategy_difference_heatmap")
    stem = "viz/RESIDUAL_RMS_NORM/benchmark.tp2.sm90"
    expected = [f"{stem}{op}_{kind}.png" for op in ("", "_gemm") for kind in kinds]
    assert [str(path.relative_to(tmp_path)) for path in paths] == [*expected, "viz/report.html"]
    page = paths[-1].read_text(encoding="utf-8")
    rows = re.findall(r"<tr><td>RESIDUAL_RMS_NORM</td><td>(\w+)</td><td>(\d+)</td><td>([^<]+)</td>", page)
    assert [(caller, cells) for caller, cells, _ in rows] == [("replicated", "2"), ("sharded", "2"), ("gemm", "1")]
    assert "RESIDUAL_RMS_NORM with its GEMM bfloat16: heatmap" in page
    frame = plots.read_frame(records.csv_path(tmp_path, 2, 90))
    names = [
        axes.get_title(loc="left") for axes in plots.visualize_2d_heatmap(frame, "RESIDUAL_RMS_NORM", op="gemm_all_reduce").axes
    ]
    assert names[:7] == [f"GEMM+{name}" for name in PLAIN] + ["GEMM_RS"]
    names = [axes.get_title(loc="left") for axes in plots.visualize_2d_heatmap(frame, "RESIDUAL_RMS_NORM").axes]
    assert names[:6] == PLAIN


def test_two_dtypes_have_two_pictures(tmp_path):
    one, two = bench(NVLINK2, **SMALL, dtype="bf16"), bench(NVLINK2, **SMALL, dtype="fp32")
    one.times |= two.times
    records.write(one, tmp_path)
    names = {path.name for path in html_report.draw(tmp_path)}
    assert {"benchmark.tp2.sm90_heatmap.png", "benchmark.tp2.sm90.float32_heatmap.png"} <= names


def test_a_faulty_folder_draws_nothing(tmp_path):
    folder_of(tmp_path, NVLINK2, **SMALL)
    (tmp_path / "benchmark.tp4.sm90.csv").write_text("", encoding="utf-8")
    with pytest.raises(TableError, match=r"benchmark\.tp4\.sm90\.csv is empty"):
        html_report.draw(tmp_path)
    assert not (tmp_path / "viz").exists()
