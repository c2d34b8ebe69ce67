# SPDX-License-Identifier: Apache-2.0
"""A start's steps, gone through before they are run, so that kernels which no start has kept are compiled beside one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx import hardware
from phalanx.comm.group import Group
from phalanx.engine.messages import StepBatch
from phalanx.kernels.compiling.ahead import ahead, can_compile_ahead
from phalanx.worker.model_runner import ModelRunner

MAX_PROCESSES = 16
"""Of one rank. More would have less than a second's work each."""
PROCESS_BYTES = 512 << 20
"""Of host memory that a process which compiles takes, at most."""


def compile_processes(local_ranks: int) -> int:
    """How many processes each of a host's ranks may compile with: as many as its share of the cores, and of what memory is left."""
    host = hardware.detect_machine()
    return min(host.cores // local_ranks, host.free_host_memory // (PROCESS_BYTES * local_ranks), MAX_PROCESSES)


def warm_up(
    runner: ModelRunner,
    steps: Sequence[StepBatch],
    group: Group,
    device: torch.device,
    processes: int,
    tell: Callable[[int, int], None],
) -> int:
    """Go through `steps`, as `budget.profiling_steps` has them, and the graphs' sizes by a few layers, without launches of Triton's
    kernels; then compile those that they ask for in so many processes. Returns how many had to be compiled. The steps' results mean
    nothing.

    Where one small step finds all of its kernels kept, the rest is left alone: an earlier start has compiled them. tell: is told
    how many kernels of how many are there. Collective over `group`, all ranks, as steps may wait for one another: nothing is done
    unless each rank can compile ahead, and in several processes.
    """
    if not _everywhere(can_compile_ahead() and processes > 1, group, device):
        return 0
    with ahead() as kernels, runner.distinct_layers():
        *larger, small, slots_left = steps
        runner.run(small).results()
        if _everywhere(kernels.all_kept(), group, device):
            runner.run(slots_left)
            return 0
        for step in (*larger, slots_left):
            runner.run(step).results()
        runner.warm_up()
        kernels.compile(processes, tell)
    return kernels.compiled


def _everywhere(fact: bool, group: Group, device: torch.device) -> bool:
    return bool(group.all_gather(torch.full((1, 1), int(fact), device=device), dim=0).all())
