# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: a timer of CUDA graphs, compilation of kernels before they are timed, the sizes of the GEMMs of
published models, and one way to keep a figure.

Benchmarks are modules: run them from the repository's root as `python -m benchmarks.kernels.gemm`, with Phalanx installed or with
PYTHONPATH=src. benchmarks/README.md lists them.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.bench import shapes
from phalanx.config.model import ModelShape
from phalanx.hardware import provenance
from phalanx.hardware.probe import cores
from phalanx.layout.shard import heads, in_runs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# ---- sizes -----------------------------------------------------------------------------------------------------------


def gemm_shapes(model: str, tp: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the four GEMMs of a decoder layer on one rank."""
    shape = ModelShape.from_config(shapes.SHAPES[model])
    rank = heads(shape.num_heads, shape.num_kv_heads, tp, 0)
    query, inner, hidden = len(rank.q) * shape.head_dim, shape.intermediate_size // tp, shape.hidden_size
    return {
        "qkv": (query + 2 * len(rank.kv) * shape.head_dim, hidden),
        "o": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


SHAPES = {
    "tp4": gemm_shapes("llama-3-70b", 4),
    "tp2": gemm_shapes("llama-3-70b", 2),
    "tp1": gemm_shapes("llama-3-70b", 1),
    "8b": gemm_shapes("llama-3-8b", 1),
}
"""Llama-3-70B on one of 4, 2 and 1 ranks, and Llama-3-8B: name of a GEMM -> (outputs, inputs)."""
LM_HEAD_8B = (128256, 4096)


class ExpertShape(NamedTuple):
    """A layer of experts on one rank, which has all of them. inner: intermediate features of this rank."""

    experts: int
    hidden: int
    inner: int
    top_k: int


EXPERT_SHAPES = {
    "mixtral-8x7b": ExpertShape(8, 4096, 14336, 2),
    "mixtral-8x7b-tp2": ExpertShape(8, 4096, 7168, 2),
    "mixtral-8x22b-tp2": ExpertShape(8, 6144, 8192, 2),
    "qwen3-30b": ExpertShape(128, 2048, 768, 8),
    "qwen3-235b-tp2": ExpertShape(128, 4096, 768, 8),
    "deepseek-v2-lite": ExpertShape(64, 2048, 1408, 6),
}


def _gpt_oss(experts: int, tp: int) -> ExpertShape:
    return ExpertShape(experts, 2880, len(in_runs("intermediate_size", 2880, 32, tp, 0)), 4)


BIASED_EXPERT_SHAPES = {
    "gpt-oss-120b": _gpt_oss(128, 1), "gpt-oss-120b-tp2": _gpt_oss(128, 2), "gpt-oss-120b-tp4": _gpt_oss(128, 4),
    "gpt-oss-20b": _gpt_oss(32, 1),
}  # fmt: skip

# ---- compilation -----------------------------------------------------------------------------------------------------

COMPILE_PROCESSES = max(1, cores() - 2)


def compile_ahead(calls: Iterable[Callable[[], Any]], processes: int = COMPILE_PROCESSES) -> int:
    """Compile the kernels of these calls into Triton's cache, in so many processes at once, without launching them: nothing is
    compiled when something is timed. Returns how many had to be compiled. What fails here fails again where it is measured."""
    from phalanx.kernels.compiling.ahead import ahead, can_compile_ahead

    if not can_compile_ahead():
        return 0
    with ahead() as kernels:
        for call in calls:
            with contextlib.suppress(Exception):
                call()
        kernels.compile(processes, lambda *_: None)
    return kernels.compiled


# ---- time ------------------------------------------------------------------------------------------------------------


def graph_us(
    calls: Sequence[Callable[[], Any]], *, replays: int, discarded: int = 0, warmups: int = 1, group: ProcessGroup | None = None
) -> float:
    """Microseconds of one call: all `calls` are captured into one CUDA graph, one behind the other, and the median of `replays`
    replays is divided by their number.

    discarded: replays before those that count. warmups: how often the first call runs before the capture, which compiles kernels.
    group: ranks that begin each replay together; the figure is then the slowest rank's.
    """
    import torch
    from torch import distributed

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    times: list[float] = []
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # NCCL's watchdog goes on meanwhile
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        for replay in range(discarded + replays):
            if group is not None:
                distributed.barrier(group)
            us = events_us(graph.replay)
            if replay >= discarded:
                times.append(us / len(calls))
        median = statistics.median(times)
        if group is not None:
            slowest = torch.tensor(median, device="cuda")
            distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group)
            median = float(slowest)
    torch.cuda.current_stream().wait_stream(stream)
    return median


def events_us(call: Callable[[], Any]) -> float:
    """Microseconds between two events, one recorded before the call and one behind it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


# ---- results ---------------------------------------------------------------------------------------------------------


def write(name: str, figures: dict[str, Any], folder: Path | None = None) -> Path:
    """Write results/<name>.json, with the machine, the versions, the commit and the command; returns its path."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about(), **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def about() -> dict[str, Any]:
    """As `phalanx bench` records it. BENCH_COMMIT names the commit where the sources came without their history."""
    return provenance.collect(os.environ.get("BENCH_COMMIT")).as_json()
