# SPDX-License-Identifier: Apache-2.0
"""The fit finds coefficients that made the points; a specification of this host's CPU is of this host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.bench.prediction import calibrate
from phalanx.bench.prediction.calibrate import Point
from phalanx.hardware import catalogue
from phalanx.plan import cost, subject


def test_the_fit_finds_what_made_the_points():
    shape, spec = subject.shape_for("llama-3-8b"), catalogue.gpu("H100")
    base = cost.coefficients_for(spec)[0]
    true = replace(base, e_bytes_16=base.e_bytes_16 * 0.8, c_layer=base.c_layer * 1.6, c_one=base.c_one * 1.3)
    true = replace(true, e_flops=base.e_flops * 0.9, tflops_per_watt=base.tflops_per_watt * 0.9, c_step=60.0, e_kv=base.e_kv * 0.8)
    points = [
        Point(kind, requests, calibrate.predicted(Point(kind, requests, 1.0), shape, "bf16", 2, spec, true))
        for requests in (1, 16, 64) for kind in ("prompt", "decode")
    ]  # fmt: skip
    before = [abs(calibrate.predicted(point, shape, "bf16", 2, spec, base) / point.seconds - 1) for point in points]
    fitted, error = calibrate.fit(points, shape, "bf16", 2, spec, base)
    assert sum(before) / len(before) > 0.1
    assert error < 0.02
    assert fitted.e_bytes_16 == pytest.approx(true.e_bytes_16, rel=0.05)


def test_a_specification_of_this_cpu():
    spec = calibrate._spec("cpu")
    assert (spec.name, spec.link, spec.fp8_flops) == ("CPU", "shm", None)
    assert 1e8 < spec.memory_bandwidth < 5e12
    assert 1e8 < spec.bf16_flops < 1e14
