# SPDX-License-Identifier: Apache-2.0
"""The picture is drawn whatever ran."""

from __future__ import annotations

import pytest

from phalanx.bench import plots, scaling
from phalanx.errors import OptionError, PhalanxError

ENGINE = {"dtype": "fp8", "device": "cuda:0"}


def row(tp, pp, status="ok", rate=100.0):
    completed = {"tp": tp, "pp": pp, "gpus": tp * pp, "nodes": 1, "status": status}
    return {**completed, "output_tok_s": rate, "tpot_ms": 9.0, "engine": ENGINE} if status == "ok" else {**completed, "why": "x"}


def report_of(rows):
    return {
        "about": {"machine": {"cpu": "a CPU", "gpus": ["a GPU"]}}, "rows": scaling.with_efficiency(rows),
        "asked": {"model": "m", "workloads": ["batch-1x1x1", "decode-1", "decode-64"]},
    }  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [row(1, 1), row(2, 1, rate=180.0), row(2, 2, rate=500.0), row(8, 1, "no GPUs")],
        [row(1, 1, "OOM"), row(2, 1, "failed"), row(4, 1)],
        [row(1, 1, "OOM")],
    ],
)
def test_a_picture(rows, tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert plots.can_draw()
    plots.draw(report_of(rows), tmp_path / "new" / "s.png")
    with image.open(tmp_path / "new" / "s.png") as drawn:
        assert drawn.size[0] > drawn.size[1] > 400
        assert len(drawn.convert("RGB").getcolors(1 << 20)) > 10


def test_where_it_is_drawn(tmp_path):
    report = tmp_path / "s.json"
    assert plots.plot_path(None, None) is None
    assert plots.plot_path(None, report) == tmp_path / "s.png"
    picture = tmp_path / "mine.PDF"
    assert plots.plot_path(str(picture), report) == picture
    picture.write_text("of the last time")
    assert plots.plot_path(str(picture), None) == picture
    (tmp_path / "s.png").write_text("x")
    with pytest.raises(OptionError, match="a file is there, and would be lost"):
        plots.plot_path(None, report)
    report.write_text("{}")  # what the report is extended, the picture is drawn anew
    assert plots.plot_path(None, report) == tmp_path / "s.png"


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ("x.foo", r"the suffix '\.foo' names no image format; use one of .*pdf.*png"),
        ("x", "the suffix '' names no image format"),
        ("/proc/x.png", "No such file or directory"),
        (".", "the suffix '' names no image"),
        ("folder.png", "that is a folder"),
        ("s.png", "the report is written there, too"),
    ],
)
def test_a_picture_that_cannot_be_drawn(plot, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OptionError, match=message):
        plots.plot_path(plot, tmp_path / "s.png")


def test_a_picture_that_fails_later(tmp_path):
    (tmp_path / "plain").write_text("x")
    with pytest.raises(PhalanxError, match=r"the plot cannot be drawn to .*s.png'; its folder is a file; "):
        plots.draw(report_of([row(1, 1)]), tmp_path / "plain" / "s.png")
