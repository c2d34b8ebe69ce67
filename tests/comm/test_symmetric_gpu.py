# SPDX-License-Identifier: Apache-2.0
"""All-reduce on GPUs equals the oracles: odd shapes, graphs with skewed ranks, several groups, every fusion and dtype."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = (
    "sums", "strange_values", "fusions", "large_fusion", "graph", "two_groups", "pairs", "picked", "unscaled",
    "unscaled_from_products",
)  # fmt: skip


def run(count: int, check: str) -> None:
    """In processes of their own, so that a rank that waits for ever ends with its test."""
    script = Path(__file__).with_name("allreduce_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), str(script), check]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"ok {check}" in ran.stdout


@pytest.mark.gpu2
@pytest.mark.parametrize("check", CHECKS)
def test_two_gpus(check: str) -> None:
    run(2, check)


@pytest.mark.gpu4
@pytest.mark.parametrize("check", CHECKS)
def test_four_gpus(check: str) -> None:
    run(4, check)
