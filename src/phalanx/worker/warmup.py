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
    report: Callable[[int, int], None], local_ranks: int = 1,
) -> int:  # fmt: skip
    """Run `steps` (of `memory_profile.profiling_steps`) and the sizes of the graphs through a few layers, without launching Triton
    kernels; then compile the kernels that they need, in so many processes. Returns how many had to be compiled. The results of
    the steps mean nothing.

    Where one small step finds all of its kernels kept, the other steps are skipped: an earlier start has compiled them. report:
    gets how many of how many kernels are there. local_ranks: of each host; they compile the kernels that several of them call once.
    Collective over `group`, all ranks, as steps may wait for one another: nothing is done unless each rank can compile ahead, in
    several processes.
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
        own = _shared(kernels.keys(), group, device, local_ranks)
        kernels.compile(processes, report, own, partial(_everywhere, True, group, device))
    return kernels.compiled


def _shared(keys: Sequence[int], group: Group, device: torch.device, local_ranks: int) -> list[bool]:
    """Of each of this rank's kernels, whether it is this rank that compiles it, of those of its host that call it."""
    counts = group.all_gather(torch.full((1, 1), len(keys), device=device), dim=0)
    padded = torch.zeros((1, int(counts.max())), dtype=torch.int64, device=device)
    padded[0, : len(keys)] = torch.tensor(keys, dtype=torch.int64, device=device)
    of_ranks = [set(row) for row in group.all_gather(padded, dim=0).tolist()]
    first = group.rank // local_ranks * local_ranks
    own = []
    for key in keys:
        callers = [rank for rank in range(first, first + local_ranks) if key in of_ranks[rank]]
        own.append(callers[key % len(callers)] == group.rank)
    return own


def _everywhere(fact: bool, group: Group, device: torch.device) -> bool:
    return bool(group.all_gather(torch.full((1, 1), int(fact), device=device), dim=0).all())
