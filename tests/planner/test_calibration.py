# SPDX-License-Identifier: Apache-2.0
"""What a calibration kept is what the next plan takes; a faulty file is named."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from phalanx.errors import TableError
from phalanx.hardware import catalogue
from phalanx.planner import calibration, cost, subject


def test_installed_coefficients_win_and_are_called_measured(tmp_path, monkeypatch):
    base = cost.coefficients_for(catalogue.gpu("H100"))[0]
    coefficients = replace(base, e_bytes=0.9)
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path)
    assert calibration.installed("H100") is None
    path = calibration.install("H100", coefficients, {"points": []})
    assert path.parent == tmp_path
    assert calibration.installed("H100") == coefficients
    machine, _ = subject.machine_for("H100")
    assert (machine.coefficients, machine.known) == (coefficients, "measured")
    assert subject.machine_for("h100")[0].known == "measured"
    path.write_text("{}")
    with pytest.raises(TableError, match="calibrate again"):
        calibration.installed("H100")


def test_a_machine_that_the_catalogue_does_not_hold(tmp_path, monkeypatch):
    spec = replace(catalogue.gpu("H100"), name="CPU", sm=0, link="shm", fp8_flops=None, power=None, gpus_per_node=1)
    gpu_values = {name: value for name, value in asdict(spec).items() if name != "sources"}
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path)
    calibration.install("CPU", cost.coefficients_for(spec)[0], {"gpu": gpu_values})
    for name in ("CPU", "cpu"):
        machine, _ = subject.machine_for(name)
        assert (machine.gpu, machine.known) == (spec, "measured")


def test_a_calibration_without_later_coefficients_is_read(tmp_path):
    """Coefficients that came later have defaults: what a host measured before stays."""
    values = asdict(cost.coefficients_for(catalogue.gpu("H200"))[0])
    del values["c_latent"], values["mxfp4"]
    (tmp_path / "H200.json").write_text(json.dumps({"coefficients": values}))
    installed = calibration.installed("H200", tmp_path)
    assert (installed.c_latent, installed.mxfp4) == (0.0, 1.0)
