# SPDX-License-Identifier: Apache-2.0
"""Warm-up: the steps of a start are run once without launches, to learn which kernels they need. Those that are not in Triton's
cache are compiled in parallel. A record of them (`kernel_record`) spares the next start of the same kind the steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from phalanx import hardware
from phalanx.comm.group import Group
from phalanx.comm.marked_group import unmarked
from phalanx.comm.tuned_group import TunedGroup
from phalanx.config.host_facts import option_facts
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import StepBatch
from phalanx.kernels.compiling.ahead import ahead, can_compile_ahead
from phalanx.kernels.compiling.record import KernelRecord, sources_digest
from phalanx.models.decoder import Decoder
from phalanx.worker.model_runner import ModelRunner

MAX_PROCESSES = 16
"""Compiling processes of one rank. More of them would have less than a second's work each."""
PROCESS_BYTES = 512 << 20
"""Host memory that a compiling process takes, at most."""


def compile_processes(local_ranks: int) -> int:
    """How many compiling processes each rank of a host may start: limited by its part of the cores, and of the free memory."""
    host = hardware.detect_machine()
    return min(host.cores // local_ranks, host.free_host_memory // (PROCESS_BYTES * local_ranks), MAX_PROCESSES)


def kernel_record(
    options: EngineOptions, rank: int, model: Decoder, steps: Sequence[StepBatch], device: torch.device
) -> KernelRecord:  # fmt: skip
    """The record of the kernels that this rank calls in `steps` and graphs, in each start with the same options, model, GPU,
    tables, versions and sources. If anything else decides which kernels these are, a start compiles some at their first launch."""
    context = model.context
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    facts = {
        "rank": str(rank), "model": str(model.shape), "weights": hashlib.sha256("\n".join(weights).encode()).hexdigest(),
        "tokens of steps": str([sum(row.count for row in step.rows) for step in steps]),
        "torch version": f"{torch.__version__}, CUDA {torch.version.cuda}", "sources": sources_digest(), "device": "cpu",
        "expert exchange": "" if context.exchange_table is None else context.exchange_table.digest,
        "one-sided exchange": str(context.one_sided is not None),
    }  # fmt: skip
    group = unmarked(context.group)
    if isinstance(group, TunedGroup):
        rules = group.rules
        refused = sorted(strategy.name for strategy in rules.refused)
        facts["all-reduce"] = f"{rules.fingerprint}, table {group.digest}, without {refused}"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts["device"] = f"{gpu.name}, sm {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors"
    return KernelRecord({**option_facts(options), **facts})


def warm_up(
    runner: ModelRunner, steps: Sequence[StepBatch], group: Group, device: torch.device, processes: int,
    report: Callable[[int, int], None], local_ranks: int = 1, record: KernelRecord | None = None,
) -> int:  # fmt: skip
    """Run `steps` (of `memory_profile.profiling_steps`) and the sizes of the graphs through a few layers, without launching Triton
    kernels; then compile those that they need and Triton's cache lacks, in so many processes. Returns how many had to be compiled.
    The results of the steps mean nothing.

    record: of this rank's kernels. If each rank has one whose kernels are all in the cache, only one small step is run. It shows
    that the record is of this Triton, as the step's kernels must be in it; and first calls allocate what they keep (the workspace
    of cuBLAS) before the memory is measured, as in all steps. Otherwise the record is written at the end, unless a kernel could not
    be compiled.

    report: gets how many of how many kernels are there. local_ranks: of each host; they compile the kernels that several of them
    call once. Collective over `group`, all ranks, as steps may wait for one another: nothing is done unless each rank can compile
    ahead, in several processes.
    """
    if not _everywhere(can_compile_ahead() and processes > 1, group, device):
        return 0
    with ahead() as kernels, runner.distinct_layers():
        *larger, small, release_slots = steps
        runner.run(small).results()
        if _everywhere(record is not None and record.covers(kernels.folders()), group, device):
            runner.run(release_slots)
            kernels.load()
            return 0
        for step in (*larger, release_slots):
            runner.run(step).results()
        runner.warm_up_graphs()
        folders = kernels.folders()
        if _everywhere(kernels.all_cached(), group, device):
            kernels.load()
        else:
            own = _shared(kernels.keys(), group, device, local_ranks)
            kernels.compile(processes, report, own, partial(_everywhere, True, group, device))
    if record is not None:
        record.write(folders)
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
