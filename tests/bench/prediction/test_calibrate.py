# SPDX-License-Identifier: Apache-2.0
"""The fit finds coefficients that made the points; a specification of this host's CPU is of this host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.bench.prediction import calibrate
from phalanx.bench.prediction.calibrate import Point
from phalanx.hardware import catalogue
from phalanx.hardware.catalogue import GpuSpec
from phalanx.planner import cost, subject

pytestmark = pytest.mark.usefixtures("forked_python")


def test_the_fit_finds_what_made_the_points():
    shape, spec = subject.shape_for("llama-3-8b"), catalogue.gpu("H100")
    base = cost.coefficients_for(spec)[0]
    true = replace(
        base, e_bytes_16=base.e_bytes_16 * 0.8, c_layer=base.c_layer * 1.6, c_one=base.c_one * 1.3, c_few=base.c_few * 1.6
    )
    true = replace(true, e_flops=base.e_flops * 0.9, tflops_per_watt=base.tflops_per_watt * 0.9, c_step=60.0, e_kv=base.e_kv * 0.8)
    sizes = [(kind, lengths) for kind, lengths in calibrate._SIZES if len(lengths) <= 64]
    points = [
        Point(kind, lengths, calibrate.predicted(Point(kind, lengths, 1.0), shape, "bf16", "bf16", spec, true))
        for kind, lengths in sizes
    ]
    before = [abs(calibrate.predicted(point, shape, "bf16", "bf16", spec, base) / point.seconds - 1) for point in points]
    fitted, error = calibrate.fit(points, shape, "bf16", "bf16", spec, base)
    assert sum(before) / len(before) > 0.1
    assert error < 0.01
    assert fitted.e_bytes_16 == pytest.approx(true.e_bytes_16, rel=0.05)


def test_a_cpu_has_no_graphs_and_pays_for_calls_of_other_sizes():
    spec = GpuSpec("CPU", 0, 1 << 34, 1e10, 5e10, None, "shm", 1e10, 1e10, None, 1)
    shape, base = subject.shape_for("demo"), replace(cost.coefficients_for(catalogue.gpu("H100"))[0], c_eager=0.0, c_call=20.0)
    chain = {"c_layer": 300.0, "c_few": 300.0 * base.c_few / base.c_layer, "c_one": 250.0}
    true = replace(base, e_kv=base.e_kv * 0.1, e_prompt=base.e_prompt * 3, c_call=90.0, c_step=400.0, **chain)
    points = [
        Point(kind, lengths, calibrate.predicted(Point(kind, lengths, 1.0), shape, "fp32", "fp32", spec, true))
        for kind, lengths in calibrate._SIZES
    ]
    fitted, error = calibrate.fit(points, shape, "fp32", "fp32", spec, base)
    assert error < 0.01
    assert fitted.e_kv == pytest.approx(true.e_kv, rel=0.1)
    assert fitted.c_call == pytest.approx(true.c_call, rel=0.3)


def test_points_of_the_demo_on_this_host_and_what_a_call_takes_beside_them():
    """An engine of its own; figures of a busy machine are not judged, but they must be there."""
    document = calibrate.measure("demo", "cpu", seconds=4.0)
    kinds = {point["kind"] for point in document["points"]}
    assert "decode" in kinds
    assert document["round_trip_s"] >= 0
    assert document["gpu"]["name"] == "CPU"
    assert "a call beside its steps" in calibrate.text(document)


def test_a_specification_of_this_cpu():
    spec = calibrate._spec("cpu")
    assert (spec.name, spec.link, spec.fp8_flops) == ("CPU", "shm", None)
    assert 1e8 < spec.memory_bandwidth < 5e12
    assert 1e8 < spec.bf16_flops < 1e14
