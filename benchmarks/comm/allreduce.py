# SPDX-License-Identifier: Apache-2.0
"""Time the all-reduce strategies and their launches on GPUs: `torchrun --nproc-per-node N -m benchmarks.comm.allreduce OUT.csv`.

A sample is 50 calls in one CUDA graph on fixed tensors; a figure is the median of 9 replays, the maximum over ranks. NCCL and
torch's symmetric-memory collectives run beside ours. `--sweep` tries launches beside the default ones. `--ranks 2` uses the first
two only. `phalanx allreduce bench` measures tables; this is for the work on the kernels.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from phalanx.comm import oneshot, twoshot
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import SymmetricWorkspace, form_workspace, part_vectors
from phalanx.kernels import reference, residual_rms_norm_quant

TOKENS = (1, 8, 32, 64, 128, 512, 2048, 8192)
CALLS, REPLAYS = 50, 9
Case = tuple[str, str, Callable[[], Any]]


def measure(call: Callable[[], Any], group: dist.ProcessGroup) -> float:
    """Microseconds per call."""
    return harness.graph_us([call] * CALLS, replays=REPLAYS, discarded=2, warmups=2, group=group)


def peers(x: torch.Tensor, group: dist.ProcessGroup, buffer: torch.Tensor) -> Iterator[Case]:
    name = group.group_name
    symmetric = buffer[: x.numel()].view_as(x)
    symmetric.copy_(x)
    local = torch.zeros_like(x)
    yield "NCCL", "NONE", lambda: dist.all_reduce(local, group=group)
    if x.nbytes <= 8 << 20:
        yield "torch symm_mem one_shot", "NONE", lambda: torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", name)
    zeros = buffer[: x.numel()].view_as(x)
    yield "torch symm_mem two_shot", "NONE", lambda: torch.ops.symm_mem.two_shot_all_reduce_(zeros, "sum", name)


def launches_flat(vectors: int, world: int, num_sms: int, sweep: bool) -> Iterator[tuple[str, Any, Any]]:
    yield "ONESHOT", oneshot, None
    yield "TWOSHOT", twoshot, None
    if not sweep:
        return
    for warps in (1, 2, 4, 8):
        programs = -(-vectors // (32 * warps))
        if vectors <= 1 << 17 and programs * warps <= 32 * num_sms:
            yield f"ONESHOT {programs}x{32 * warps}", oneshot, oneshot.OneshotLaunch(programs, 32 * warps, warps, False)
    part = part_vectors(vectors, world)
    for warps, per_sm, moving in ((4, 1, 1), (4, 2, 2), (16, 1, 1), (16, 2, 2), (16, 2, 1), (16, 3, 2), (8, 4, 2)):
        blocks = -(-part // (32 * warps))
        movers = min(blocks, moving * num_sms)
        programs = movers + min(blocks, (per_sm - moving) * num_sms)
        registers = min(65536 // (per_sm * warps * 32) // 8 * 8, 255) if per_sm > 1 else None
        if movers > (moving - 1) * num_sms:
            launch = twoshot.TwoshotLaunch(programs, 32 * warps, 0, warps, movers, registers)
            yield f"TWOSHOT {movers} of {programs} x{32 * warps}", twoshot, launch


def launches_norm(rows: int, pitch: int, world: int, num_sms: int, sweep: bool) -> Iterator[tuple[str, Any, Any]]:
    yield "ONESHOT", oneshot, None
    yield "TWOSHOT", twoshot, None
    if not sweep:
        return
    block = oneshot.row_block(pitch)
    for warps in (1, 2, 4, 8):
        splits = -(-pitch // (32 * warps))
        if splits > 1 and rows * splits * warps <= 32 * num_sms:
            yield f"ONESHOT {splits} splits", oneshot, oneshot.OneshotLaunch(rows * splits, 32 * warps, warps, False, splits)
    for warps in (8, 16):
        if rows <= 4 * num_sms:
            yield f"ONESHOT rows {warps}w", oneshot, oneshot.OneshotLaunch(rows, block, warps, False)
    part = part_vectors(rows * pitch, world)
    for warps, per_sm, moving in ((8, 1, 1), (16, 1, 1), (16, 2, 2), (32, 1, 1), (16, 2, 1), (8, 4, 2), (16, 3, 1)):
        if rows < 8 or (per_sm > 1 and rows < 64):
            continue
        blocks = -(-part // (32 * warps))
        movers = min(blocks if per_sm > moving else max(blocks, rows), moving * num_sms)
        programs = movers + min(rows, (per_sm - moving) * num_sms)
        registers = min(65536 // (per_sm * warps * 32) // 8 * 8, 255) if per_sm > 1 else None
        launch = twoshot.TwoshotLaunch(programs, 32 * warps, block, warps, movers, registers)
        yield f"TWOSHOT {movers} of {programs}, {warps}w", twoshot, launch


def cases(
    x: torch.Tensor, workspace: SymmetricWorkspace, group: dist.ProcessGroup, buffer: torch.Tensor, options: Any
) -> Iterator[Case]:
    """(implementation, fusion, call), each of ours checked before it is handed out."""
    rows, hidden = x.shape
    pitch = hidden * x.element_size() // 16
    parts = [torch.empty_like(x) for _ in range(workspace.world)]
    dist.all_gather(parts, x, group)
    total = reference.all_reduce(parts)
    if "NONE" in options.fusions:
        yield from peers(x, group, buffer)
        for name, strategy, launch in launches_flat(rows * pitch, workspace.world, workspace.num_sms, options.sweep):
            output = strategy.all_reduce(x, workspace, launch)
            verdict(torch.equal(output, total), f"{name} {rows}x{hidden}", group)
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
    workspace: SymmetricWorkspace,
    group: dist.ProcessGroup,
    sweep: bool,
) -> Iterator[Case]:
    rows, hidden = x.shape
    pitch = hidden * x.element_size() // 16

    def after(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return residual_rms_norm_quant(y, fusion.residual, fusion.weight, fusion.eps, quant=fusion.quant, scale=fusion.scale)

    wanted = after(total)
    local = torch.zeros_like(x)

    def nccl() -> None:
        dist.all_reduce(local, group=group)
        after(local)

    yield "NCCL + ours", name, nccl
    yield "norm alone", name, lambda: after(x)
    for strategy_name, strategy, launch in launches_norm(rows, pitch, workspace.world, workspace.num_sms, sweep):
        outputs = strategy.all_reduce_norm(x, fusion, workspace, launch)
        good = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(outputs, wanted, strict=True))
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
        fastest_first = sorted((row for row in rows if (row[0], row[6], row[3]) == key), key=lambda row: row[7])
        defaults = {"ONESHOT", "TWOSHOT", "NCCL", "torch symm_mem two_shot", "ONESHOT+UNFUSED", "TWOSHOT+UNFUSED"}
        shown = [*fastest_first[:4], *(row for row in fastest_first[4:] if row[5] in defaults)]
        print(*key, "|", "; ".join(f"{row[5]} {row[7]}" for row in shown), flush=True)


if __name__ == "__main__":
    main()
