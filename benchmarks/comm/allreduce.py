# SPDX-License-Identifier: Apache-2.0
"""Time the all-reduce strategies and their launches on GPUs: `torchrun --nproc-per-node N benchmarks/comm/allreduce.py OUT.csv`.

A sample is 50 calls in one CUDA graph on fixed tensors; a figure is the median of 9 replays, the maximum over ranks. NCCL and
torch's symmetric-memory collectives run beside ours. `--sweep` tries launches beside the default ones. `--ranks 2` uses the first
two only. `phalanx allreduce bench` measures tables; this is for the work on the kernels.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm import oneshot, twoshot
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import Workspace, form_workspace, share_of
from phalanx.kernels import reference, residual_rms_norm_quant

TOKENS = (1, 8, 32, 64, 128, 512, 2048, 8192)
CALLS, REPLAYS = 50, 9
Case = tuple[str, str, Callable[[], Any]]


def measure(call: Callable[[], Any], group: dist.ProcessGroup) -> float:
    """Microseconds per call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for replay in range(2 + REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier(group)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
    worst = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX, group)
    return worst.item()


def peers(x: torch.Tensor, group: dist.ProcessGroup, buffer: torch.Tensor) -> Iterator[Case]:
    name = group.group_name
    held = buffer[: x.numel()].view_as(x)
    held.copy_(x)
    mine = torch.zeros_like(x)
    yield "NCCL", "NONE", lambda: dist.all_reduce(mine, group=group)
    if x.nbytes <= 8 << 20:
        yield "torch symm_mem one_shot", "NONE", lambda: torch.ops.symm_mem.one_shot_all_reduce(held, "sum", name)
    zeros = buffer[: x.numel()].view_as(x)
    yield "torch symm_mem two_shot", "NONE", lambda: torch.ops.symm_mem.two_shot_all_reduce_(zeros, "sum", name)


def launches_flat(vectors: int, world: int, sms: int, sweep: bool) -> Iterator[tuple[str, Any, Any]]:
    yield "ONESHOT", oneshot, None
    yield "TWOSHOT", twoshot, None
    if not sweep:
        return
    for warps in (1, 2, 4, 8):
        block = 32 * warps
        programs = -(-vectors // block)
        if vectors <= 1 << 17 and programs * warps <= 32 * sms:
            yield f"ONESHOT {programs}x{block}", oneshot, oneshot.Launch(programs, block, warps, False)
    share = share_of(vectors, world)
    for warps, per_sm, halves, pause in (
        (1, 4, 0, 0), (2, 4, 0, 0), (4, 1, 0, 0), (4, 2, 0, 0), (4, 4, 0, 0), (8, 2, 0, 0), (16, 1, 0, 0), (16, 2, 0, 0),
        (4, 4, 1, 0), (8, 2, 1, 0), (8, 4, 1, 0), (16, 2, 1, 0), (16, 2, 1, 40), (16, 2, 1, 200), (8, 4, 1, 100),
        (16, 3, 1, 0), (16, 3, 1, 100), (16, 3, 2, 0), (32, 2, 1, 0),
    ):  # fmt: skip
        blocks = -(-share // (32 * warps))
        programs = min(blocks, per_sm * sms)
        if halves == 0 and (per_sm == 1 or programs > (per_sm // 2) * sms or warps == 1):
            yield f"TWOSHOT {programs}x{32 * warps}", twoshot, bounded(programs, programs, 32 * warps, 0, warps, per_sm, 0)
        elif halves and blocks >= sms // 2:
            movers = min(blocks, halves * sms if per_sm == 3 else per_sm * sms // 2)
            collectors = min(blocks, per_sm * sms - movers)
            name = f"TWOSHOT {movers}+{collectors}x{32 * warps} {pause}ns"
            yield name, twoshot, bounded(movers + collectors, movers, 32 * warps, 0, warps, per_sm, pause)


def bounded(programs: int, movers: int, flat: int, block: int, warps: int, per_sm: int, pause: int) -> twoshot.Launch:
    """With so few registers a thread that `per_sm` programs run on a multiprocessor at once."""
    registers = min(65536 // (per_sm * warps * 32) // 8 * 8, 255)
    return twoshot.Launch(programs, flat, block, warps, movers, registers if per_sm > 1 else None, pause)


def launches_norm(rows: int, pitch: int, world: int, sms: int, sweep: bool) -> Iterator[tuple[str, Any, Any]]:
    yield "ONESHOT", oneshot, None
    yield "TWOSHOT", twoshot, None
    if not sweep:
        return
    block = oneshot.row_block(pitch)
    for warps in (8, 16, 32):
        if rows <= 64:
            piece = 32 * warps
            yield f"ONESHOT pieces {warps}w", oneshot, oneshot.Launch(rows, block, warps, False, piece)
            yield f"ONESHOT rows {warps}w", oneshot, oneshot.Launch(rows, block, warps, False)
    share = share_of(rows * pitch, world)
    tries = ((8, 8, 1, 0, 0), (16, 16, 1, 0, 0), (16, 16, 2, 0, 0), (16, 32, 2, 0, 0), (32, 32, 1, 0, 0), (4, 4, 4, 0, 0),
             (16, 16, 2, 1, 0), (16, 16, 2, 1, 100), (32, 32, 2, 1, 0), (8, 8, 4, 1, 0), (16, 32, 2, 1, 0),
             (16, 16, 3, 1, 0), (16, 16, 3, 2, 0))  # fmt: skip
    for warps, flat, per_sm, halves, pause in tries:
        if rows < 8:
            continue
        blocks = -(-share // (32 * flat))
        if halves == 0:
            programs = min(max(rows, blocks), per_sm * sms)
            if per_sm == 1 or programs > sms:
                name = f"TWOSHOT {programs} {warps}w flat {32 * flat}"
                yield name, twoshot, bounded(programs, programs, 32 * flat, block, warps, per_sm, 0)
        elif rows >= 32:
            movers = min(blocks, halves * sms if per_sm == 3 else per_sm * sms // 2)
            collectors = min(rows, per_sm * sms - movers)
            name = f"TWOSHOT {movers}+{collectors} {warps}w flat {32 * flat} {pause}ns"
            yield name, twoshot, bounded(movers + collectors, movers, 32 * flat, block, warps, per_sm, pause)


def cases(x: torch.Tensor, workspace: Workspace, group: dist.ProcessGroup, buffer: torch.Tensor, options: Any) -> Iterator[Case]:
    """(implementation, fusion, call), each of ours checked before it is handed out."""
    rows, hidden = x.shape
    pitch = hidden * x.element_size() // 16
    parts = [torch.empty_like(x) for _ in range(workspace.world)]
    dist.all_gather(parts, x, group)
    total = reference.all_reduce(parts)
    if "NONE" in options.fusions:
        yield from peers(x, group, buffer)
        for name, strategy, launch in launches_flat(rows * pitch, workspace.world, workspace.sms, options.sweep):
            found = strategy.all_reduce(x, workspace, launch)
            verdict(torch.equal(found, total), f"{name} {rows}x{hidden}", group)
            yield name, "NONE", lambda s=strategy, k=launch: s.all_reduce(x, workspace, k)
    residual, weight = torch.randn_like(x), torch.ones(hidden, device="cuda", dtype=x.dtype)
    for name, quant in (("RMS", "none"), ("RMS_FP8", "fp8")):
        if name not in options.fusions or rows > 2048:
            continue
        fusion = ResidualRmsNorm(residual, weight, 1e-5, quant, torch.tensor(0.02, device="cuda") if quant == "fp8" else None)
        yield from norm_cases(x, total, fusion, name, workspace, group, options.sweep)


def norm_cases(
    x: torch.Tensor,
    total: torch.Tensor,
    fusion: ResidualRmsNorm,
    name: str,
    workspace: Workspace,
    group: dist.ProcessGroup,
    sweep: bool,
) -> Iterator[Case]:
    rows, hidden = x.shape
    pitch = hidden * x.element_size() // 16

    def after(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return residual_rms_norm_quant(y, fusion.residual, fusion.weight, fusion.eps, quant=fusion.quant, scale=fusion.scale)

    wanted = after(total)
    mine = torch.zeros_like(x)

    def nccl() -> None:
        dist.all_reduce(mine, group=group)
        after(mine)

    yield "NCCL + ours", name, nccl
    yield "norm alone", name, lambda: after(x)
    for strategy_name, strategy, launch in launches_norm(rows, pitch, workspace.world, workspace.sms, sweep):
        found = strategy.all_reduce_norm(x, fusion, workspace, launch)
        good = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, wanted, strict=True))
        verdict(good, f"{strategy_name} {name} {rows}x{hidden}", group)
        yield strategy_name, name, lambda s=strategy, k=launch: s.all_reduce_norm(x, fusion, workspace, k)
        if launch is None:
            yield f"{strategy_name}+UNFUSED", name, lambda s=strategy: after(s.all_reduce(x, workspace))


def verdict(good: bool, what: str, group: dist.ProcessGroup) -> None:
    bad = torch.tensor(int(not good), device="cuda")
    dist.all_reduce(bad, group=group)
    if bad.item():
        raise AssertionError(f"{what}: wrong on {bad.item()} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--fusions", default="NONE,RMS,RMS_FP8")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    size = options.ranks or world
    group = dist.group.WORLD if size == world else dist.new_group(list(range(size)))
    if rank < size:
        assert isinstance(group, dist.ProcessGroup)
        run(options, group, device, rank)
    dist.barrier()
    dist.destroy_process_group()


def run(options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device, rank: int) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory  # of the peers timed here

    tokens = [int(text) for text in options.tokens.split(",")]
    workspace = form_workspace(group, device, max(tokens) * options.hidden * 2)
    buffer = symmetric_memory.empty(max(tokens) * options.hidden, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(buffer, group.group_name)
    rows = []
    with open(options.csv, "w", newline="") if rank == 0 else open(os.devnull, "w") as file:
        writer = csv.writer(file)
        writer.writerow(("world_size", "dtype", "size", "num_tokens", "hidden_size", "implementation", "fusion", "time (us)"))
        for count in tokens:
            torch.manual_seed(rank)
            x = torch.randn(count, options.hidden, device=device).to(torch.bfloat16)
            for name, fusion, call in cases(x, workspace, group, buffer, options):
                time = measure(call, group)
                row = (workspace.world, "bfloat16", x.nbytes, count, options.hidden, name, fusion, round(time, 2))
                rows.append(row)
                writer.writerow(row)
                file.flush()
    if rank == 0:
        show(rows)


def show(rows: list[tuple[Any, ...]]) -> None:
    """Cell by cell, the fastest first."""
    for key in dict.fromkeys((row[0], row[6], row[3]) for row in rows):
        held = sorted((row for row in rows if (row[0], row[6], row[3]) == key), key=lambda row: row[7])
        defaults = {"ONESHOT", "TWOSHOT", "NCCL", "torch symm_mem two_shot", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED"}
        shown = [*held[:4], *(row for row in held[4:] if row[5] in defaults)]
        print(*key, "|", "; ".join(f"{row[5]} {row[7]}" for row in shown), flush=True)


if __name__ == "__main__":
    main()
