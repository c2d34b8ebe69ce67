# SPDX-License-Identifier: Apache-2.0
"""What the script records is read as what it recorded."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from phalanx.health import devices
from tests.support.health_nvml import RecordedNvml

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests/support/recordings/nvml_h200x2.json"


def test_a_recording_of_a_recording_is_the_same_machine() -> None:
    recorder = runpy.run_path(str(ROOT / "scripts/nvml_probe.py"))["Recorder"](RecordedNvml.of_file(RECORDING))
    machine = devices.read(recorder)
    assert len(machine.gpus) == 2
    calls = json.loads(json.dumps(recorder.calls))
    assert any("error" in call for call in calls)
    assert {"gpu": 1} in [arg for call in calls for arg in call["args"]]
    again = devices.read(RecordedNvml(calls))
    assert again == machine
