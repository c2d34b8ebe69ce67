# SPDX-License-Identifier: Apache-2.0
"""Synthetic benchmarks: times from a latency model, with repeatable noise."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.seed import Seed, default
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune import records
from phalanx.tune.records import Benchmark
from phalanx.tune.sweep import GEMM_ALL_REDUCE, Sweep, Task

NVLINK2 = Fingerprint(90, "nvlink", 2)


def bench(fingerprint: Fingerprint = NVLINK2, *, noise: float = 0.005, **sweep) -> Benchmark:
    rng = random.Random(str(fingerprint))
    sweep.setdefault("fusions", "NONE,RESIDUAL_RMS_NORM")
    sweep.setdefault("strategies", "NCCL,ONESHOT,TWOSHOT")
    plan = Sweep.from_text(fingerprint, **sweep)
    seed = default(fingerprint)
    result = Benchmark(fingerprint.sm, fingerprint.world, {}, grid=plan.grid(), link=fingerprint.link, facts={"gpu": "synthetic"})
    for task in plan.plan()[0]:
        us = model_us(task, seed)
        result.samples[task] = [round(us * (1 + rng.gauss(0, noise)), 3) for _ in range(9)]
        result.times[task] = round(statistics.median(result.samples[task]), 3)
    return result


def model_us(task: Task, seed: Seed) -> float:
    """RS_NORM_AG: a slower start than TWOSHOT's, and a faster wire. A GEMM takes 1 us per 64 KiB; GEMM_RS saves a tenth of all and
    costs 20 us."""
    gemm = task.bytes / 65536 if task.op == GEMM_ALL_REDUCE else 0.0
    models = seed.models[task.fusion]
    if task.choice in models:
        return models[task.choice].us(task.tokens, task.bytes) + gemm
    sharded = 1.0 + 0.8 * models[Choice(Strategy.TWOSHOT)].us(task.tokens, task.bytes) + gemm
    return sharded if task.choice.strategy is Strategy.RS_NORM_AG else 20.0 + 0.9 * sharded


def folder_of(path: Path, *fingerprints: Fingerprint, **sweep) -> Path:
    for fingerprint in fingerprints:
        records.write(bench(fingerprint, **sweep), path)
    return path


SMALL = {"tokens": "1,16,256", "hidden": "128,8192"}
LAYERS = "NCCL,ONESHOT,TWOSHOT,RS_NORM_AG,GEMM_RS"
FUSIONS = tuple(Fusion)
