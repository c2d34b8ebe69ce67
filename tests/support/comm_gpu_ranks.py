# SPDX-License-Identifier: Apache-2.0
"""Checks that need several GPUs: modules that torchrun starts once a rank."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def run(count: int, module: str, check: str) -> None:
    """One check of a module on so many ranks, in processes of their own: a rank that waits for ever ends with its test."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]  # standalone: on a port that is free
    command = [sys.executable, "-m", *launch, "-m", module, check]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"ok {check}" in ran.stdout


def replayed(body: Callable[[], None], rank: int, between: Callable[[int], None]) -> None:
    """Do `body`, capture it, and replay that 1,000 times on ranks that sleep at random, each by itself; now and then `between`,
    given the number of the replay, on all ranks alike."""
    body()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        body()
    maker = random.Random(rank)
    for replay in range(1000):
        if maker.random() < 0.3:
            torch.cuda._sleep(maker.randrange(200_000))
        if maker.random() < 0.05:
            time.sleep(maker.random() * 0.002)
        captured.replay()
        if replay % 97 == 0:
            between(replay)
    torch.cuda.synchronize()
