# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of a benchmark on many cores before it starts: a rank alone would spend most of its time compiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.group import Group, ResidualRmsNorm
from phalanx.hardware import probe
from phalanx.kernels.compiling.ahead import ahead, can_compile_ahead
from phalanx.kernels.dtypes import TORCH_DTYPES
from phalanx.kernels.scaled_tensors import FP8
from phalanx.log import get_logger
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy
from phalanx.tune.ranks.layer import RowParallelLayer, in_features
from phalanx.tune.ranks.measure import Candidates
from phalanx.tune.sweep import ALL_REDUCE, Task

_log = get_logger(__name__)
MIN_TASKS = 100
"""Fewer tasks are not worth the start of processes that compile."""


def compile_processes(world: int) -> int:
    """How many processes each rank of this host may compile in: its share of the cores."""
    return probe.cores() // world


def warm_up(
    tasks: Sequence[Task],
    candidates: Candidates,
    group: Group,
    device: torch.device,
    processes: int,
    on_progress: Callable[[int, int], None],
) -> int:
    """Call the candidate of every task without launching its kernels, then compile these kernels in so many copies of this process.
    Returns how many had to be compiled. What is not compiled here is compiled at its first launch.

    Collective: NCCL's sums do run, on tensors of any content. on_progress: called with (done, total), often enough to show that
    this rank is alive.
    """
    if not can_compile_ahead() or processes < 2:
        return 0
    errors: list[Exception] = []
    with ahead() as kernels:
        for number, task in enumerate(tasks):
            if task.choice.strategy is Strategy.NCCL and task.fusion is Fusion.NONE:
                continue  # no kernel of ours
            try:
                x, fusion, layer = arguments(task, device, group)
                candidates.get(task.choice, layer)(x, fusion)
            except KeyError:  # the task's own measurement records it as a skip
                continue
            except Exception as error:  # the task's own measurement reports it
                errors.append(error)
            if number % MIN_TASKS == 0:
                on_progress(0, 0)
        kernels.compile(processes, on_progress)
    _log.info("%d kernels of %d tasks are compiled, in up to %d processes", kernels.compiled, len(tasks), processes)
    if errors:
        _log.warning("%d of %d tasks could not be compiled ahead, the first: %r", len(errors), len(tasks), errors[0])
    return kernels.compiled


def arguments(
    task: Task, device: torch.device, group: Group
) -> tuple[Tensor, ResidualRmsNorm | None, RowParallelLayer | None]:  # fmt: skip
    """The task's tensors, of any content, and its layer where it contains the GEMM."""
    dtype = TORCH_DTYPES[task.dtype]
    x = torch.empty(task.tokens, task.hidden, dtype=dtype, device=device)
    if task.fusion is Fusion.NONE:
        return x, None, None
    static = task.fusion.quant != "none" and not task.fusion.token_scale
    scale = torch.empty((), dtype=torch.float32, device=device) if static else None
    weight = torch.empty(task.hidden, dtype=dtype, device=device)
    quant: Any = task.fusion.quant
    fusion = ResidualRmsNorm(torch.empty_like(x), weight, 1e-5, quant, scale, task.fusion.keeps_norm)
    if task.op == ALL_REDUCE:
        return x, fusion, None
    inputs = in_features(task.hidden, group.size)
    x = torch.empty(task.tokens, inputs, dtype=FP8 if quant == "fp8" else dtype, device=device)
    return x, fusion, RowParallelLayer(fusion, group.rank, group)
