# SPDX-License-Identifier: Apache-2.0
"""The picture is drawn whatever ran."""

from __future__ import annotations

import pytest

from phalanx.bench import drawing, scaling

ENGINE = {"dtype": "fp8", "device": "cuda:0"}


def row(tp, pp, status="ok", rate=100.0):
    found = {"tp": tp, "pp": pp, "gpus": tp * pp, "nodes": 1, "status": status}
    return {**found, "output_tok_s": rate, "tpot_ms": 9.0, "engine": ENGINE} if status == "ok" else {**found, "why": "x"}


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
    document = {
        "about": {"machine": {"cpu": "a CPU", "gpus": ["a GPU"]}}, "rows": scaling.with_efficiency(rows),
        "asked": {"model": "m", "workloads": ["batch-1x1x1", "decode-1", "decode-64"]},
    }  # fmt: skip
    assert drawing.can_draw()
    drawing.draw(document, tmp_path / "new" / "s.png")
    with image.open(tmp_path / "new" / "s.png") as drawn:
        assert drawn.size[0] > drawn.size[1] > 400
        assert len(drawn.convert("RGB").getcolors(1 << 20)) > 10
