# SPDX-License-Identifier: Apache-2.0
"""Rows with owners on GPUs: the bits of the unfused kernels and of two-shot, in chunks, in graphs with skewed ranks, in a chain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = ("shapes", "launches", "chunks", "strange_values", "graph", "picked")
ROOT = Path(__file__).parents[3]


def run(count: int, check: str) -> None:
    """In processes of their own, so that a rank that waits for ever ends with its test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", "tests.comm.rows.owned_rank"]
    ran = subprocess.run([*command, check], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
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
