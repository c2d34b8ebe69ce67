# SPDX-License-Identifier: Apache-2.0
"""Warm-up: the steps of a start are run once without launches, to learn which kernels they need; kernels that no earlier start has
kept are then compiled in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from phalanx import hardware
from phalanx.comm.group import Group
from phalanx.engine.messages import StepBatch
from phalanx.kernels.compiling.ahead import ahead, can_compile_ahead
from phalanx.worker.model_runner import ModelRunner

MAX_PROCESSES = 16
"""Compiling processes of one rank. More of them would have less than a second's work each."""
PROCESS_BYTES = 512 << 20
"""Host memory that a compiling process takes, at most."""


def compile_processes(local_ranks: int) -> int:
    """How many compiling processes each rank of a host may start: limited by its part of the cores, and of the free memory."""
    host = hardware.detect_machine()
    return min(host.cores // local_ranks, host.free_host_memory // (PROCESS_BYTES * local_ranks), MAX_PROCESSES)


def warm_up(
    runner: ModelRunner, steps: Sequence[StepBatch], group: Group, device: torch.device, processes: int,
    report: Callable[[int, int], None], part: tuple[int, int] = (0, 1),
) -> int:  # fmt: skip
    """Run `steps` (of `memory_profile.profiling_steps`) and the sizes of the graphs through a few layers, without launching Triton
    kernels; then compile the kernels that they need, in so many processes. Returns how many had to be compiled. The results of
    the steps mean nothing.

    Where one small step finds all of its kernels kept, the other steps are skipped: an earlier start has compiled them. report:
    gets how many of how many kernels are there. part: (index, number) of this rank among those of its host, where all launch the
    same kernels: each compiles its part of them. Collective over `group`, all ranks, as steps may wait for one another: nothing is
    done unless each rank can compile ahead, in several processes.
    """
    if not _everywhere(can_compile_ahead() and processes > 1, group, device):
        return 0
    with ahead() as kernels, runner.distinct_layers():
        *larger, small, release_slots = steps
        runner.run(small).results()
        if _everywhere(kernels.all_cached(), group, device):
            runner.run(release_slots)
            return 0
        for step in (*larger, release_slots):
            runner.run(step).results()
        runner.warm_up_graphs()
        kernels.compile(processes, report, part, partial(_everywhere, True, group, device))
    return kernels.compiled


def _everywhere(fact: bool, group: Group, device: torch.device) -> bool:
    return bool(group.all_gather(torch.full((1, 1), int(fact), device=device), dim=0).all())
