# SPDX-License-Identifier: Apache-2.0
"""The roofline: the bytes that a step must read from memory, over the measured bandwidth of this machine's memory.

A round is one token for every running request. Each rank reads its slice of the weights once a round for every micro-batch. A
pipeline holds pp micro-batches, so all stages together read weights / tp in a round, whatever pp is. Of routed experts it reads
those that its tokens reach, averaged over uniform routing. A round also reads the keys and values of the requests. Activations,
the few rows of the embedding and all writes are left out, so no measurement exceeds the roofline.

`python -m phalanx.bench.roofline` measures a GPU and prints JSON: in a process of its own, so that no memory stays allocated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from phalanx.bench.workloads import Workload
from phalanx.config.model import ModelShape
from phalanx.engine.messages import EngineFacts
from phalanx.hardware import probe
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache
from phalanx.layout.layout import Layout
from phalanx.layout.memory import tokens_kept
from phalanx.layout.weights import expert_bytes, itemsize, kind_of, layer_bytes

_TIMEOUT = 180.0  # seconds for the process that measures a GPU: importing torch is most of it
_GPU_BYTES = 4 << 30
_CPU_BYTES = 256 << 20
_REPEATS = 5


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of one device's memory. best: the highest of `ways` (way to move bytes -> bandwidth); None: not measured,
    for the reason `why`."""

    best: float | None
    ways: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        shown = {way: round(rate / 1e9, 1) for way, rate in self.ways.items()}
        return {"best_GBps": round(self.best / 1e9, 1), "ways_GBps": shown} if self.best else {"not_measured": self.why}


# ---- bytes -----------------------------------------------------------------------------------------------------------


def weight_bytes(shape: ModelShape, dtype: str, tokens: float = 1) -> float:
    """Bytes of the weights that a step of so many tokens reads, all ranks together: every layer, of routed experts those that are
    reached, and the output head, not the embedding.

    dtype: as `layout.weights.layer_bytes` takes it.
    """
    head = (shape.vocab_size + 1) * shape.hidden_size * itemsize(dtype)
    total = float(sum(layer_bytes(shape, layer, dtype, Layout()) for layer in kind_of(shape)) + head)
    if shape.experts is None:
        return total
    return total - (1 - shape.experts.touched(tokens) / shape.experts.count) * expert_bytes(shape, dtype)


def kv_tokens(shape: ModelShape, facts: EngineFacts, length: float) -> int:
    """KV tokens of the engine in requests of this length: where layers have windows, short requests take more blocks a token."""
    parts, windows = facts.layout.replicas * facts.layout.dp, group_windows(model_cache(shape))
    return parts * tokens_kept(windows, facts.num_blocks // parts, facts.block_size, max(round(length), 1))


def kv_token_bytes(shape: ModelShape, facts: EngineFacts) -> float:
    """Bytes of one token's keys and values in the engine's cache, on the tp rank that holds most, all stages together: in a block
    of each group of layers."""
    layout = facts.layout
    groups = len(group_windows(model_cache(shape)))
    tokens = facts.num_blocks // (facts.layout.replicas * layout.dp) * facts.block_size / groups
    stages = [0.0] * layout.pp
    for rank in facts.ranks:
        stage = layout.place(rank.rank).pp_index
        stages[stage] = max(stages[stage], rank.bytes.get("kv", 0) / tokens)
    return sum(stages)


def round_bytes(shape: ModelShape, facts: EngineFacts, requests: float, context: float) -> float:
    """Bytes that one device reads for a round of `requests` requests, split evenly over the replicas, at a mean context in tokens.

    On CPU all ranks share the host's memory, so the bytes of all ranks count.
    """
    layout = facts.layout
    rows = max(requests / facts.layout.replicas / layout.pp / layout.dp, 1)
    weights = weight_bytes(shape, facts.dtype, rows * layout.dp) / layout.tp
    if shape.experts is not None and layout.dp > 1:  # tokens of all dp indices reach a rank's experts, which are 1/dp of them
        reached = expert_bytes(shape, facts.dtype) * shape.experts.touched(rows * layout.dp) / shape.experts.count
        weights -= reached * (1 - 1 / layout.dp) / layout.tp
    keys = rows * attended_tokens(shape, context) * kv_token_bytes(shape, facts)
    return (weights + keys) * (layout.gpus if facts.device.startswith("cpu") else 1)


def attended_tokens(shape: ModelShape, context: float) -> float:
    """Tokens of a context that a layer attends to: its window at most. The mean over the layers."""
    windows = shape.windows or (None,)
    return sum(min(context, window or context) for window in windows) / len(windows)


def decode_seconds(shape: ModelShape, facts: EngineFacts, workload: Workload, bandwidth: float) -> float:
    """The fewest seconds for one token of each request of a decode workload."""
    return round_bytes(shape, facts, workload.requests, workload.mean_context) / bandwidth


def batch_seconds(shape: ModelShape, facts: EngineFacts, workload: Workload, bandwidth: float) -> float:
    """The fewest seconds for a batch workload: as many rounds as its tokens take with as many requests as can run at once (by
    max_batch_size and by the KV cache). Prefill is bound by arithmetic rather than by bytes, and is not counted."""
    capacity = kv_tokens(shape, facts, workload.mean_context) / workload.mean_context
    running = max(min(workload.requests, facts.max_batch_size, capacity), 1)
    rounds = workload.requests * workload.output_len / running
    return rounds * round_bytes(shape, facts, running, workload.mean_context) / bandwidth


def fraction(least: float | None, taken: float) -> float | None:
    """The fraction of the roofline that was reached; None where the bandwidth was not measured, or the time is below noise."""
    return least / taken if least is not None and taken > 0 else None


# ---- bandwidth --------------------------------------------------------------------------------------------------------


def measure(device: str) -> Bandwidth:
    """The memory bandwidth of the first GPU ("cuda") or of this host ("cpu"). Takes seconds. Never raises: see `why`."""
    try:
        ways = _host() if device == "cpu" else _in_a_process()
    except (OSError, ValueError, MemoryError, subprocess.SubprocessError) as error:
        message = (getattr(error, "stderr", "") or str(error)).strip()
        return Bandwidth(None, why=f"{type(error).__name__}: {message.splitlines()[-1] if message else ''}")
    return Bandwidth(max(ways.values()), ways)


def _in_a_process() -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "phalanx.bench.roofline"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT)
    return {str(way): float(rate) for way, rate in json.loads(run.stdout).items()}


def _host(size: int = _CPU_BYTES) -> dict[str, float]:
    """A copy by all cores: bytes read and written per second."""
    import numpy

    cores = probe.cores()
    source = [numpy.ones(size // cores // 8, dtype=numpy.int64) for _ in range(cores)]
    target = [numpy.empty_like(part) for part in source]
    with ThreadPoolExecutor(cores) as pool:

        def copy() -> float:
            begin = time.perf_counter()
            list(pool.map(numpy.copyto, target, source))
            return time.perf_counter() - begin

        copy()  # touches every page of the target
        seconds = min(copy() for _ in range(_REPEATS))
    return {"copy": 2 * sum(part.nbytes for part in source) / seconds}


def _gpu(size: int = _GPU_BYTES) -> dict[str, float]:
    """A copy (bytes read and written), and three ways to read only: a sum, a maximum, a matrix times a vector."""
    import torch

    size = min(size, torch.cuda.mem_get_info()[0] // 4)
    source = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    matrix = source.view(torch.bfloat16)
    matrix = matrix[: matrix.numel() // 8192 * 8192].view(-1, 8192)
    vector = torch.zeros(8192, dtype=torch.bfloat16, device="cuda")
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        "sum": (source.sum, source.nbytes),
        "maximum": (source.max, source.nbytes),
        "matrix_vector": (lambda: torch.mv(matrix, vector), matrix.nbytes),
    }
    return {way: moved / _gpu_seconds(move) for way, (move, moved) in ways.items()}


def _gpu_seconds(move: Callable[[], Any]) -> float:
    """The fastest of a few runs, by events on the device."""
    import torch

    move()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        move()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(_gpu()))
