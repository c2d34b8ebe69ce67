# SPDX-License-Identifier: Apache-2.0
"""Bandwidth and latency between each pair of devices, verified, in a process of its own: a hang there is named and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from phalanx.hardware.visible import VISIBLE

SECONDS_PER_DIRECTION = 5.0
START_SECONDS = 60.0
"""Importing torch and making a CUDA context on each device."""


@dataclass(frozen=True)
class Measured:
    """One direction of a pair. bytes_per_s: a plain copy; latency_s: a copy of 4 bytes; verified: every byte arrived."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float
    verified: bool
    failure: str = ""


@dataclass(frozen=True)
class Measurements:
    """All directions that were measured. failure: why no more were, "" where all were. hung: the direction that did not end."""

    pairs: tuple[Measured, ...] = ()
    failure: str = ""
    hung: tuple[int, int] | None = None

    def between(self, a: int, b: int) -> Measured | None:
        """The slower direction of a pair; None where it was not measured."""
        directions = [pair for pair in self.pairs if {pair.source, pair.target} == {a, b}]
        return min(directions, key=lambda pair: pair.bytes_per_s, default=None)


def measure(
    count: int,
    *,
    device: str = "cuda",
    quick: bool = False,
    command: list[str] | None = None,
    seconds: float | None = None,
    visible: str | None = None,
) -> Measurements:
    """Measure every direction between `count` devices. quick: a smaller copy. visible: CUDA_VISIBLE_DEVICES of the process that
    measures. command, seconds: for tests, that process and its time limit."""
    started = time.monotonic()
    order = [(a, b) for a in range(count) for b in range(count) if a != b]
    task = json.dumps({"count": count, "device": device, "quick": quick})
    limit = START_SECONDS + SECONDS_PER_DIRECTION * len(order)
    process = subprocess.Popen(
        command or [sys.executable, "-P", "-m", "phalanx.health.pair_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=None if visible is None else {**os.environ, VISIBLE: visible},
    )
    late = False
    try:
        out, err = process.communicate(task, timeout=limit if seconds is None else seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        late = True
    pairs = tuple(Measured(**json.loads(line)) for line in out.splitlines() if line.startswith("{"))
    if len(pairs) == len(order):
        return Measurements(pairs)
    a, b = order[len(pairs)]
    last = err.strip().splitlines()[-1] if err.strip() else f"its process ended with status {process.returncode}"
    reason = f"no answer within {time.monotonic() - started:.0f} s" if late else last
    return Measurements(pairs, f"the copy from device {a} to device {b} did not end: {reason}", (a, b) if late else None)


def line_of(pair: Measured) -> str:
    """One line of JSON, as the process writes it."""
    return json.dumps(asdict(pair))
