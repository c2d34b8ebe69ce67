# SPDX-License-Identifier: Apache-2.0
"""On one GPU with capped memory: a start that runs out of memory names a remedy, and with it the same start succeeds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from phalanx.bench.shapes import write
from tests.support.health_subject import ROOT

FREE_BYTES = 14_000_000_000
"""Left to the model: 8B takes 18 GB in 16 bit, and 11 GB in FP8."""

HOLDER = f"""
import time, torch
free = torch.cuda.mem_get_info()[0]
kept = torch.empty(free - {FREE_BYTES}, dtype=torch.uint8, device="cuda")
print("kept", flush=True)
time.sleep(600)
"""


@pytest.fixture
def capped():
    """A process that has all but FREE_BYTES of the GPU."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "kept"
    yield
    process.kill()
    process.wait()
    process.stdout.close()


def generate(folder, *flags: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "generate",
        str(folder),
        "--prompt",
        "Hello",
        "--max_tokens",
        "3",
        "--load_format",
        "dummy",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False, timeout=280, env=environment)


@pytest.mark.alone  # it takes the GPU's memory
@pytest.mark.gpu1
@pytest.mark.timeout(600)
def test_following_the_first_remedy_on_a_gpu(capped, tmp_path):
    folder = write("llama-3-8b", tmp_path / "model")
    failed = generate(folder)
    assert failed.returncode == 1, failed.stderr[-2000:]
    remedies = re.findall(rf"`phalanx serve {re.escape(str(folder))} (--[^`]+)`", failed.stderr)
    assert remedies, failed.stderr[-2000:]
    again = generate(folder, *remedies[0].split())
    assert again.returncode == 0, again.stderr[-2000:]
