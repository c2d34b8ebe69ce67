# SPDX-License-Identifier: Apache-2.0
"""The roof: the bytes that a step must read from memory, over the bandwidth that this machine's memory was measured at.

A round is one token for every running request. Each rank reads its slice of the weights once a round for every micro-batch, of
which a pipeline holds pp, so over the stages together a round reads weights / tp whatever pp is; and it reads the keys and values
of the requests. Activations, the embedding's few rows and every write are left out, so nothing passes the roof.

`python -m phalanx.bench.roofline` measures a GPU and prints JSON: in a process of its own, so that nothing of it stays on the GPU.
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
from phalanx.plan.layout import Layout
from phalanx.plan.weight_tensors import layer_bytes

_TIMEOUT = 180.0  # seconds for the process that measures a GPU: importing torch is most of it
_GPU_BYTES = 4 << 30
_CPU_BYTES = 256 << 20
_REPEATS = 5


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of one device's memory: the best of `ways` (way to move bytes -> its own). None: not measured, and why."""

    best: float | None
    ways: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        shown = {way: round(rate / 1e9, 1) for way, rate in self.ways.items()}
        return {"best_GBps": round(self.best / 1e9, 1), "ways_GBps": shown} if self.best else {"not_measured": self.why}


# ---- what must be read -----------------------------------------------------------------------------------------------


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of the weights that a token reads, all ranks together: every layer and the head, not the embedding.

    dtype: as `plan.weights.layer_bytes` takes it.
    """
    layers, _, head = layer_bytes(shape, dtype)
    return sum(layers) + head


def kv_token_bytes(facts: EngineFacts) -> float:
    """Bytes of one token's keys and values on the tp rank that holds most, all stages together, as the engine made its cache."""
    layout = _layout(facts)
    tokens = facts.num_blocks * facts.block_size
    stages = [0.0] * layout.pp
    for rank in facts.ranks:
        stage = layout.place(rank.rank).pp_index
        stages[stage] = max(stages[stage], rank.bytes.get("kv", 0) / tokens)
    return sum(stages)


def round_bytes(shape: ModelShape, facts: EngineFacts, requests: float, context: float) -> float:
    """Bytes that one memory must give for a round of so many requests at a mean context in tokens.

    On CPU all ranks share the host's memory, so it must give what all of them read.
    """
    layout = _layout(facts)
    weights = weight_bytes(shape, facts.dtype) / layout.tp
    keys = max(requests / layout.pp, 1) * attended_tokens(shape, context) * kv_token_bytes(facts)
    return (weights + keys) * (layout.world if facts.device.startswith("cpu") else 1)


def attended_tokens(shape: ModelShape, context: float) -> float:
    """Of so many tokens, those that a layer looks back over: its window at most; the mean over the layers."""
    windows = shape.windows or (None,)
    return sum(min(context, window or context) for window in windows) / len(windows)


def decode_seconds(shape: ModelShape, facts: EngineFacts, workload: Workload, bandwidth: float) -> float:
    """The least seconds for one token of each request of a decode workload."""
    return round_bytes(shape, facts, workload.requests, workload.mean_context) / bandwidth


def batch_seconds(shape: ModelShape, facts: EngineFacts, workload: Workload, bandwidth: float) -> float:
    """The least seconds for a batch workload: as many rounds as its tokens take with all the requests running that can run at once
    (by max_batch_size and by the KV cache). Reading the prompts is arithmetic rather than bytes, and counts nothing here."""
    room = facts.num_blocks * facts.block_size / workload.mean_context
    running = max(min(workload.requests, facts.max_batch_size, room), 1)
    rounds = workload.requests * workload.output_len / running
    return rounds * round_bytes(shape, facts, running, workload.mean_context) / bandwidth


def fraction(least: float | None, taken: float) -> float | None:
    """How much of the roof was reached, 1 being all; None where the bandwidth was not measured, or the time is below noise."""
    return least / taken if least is not None and taken > 0 else None


def _layout(facts: EngineFacts) -> Layout:
    return Layout(*facts.layout)


# ---- what the memory gives -------------------------------------------------------------------------------------------


def measure(device: str) -> Bandwidth:
    """The memory bandwidth of the first GPU ("cuda") or of this host ("cpu"). Takes seconds. Never raises: says why it failed."""
    try:
        ways = _host() if device == "cpu" else _in_a_process()
    except (OSError, ValueError, MemoryError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        return Bandwidth(None, why=f"{type(error).__name__}: {said.splitlines()[-1] if said else ''}")
    return Bandwidth(max(ways.values()), ways)


def _in_a_process() -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "phalanx.bench.roofline"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT)
    return {str(way): float(rate) for way, rate in json.loads(done.stdout).items()}


def _host(size: int = _CPU_BYTES) -> dict[str, float]:
    """Copy by every core: bytes read and written per second."""
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
    """Copy (bytes read and written), and three ways to read only: a sum, a maximum, a matrix times a vector."""
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
    """The fastest of a few, on the device's clock."""
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
