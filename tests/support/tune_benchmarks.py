# SPDX-License-Identifier: Apache-2.0
"""Made-up benchmarks for the tests of this room: times from a latency model, with repeatable noise."""

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
    dice = random.Random(str(fingerprint))
    sweep.setdefault("fusions", "NONE,RESIDUAL_RMS_NORM")
    plan = Sweep.of(fingerprint, **sweep)
    seed = default(fingerprint)
    found = Benchmark(fingerprint.sm, fingerprint.world, {}, grid=plan.grid(), link=fingerprint.link, facts={"gpu": "made up"})
    for task in plan.plan()[0]:
        us = seed.models[task.fusion][task.choice].us(task.tokens, task.bytes)
        found.samples[task] = [round(us * (1 + dice.gauss(0, noise)), 3) for _ in range(9)]
        found.times[task] = round(statistics.median(found.samples[task]), 3)
    return found


def folder_of(path: Path, *fingerprints: Fingerprint, **sweep) -> Path:
    for fingerprint in fingerprints:
        records.write(bench(fingerprint, **sweep), path)
    return path


SMALL = {"tokens": "1,16,256", "hidden": "128,8192"}
FUSIONS = tuple(Fusion)
