# SPDX-License-Identifier: Apache-2.0
"""One GPU rank of the checks of rows that copy engines carry: `torchrun --nproc-per-node N -m
tests.comm.rows.copied_rank CHECK ...`.

What every rank takes equals the unfused kernels' and the owned rows' all-reduce, bit for bit; so do the rows of the residual that
it owns. `test_copied_gpu` starts this; it also runs alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.chunked import pitch_of
from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.comm.rows import OwnedRows, own_rows, owned
from phalanx.comm.rows.copied import Copied, space_bytes
from phalanx.comm.symmetric import Workspace, form_mapped, form_workspace
from phalanx.comm.torch_group import TorchGroup
from phalanx.comm.tuned_group import TunedGroup, tuned
from tests.comm.allreduce_rank import tensor_of
from tests.comm.gpu_ranks import replayed
from tests.comm.rows.owned_rank import MODES, agrees, case, device

SHAPES = ((1, 16), (2, 1008), (3, 5120), (17, 5120), (64, 8192), (255, 4096), (1000, 8192), (2048, 8192))
PARTS, PART_TOKENS, ROW_BYTES = 3, 2048, 16384
WIDTHS = (8192, 1024, 16)


def formed() -> Copied:
    world = dist.group.WORLD
    assert world is not None
    memory = form_mapped(world, device(), space_bytes(PARTS, PART_TOKENS, ROW_BYTES, world.size()))
    return Copied(memory, PARTS, PART_TOKENS, ROW_BYTES, lambda fusion: None)


def through(beside: Copied, part: int, x: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
    beside.send(part, x)
    beside.finish(part, fusion)
    return beside.take(part)


def as_owned(fusion: ResidualRmsNorm, workspace: Workspace) -> ResidualRmsNorm:
    """For `owned`, which calls the same rows a chunk of its own size."""
    residual = fusion.residual
    if isinstance(residual, OwnedRows):
        at_once = owned.rows_at_once(pitch_of(residual.held), workspace)
        assert at_once >= len(residual.held)
        residual = OwnedRows.of(residual.held, at_once)
    return replace(fusion, residual=residual)


def shapes(workspace: Workspace) -> None:
    """Every mode and dtype at odd sizes; a call whose residual is whole, then one whose residual has owners."""
    beside = formed()
    cases = [(torch.bfloat16, *shape, mode) for shape in SHAPES for mode in MODES]
    cases += [
        (dtype, *shape, mode) for dtype in (torch.float16, torch.float32) for shape in ((33, 2048), (5, 48)) for mode in MODES
    ]
    for number, (dtype, tokens, hidden, mode) in enumerate(cases):
        part, _, total, fusion = case(workspace, tokens, hidden, dtype, mode)
        once = finish(total, fusion)
        twice = finish(total, replace(fusion, residual=once[-1]))
        what = f"{dtype} {tokens}x{hidden} {mode}"
        found = through(beside, number % PARTS, part.clone(), fusion)
        agrees(found, once, workspace, what)
        agrees(owned.all_reduce_norm(part, fusion, workspace), once, workspace, f"{what}, owned")
        agrees(
            through(beside, number % PARTS, part.clone(), replace(fusion, residual=found[-1])), twice, workspace, f"{what}, again"
        )


def interleaved(workspace: Workspace) -> None:
    """Parts of different sizes under way at once, for many turns, among products that take the whole GPU."""
    beside, tokens = formed(), (2048, 1000, 7)
    weights = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) / 128
    wanted: list[Any] = []
    for part, count in enumerate(tokens):
        mine, _, total, fusion = case(workspace, count, 8192, torch.bfloat16, MODES[(0, 2, 1)[part]])
        once = finish(total, fusion)
        wanted.append((mine, fusion, once, finish(total, replace(fusion, residual=once[-1]))))
    for turn in range(50):
        found: list[Any] = [None] * PARTS
        for act in ("send", "finish", "take"):
            for part in [(turn + step) % PARTS for step in range(PARTS)]:
                mine, fusion, once, _ = wanted[part]
                if act == "send":
                    beside.send(part, mine.clone())
                    mine @ weights  # runs beside the copies
                elif act == "finish":
                    beside.finish(part, fusion)
                else:
                    found[part] = beside.take(part)
                    agrees(found[part], once, workspace, f"turn {turn}, part {part}")
        for part, (mine, fusion, _, twice) in enumerate(wanted):
            again = through(beside, part, mine.clone(), replace(fusion, residual=found[part][-1]))
            agrees(again, twice, workspace, f"turn {turn}, part {part}, again")


def graph(workspace: Workspace) -> None:
    """A chain of layers whose parts interleave, in one graph, replayed 1,000 times by ranks that sleep at times; it checks itself
    against the owned rows' all-reduce."""
    beside = formed()
    sizes: Sequence[tuple[int, int]] = [(1024, hidden) for hidden in WIDTHS]
    base = [torch.randint(-8, 9, size, device="cuda").to(torch.bfloat16) for size in sizes]
    weight = torch.rand(8192, device="cuda").to(torch.bfloat16)
    dist.broadcast(weight, 0)
    residuals = [tensor_of(97, *size, torch.bfloat16, 25) for size in sizes]
    step, wrong = torch.zeros(1, device="cuda", dtype=torch.bfloat16), torch.zeros(1, device="cuda", dtype=torch.int64)

    def body() -> None:
        step.copy_((step + 1) % 16)
        held = list(residuals)
        for layer in range(3):
            fusions = [
                ResidualRmsNorm(held[part], weight[:hidden], 1e-5, "fp8" if (layer + part) % 2 else "none")
                for part, (_, hidden) in enumerate(sizes)
            ]
            inputs = [each + step for each in base]
            for part in range(PARTS):
                beside.send(part, inputs[part])
            for part in range(PARTS):
                beside.finish(part, fusions[part])
            for part in range(PARTS):
                found = beside.take(part)
                wanted = owned.all_reduce_norm(inputs[part], as_owned(fusions[part], workspace), workspace)
                for left, right in zip(found[:-1], wanted[:-1], strict=True):
                    wrong.add_((left.view(torch.uint8) != right.view(torch.uint8)).sum())
                (mine,) = own_rows(sizes[part][0], len(inputs[part]), workspace.rank, workspace.world)
                new, right = found[-1], wanted[-1]
                wrong.add_((new.held[mine.start : mine.stop] != right.held[mine.start : mine.stop]).sum())  # type: ignore[attr-defined]
                held[part] = new

    replayed(body, workspace.rank, lambda _: body())  # eager turns in between take part in the same count
    if wrong.item():
        raise AssertionError(f"{wrong.item()} bytes were wrong in 1,000 replays")


def of_group(workspace: Workspace) -> None:
    """The one that a group makes, and how it counts."""
    group = tuned(TorchGroup(dist.group.WORLD, device()), message_bytes=8 << 20)
    assert isinstance(group, TunedGroup)
    beside = group.beside(4096, 8192, torch.bfloat16)
    assert beside is not None, "GPUs that reach each other have copy engines"
    assert beside.parts * beside.part_tokens == 4096
    part, _, total, fusion = case(workspace, 1000, 8192, torch.bfloat16, MODES[2])
    agrees(through(beside, 1, part, fusion), finish(total, fusion), workspace, "of the group")  # type: ignore[arg-type]
    assert group.calls == {"TWOSHOT+COPIED/RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE": 1}, group.calls
    for strategy in ("NCCL", "ONESHOT"):
        other = tuned(TorchGroup(dist.group.WORLD, device()), message_bytes=8 << 20, strategy=strategy)
        assert other.beside(4096, 8192, torch.bfloat16) is None, strategy  # type: ignore[attr-defined]


CHECKS = {check.__name__: check for check in (shapes, interleaved, graph, of_group)}


def main(names: list[str]) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=device())
    workspace = form_workspace(dist.group.WORLD, device(), 64 << 20)
    for name in names or list(CHECKS):
        began = time.monotonic()
        CHECKS[name](workspace)
        torch.cuda.synchronize()
        if rank == 0:
            print(f"ok {name} {time.monotonic() - began:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
