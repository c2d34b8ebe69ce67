# SPDX-License-Identifier: Apache-2.0
"""How long a start may take, and how much memory the ranks of a pod need: numbers of a manifest, each with its reason."""

from __future__ import annotations

import math
from typing import NamedTuple

from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.deploy.options import quantity
from phalanx.errors import OptionError
from phalanx.layout import Layout
from phalanx.layout.families import known
from phalanx.layout.weights import weight_bytes

PROBE_SECONDS = 10
"""Period of the probe of a start; the budget is a multiple of it."""
FIXED_SECONDS = 60.0
"""Start without reading weights: processes, kernels compiled for the first time, CUDA graphs. Committed starts with an empty cache
took 17 to 23 s (docs/serving.md); other machines compile on fewer cores."""
READ_BYTES_PER_SECOND = {"the Hub": 100e6, "a claim": 250e6, "a folder of the node": 1e9}
"""How fast weights arrive, low on purpose: a link of 1 Gbit/s; common network storage; an NVMe disk under load."""
SAFETY = 3
"""The budget is so many predicted starts: one that is killed shortly before it is ready begins again, and never ends."""
FLOOR_SECONDS = 600
UNKNOWN_SECONDS = 3600
"""Where the size of the model is not known without the network."""
MARGIN_SECONDS = 60
"""Beyond start_timeout: the engine's own error, which names what it waited for, comes before the kubelet's."""

GPU_SHM_BYTES_PER_RANK = 128 << 20
"""NCCL's buffers between two ranks without peer access, and its proxies' queues (as `health.checks.memory`)."""
CPU_SHM_BYTES_PER_RANK = 16 << 20
"""Chunks of `comm.shared_memory`."""


class StartupBudget(NamedTuple):
    seconds: int
    reason: str


def startup(engine: EngineOptions, source: str) -> StartupBudget:
    """Seconds that a start may take. source: where the weights come from, a key of READ_BYTES_PER_SECOND, or "" for the image."""
    floor = max(FLOOR_SECONDS, _tens(engine.start_timeout + MARGIN_SECONDS))
    size = checkpoint_bytes(engine)
    if engine.load_format == "dummy" or not source:
        size = 0
    if size is None:
        return StartupBudget(max(floor, UNKNOWN_SECONDS), "the size of the model is not known without the network")
    reading = size / READ_BYTES_PER_SECOND[source] if source else 0.0
    seconds = _tens(SAFETY * (FIXED_SECONDS + reading))
    rate = f" + {size / 1e9:.1f} GB at {READ_BYTES_PER_SECOND[source] / 1e6:.0f} MB/s from {source}" if size else ""
    reason = f"{SAFETY} x ({FIXED_SECONDS:.0f} s{rate})"
    return StartupBudget(max(floor, seconds), reason + ("" if seconds >= floor else f", at least {floor} s"))


def checkpoint_bytes(engine: EngineOptions) -> int | None:
    """Bytes of the checkpoint's weights, before any quantization on load; None where they are not known without the network."""
    config = known(engine.model.rstrip("/").rpartition("/")[2]) or known(engine.model)
    if engine.model == "demo":
        return 0
    if config is None:
        return None
    shape = ModelShape.from_config(config, file=f"config.json of {engine.model}")
    return sum(weight_bytes(shape, "bf16" if shape.dtype == "fp32" else shape.dtype, Layout()))


def shm_bytes(ranks: int, *, gpu: bool) -> int:
    """Bytes of /dev/shm for the ranks of one pod: a multiple of 1 GiB on GPUs, of 64 MiB on CPU."""
    unit = 1 << 30 if gpu else 64 << 20
    return math.ceil(ranks * (GPU_SHM_BYTES_PER_RANK if gpu else CPU_SHM_BYTES_PER_RANK) / unit) * unit


def shm_quantity(ranks: int, *, gpu: bool) -> str:
    size = shm_bytes(ranks, gpu=gpu)
    return f"{size >> 30}Gi" if gpu else f"{size >> 20}Mi"


def require_memory(memory: str | None, shm: str, engine: EngineOptions) -> None:
    """Raise OptionError where a container's limit has no room for what counts towards it. shm: the size of /dev/shm."""
    if memory is None:
        return
    if quantity(memory) <= quantity(shm):
        raise OptionError(f"memory={memory} is not above shm_size={shm}", why="/dev/shm counts towards it")
    kept = 0 if engine.kv_host_memory == "auto" else engine.kv_host_memory
    if quantity(memory) <= quantity(shm) + kept:
        raise OptionError(
            f"memory={memory} is not above shm_size={shm} and kv_host_memory={kept:,} together", why="both count towards it",
            next="raise memory, or lower kv_host_memory",
        )  # fmt: skip


def _tens(seconds: float) -> int:
    return math.ceil(seconds / PROBE_SECONDS) * PROBE_SECONDS
