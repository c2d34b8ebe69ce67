# SPDX-License-Identifier: Apache-2.0
"""Synthetic benchmarks: times from a latency model, with repeatable noise."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.seed import default
from phalanx.tune import records
from phalanx.tune.records import Benchmark
from phalanx.tune.sweep import Sweep

NVLINK2 = Fingerprint(90, "nvlink", 2)


def bench(fingerprint: Fingerprint = NVLINK2, *, noise: float = 0.005, **sweep) -> Benchmark:
    rng = random.Random(str(fingerprint))
    sweep.setdefault("fusions", "NONE,RESIDUAL_RMS_NORM")
    plan = Sweep.from_text(fingerprint, **sweep)
    seed = default(fingerprint)
    result = Benchmark(fingerprint.sm, fingerprint.world, {}, grid=plan.grid(), link=fingerprint.link, facts={"gpu": "synthetic"})
    for task in plan.plan()[0]:
        us = seed.models[task.fusion][task.choice].us(task.tokens, task.bytes)
        result.samples[task] = [round(us * (1 + rng.gauss(0, noise)), 3) for _ in range(9)]
        result.times[task] = round(statistics.median(result.samples[task]), 3)
    return result


def folder_of(path: Path, *fingerprints: Fingerprint, **sweep) -> Path:
    for fingerprint in fingerprints:
        records.write(bench(fingerprint, **sweep), path)
    return path


SMALL = {"tokens": "1,16,256", "hidden": "128,8192"}
FUSIONS = tuple(Fusion)
