# SPDX-License-Identifier: Apache-2.0
"""One GPU rank of the checks of sequence parallelism:

    torchrun --nproc-per-node N -m tests.support.comm_sequence_parallel_rank CHECK ...

What every rank gets equals the unfused kernels' and two-shot's, bit for bit; so do its own rows of the residual.
`test_rs_norm_ag_gpu` starts this; it also runs alone.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import oneshot, twoshot
from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.comm.sequence_parallel import ShardedResidual, rank_rows, same_sharding, unshard
from phalanx.comm.sequence_parallel.gemm_rs import GemmRs, scatter_targets
from phalanx.comm.sequence_parallel.rs_norm_ag import RsNormAg
from phalanx.comm.symmetric import ReduceScatterBuffer, SymmetricWorkspace, form_reduce_scatter_buffer, form_workspace
from phalanx.comm.torch_group import TorchGroup
from phalanx.comm.tuned_group import TunedGroup, tuned
from phalanx.kernels import linear, quantize_fp8, reference
from phalanx.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_into
from phalanx.kernels.scaled_tensors import Quantized, Unscaled
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.strategy import Strategy
from tests.support.comm_allreduce_rank import same, tensor_of
from tests.support.comm_gpu_ranks import replayed

Mode = tuple[str, float | None, bool]
"""quant, the static scale, keep_norm."""
MODES: tuple[Mode, ...] = (
    ("none", None, False),
    ("fp8", 0.02, False),
    ("fp8", None, False),
    ("fp8", 0.02, True),
    ("fp8", None, True),
)
VARIANTS = ((32, 1, 1), (16, 2, 2), (16, 3, 1), (16, 3, 2), (8, 4, 2))
SHAPES = ((1, 16), (2, 1008), (3, 5120), (17, 5120), (64, 8192), (255, 4096), (1000, 8192))
SHAPES_405B = ((64, 16384), (257, 16384), (1000, 16384))


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def agrees(outputs: tuple[Tensor, ...], wanted: tuple[Tensor, ...], workspace: SymmetricWorkspace, what: str) -> None:
    """All outputs, and of the residual the rows that this rank owns."""
    if len(outputs) != len(wanted):
        raise AssertionError(f"{what}: {len(outputs)} outputs, not {len(wanted)}")
    for index, (left, right) in enumerate(zip(outputs[:-1], wanted[:-1], strict=True)):
        same(left, right, f"{what}: output {index}")
    new = outputs[-1]
    assert isinstance(new, ShardedResidual), what
    for rows in rank_rows(len(wanted[-1]), new.chunk_rows, workspace.rank, workspace.world):
        same(new.local[rows.start : rows.stop], wanted[-1][rows.start : rows.stop], f"{what}: residual of {rows}")


def case(workspace: SymmetricWorkspace, tokens: int, hidden: int, dtype: torch.dtype, mode: Mode) -> tuple[Any, ...]:
    """(this rank's part, the same without its scales, the sum, a fusion)."""
    parts, unscaled = [], []
    for rank in range(workspace.world):
        x = tensor_of(rank, tokens, hidden, dtype, 20)
        rows, columns = tensor_of(rank, tokens, 1, torch.float32, 21).abs(), tensor_of(rank, 1, hidden, torch.float32, 22)[0]
        unscaled.append(Unscaled(x, rows, columns))
        parts.append(unscaled[-1].to_fp32().to(dtype))
    weight = (1 + 0.1 * tensor_of(98, 1, hidden, dtype, 23)[0]).contiguous()
    scale = None if mode[1] is None else torch.tensor(mode[1], device="cuda")
    fusion = ResidualRmsNorm(tensor_of(99, tokens, hidden, dtype, 24), weight, 1e-5, mode[0], scale, mode[2])  # type: ignore[arg-type]
    return parts[workspace.rank], unscaled[workspace.rank], reference.all_reduce(parts), fusion


def shapes(workspace: SymmetricWorkspace) -> None:
    """Every mode and dtype at odd sizes; a call with a tensor as its residual, then one with a sharded residual."""
    cases = [(torch.bfloat16, *shape, mode) for shape in SHAPES for mode in MODES]
    rs_norm_ag_with(workspace, [*cases, *((dtype, 33, 2048, mode) for dtype in (torch.float16, torch.float32) for mode in MODES)])


def rows_of_405b(workspace: SymmetricWorkspace) -> None:
    """`shapes` and `gemm_rs` at the hidden size of a model of 405 billion weights."""
    cases = [(torch.bfloat16, *shape, mode) for shape in SHAPES_405B for mode in MODES]
    rs_norm_ag_with(workspace, cases)
    gemm_rs_with(workspace, cases)


def rs_norm_ag_with(workspace: SymmetricWorkspace, cases: Sequence[tuple[torch.dtype, int, int, Mode]]) -> None:
    for dtype, tokens, hidden, mode in cases:
        part, unscaled, total, fusion = case(workspace, tokens, hidden, dtype, mode)
        once = finish(total, fusion)
        twice = finish(total, replace(fusion, residual=once[-1]))
        for x, form in ((part, "finished"), (unscaled, "unscaled")):
            if form == "unscaled" and mode == MODES[1]:
                continue
            what = f"{dtype} {tokens}x{hidden} {mode} {form}"
            outputs = RsNormAg(workspace).all_reduce_norm(x, fusion)
            agrees(outputs, once, workspace, what)
            agrees(
                RsNormAg(workspace).all_reduce_norm(x, replace(fusion, residual=outputs[-1])), twice, workspace, f"{what}, again"
            )
            by_twoshot = twoshot.all_reduce_norm(x, fusion, workspace)
            agrees(outputs, by_twoshot, workspace, f"{what}, against two-shot")


def launches(workspace: SymmetricWorkspace) -> None:
    """Other launches than a size's own."""
    for tokens in (5, 256, 1000):
        for mode in (MODES[0], MODES[2], MODES[4]):
            part, _, total, fusion = case(workspace, tokens, 8192, torch.bfloat16, mode)
            for shape in VARIANTS:
                for time_of in range(3):
                    outputs = RsNormAg(workspace).all_reduce_norm(part, fusion, shape)
                    agrees(outputs, finish(total, fusion), workspace, f"{tokens} {mode} {shape}, time {time_of}")


def chunks(workspace: SymmetricWorkspace) -> None:
    """4096 x 8192 in chunks of a small workspace, whose last one is a part; then made whole."""
    small = form_workspace(dist.new_group(list(range(workspace.world))), device(), 5 << 20)
    group = TorchGroup(dist.group.WORLD, device())
    for tokens in (4096, 1001):
        for mode in MODES:
            part, _, total, fusion = case(workspace, tokens, 8192, torch.bfloat16, mode)
            wanted = finish(total, fusion)
            outputs = RsNormAg(small).all_reduce_norm(part, fusion)
            assert outputs[-1].chunk_rows < tokens  # type: ignore[attr-defined]
            agrees(outputs, wanted, small, f"{tokens} in chunks {mode}")
            same(unshard(outputs[-1], group), wanted[-1], f"{tokens} in chunks {mode}: made whole")


def strange_values(workspace: SymmetricWorkspace) -> None:
    """-0.0, NaN, infinities, denormals, and the very word that signals absence, in rows of their own and scattered."""
    choices = (0, -1, 1, -(2**31), 0x7F800000, 0x7FC00000, 0x3F803F80, 0x80008000 - 2**32, 0x7FFF7FFF, 0x00010001)
    finite = tuple(word for word in choices if word not in (-1, 0x7F800000, 0x7FC00000, 0x7FFF7FFF))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parts = []
        for rank in range(workspace.world):
            maker = random.Random(rank)
            bits = torch.tensor([[maker.choice(choices) for _ in range(512)] for _ in range(11)], dtype=torch.int64)
            bits[4] = -1
            bits[5:, 3:] = 0x3F803F80
            for row in range(7, 11):  # without a NaN, which the norm would spread all over the row
                bits[row] = torch.tensor([maker.choice(finite) for _ in range(512)])
            bits[9] = -(2**31)
            parts.append(bits.to(torch.int32).cuda().view(dtype))
        total, weight = reference.all_reduce(parts), torch.ones(parts[0].shape[1], device="cuda", dtype=dtype)
        assert total[7:].isfinite().all(), "rows that show more than where NaN is"
        for quant, static_scale, keep in MODES:
            scale = None if static_scale is None else torch.tensor(static_scale, device="cuda")
            fusion = ResidualRmsNorm(torch.zeros_like(total), weight, 1e-5, quant, scale, keep)  # type: ignore[arg-type]
            for _ in range(3):
                *outputs, new = RsNormAg(workspace).all_reduce_norm(parts[workspace.rank], fusion)
                *wanted, residual = finish(total, fusion)
                for left, right in zip(outputs, wanted, strict=True):
                    alike(left, right, f"{dtype} {quant} {static_scale} {keep}")
                (rows_here,) = rank_rows(11, new.chunk_rows, workspace.rank, workspace.world)  # type: ignore[attr-defined]
                alike(
                    new.local[rows_here.start : rows_here.stop],
                    residual[rows_here.start : rows_here.stop],
                    f"{dtype} {quant}: residual",
                )  # type: ignore[attr-defined]


def alike(left: Tensor, right: Tensor, what: str) -> None:
    """Bit for bit, but for which NaN a NaN is."""
    left, right = left.float(), right.float()
    if not torch.equal(left.isnan(), right.isnan()):
        raise AssertionError(f"{what}: NaN elsewhere")
    same(left.nan_to_num(1.0), right.nan_to_num(1.0), what)


def repeated(
    workspace: SymmetricWorkspace, sizes: Sequence[tuple[int, int]], act: Callable[[Tensor, ResidualRmsNorm], tuple[Tensor, ...]]
) -> None:  # fmt: skip
    """One graph of many sizes, among one-shot and two-shot, replayed 1,000 times by ranks that sleep at times, with other values
    each time: what `act` gives of a tensor and a fusion is theirs. It checks itself."""
    base = {size: torch.randint(-8, 9, size, device="cuda").to(torch.bfloat16) for size in sizes}
    weight = torch.rand(8192, device="cuda").to(torch.bfloat16)
    dist.broadcast(weight, 0)
    residuals = {size: tensor_of(97, *size, torch.bfloat16, 25) for size in sizes}
    step, wrong = torch.zeros(1, device="cuda", dtype=torch.bfloat16), torch.zeros(1, device="cuda", dtype=torch.int64)

    def body() -> None:
        step.copy_((step + 1) % 16)
        for number, size in enumerate(sizes):
            x = base[size] + step
            fusion = ResidualRmsNorm(residuals[size], weight[: size[1]], 1e-5, "fp8" if number % 2 else "none")
            if number % 4 == 3:
                fusion = replace(fusion, keep_norm=True)
            wanted = (oneshot, twoshot)[number % 2].all_reduce_norm(x, fusion, workspace)
            outputs = act(x, fusion)
            for left, right in zip(outputs[:-1], wanted[:-1], strict=True):
                wrong.add_((left.view(torch.uint8) != right.view(torch.uint8)).sum())
            (rows_here,) = rank_rows(size[0], outputs[-1].chunk_rows, workspace.rank, workspace.world)  # type: ignore[attr-defined]
            wrong.add_((outputs[-1].local[rows_here.start : rows_here.stop] != wanted[-1][rows_here.start : rows_here.stop]).sum())  # type: ignore[attr-defined]

    replayed(body, workspace.rank, lambda _: body())  # eager calls in between take part in the same count of calls
    if wrong.item():
        raise AssertionError(f"{wrong.item()} bytes were wrong in 1,000 replays")


def graph(workspace: SymmetricWorkspace) -> None:
    """See `repeated`; each call is followed by one with a sharded residual."""

    def act(x: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        outputs = RsNormAg(workspace).all_reduce_norm(x, fusion)
        RsNormAg(workspace).all_reduce_norm(x, replace(fusion, residual=outputs[-1]))
        return outputs

    repeated(workspace, ((1, 16), (300, 4096), (17, 5120), (64, 8192), (2, 8192), (700, 1024)), act)


def picked(workspace: SymmetricWorkspace) -> None:
    """The group that picks: a chain of norms, as of a model, owns rows from its number of tokens on; eager and captured."""
    group, plain = (tuned(TorchGroup(dist.group.WORLD, device()), message_bytes=8 << 20, strategy=s) for s in ("AUTO", "TWOSHOT"))
    assert isinstance(group, TunedGroup)
    kind = Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE
    owning = (n for n in range(1, 4096) if group.decide(n, 8192, "bf16", kind, Caller.SHARDED).strategy is Strategy.RS_NORM_AG)
    first = next(owning, None)
    assert first is not None, "GPUs that reach each other run RS_NORM_AG"
    for tokens, hidden in ((first, 8192), (first - 1, 8192), (first + 3, 1000)):
        part, _, _, fusion = case(workspace, tokens, hidden, torch.bfloat16, MODES[2])

        def chain(own: bool, part: Tensor = part, fusion: ResidualRmsNorm = fusion) -> tuple[Tensor, ...]:
            through, residual, outputs = group if own else plain, fusion.residual, []
            for quant, keep in (("fp8", False), ("fp8", True), ("fp8", False), ("none", False)):
                step_fusion = replace(fusion, residual=residual, quant=quant, keep_norm=keep, accepts_sharded=own)  # type: ignore[arg-type]
                *norms, residual = through.all_reduce(part.clone(), step_fusion)
                outputs += norms
            return (*outputs, unshard(residual, through))

        owns = tokens >= first and hidden % 16 == 0
        group.calls.clear()
        sharded, wanted = chain(True), chain(False)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            again = chain(True)
        for _ in range(3):
            captured.replay()
        for index, (left, later, right) in enumerate(zip(sharded, again, wanted, strict=True)):
            if owns:  # below, NCCL may sum, in an order of its own
                same(left, right, f"{tokens}x{hidden}: output {index}")
                same(later, right, f"{tokens}x{hidden}: output {index}, replayed")
        if any("RS_NORM_AG" in name for name in group.calls) != owns:
            raise AssertionError(f"{tokens}x{hidden}: {group.calls}")


def buffer_of(workspace: SymmetricWorkspace) -> ReduceScatterBuffer:
    buffer = form_reduce_scatter_buffer(dist.group.WORLD, device(), 64 << 20)
    assert buffer is not None
    return buffer


def put(part: Tensor, buffer: ReduceScatterBuffer, late: random.Random | None = None) -> None:
    """Write it where the ranks of its rows read it; late: with pauses."""
    targets = scatter_targets(*part.shape, part.dtype, buffer)
    assert targets is not None
    for rows, out in targets:
        if late is not None and late.random() < 0.3:
            torch.cuda._sleep(late.randrange(2_000_000))
        out.copy_(part[rows])


def gemm_rs(workspace: SymmetricWorkspace) -> None:
    """Every mode and dtype, ranks that are late at any target; then again, with a sharded residual."""
    cases = [(torch.bfloat16, *shape, mode) for shape in ((64, 16), (101, 1008), (1000, 8192), (4000, 8192)) for mode in MODES]
    gemm_rs_with(workspace, [*cases, *((dtype, 333, 2048, mode) for dtype in (torch.float16, torch.float32) for mode in MODES)])


def gemm_rs_with(workspace: SymmetricWorkspace, cases: Sequence[tuple[torch.dtype, int, int, Mode]]) -> None:
    buffer, late = buffer_of(workspace), random.Random(workspace.rank)
    for dtype, tokens, hidden, mode in cases:
        part, _, total, fusion = case(workspace, tokens, hidden, dtype, mode)
        wanted, step_fusion = finish(total, fusion), fusion
        for call in range(6):
            put(part, buffer, late)
            outputs = GemmRs(workspace, buffer).all_reduce_norm(step_fusion)
            agrees(outputs, wanted, workspace, f"{dtype} {tokens}x{hidden} {mode}, GEMM_RS, call {call}")
            step_fusion = replace(fusion, residual=outputs[-1])
            wanted = finish(total, replace(fusion, residual=wanted[-1]))


def gemm_rs_in_a_graph(workspace: SymmetricWorkspace) -> None:
    """See `repeated`; each call is followed by an RS_NORM_AG, and by another GEMM_RS."""
    buffer = buffer_of(workspace)

    def act(x: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        put(x, buffer)
        outputs = GemmRs(workspace, buffer).all_reduce_norm(fusion)
        again = RsNormAg(workspace).all_reduce_norm(x, replace(fusion, residual=outputs[-1]))
        put(x, buffer)
        GemmRs(workspace, buffer).all_reduce_norm(replace(fusion, residual=again[-1]))
        return outputs

    repeated(workspace, ((64, 4096), (700, 1024), (300, 8192), (333, 2048)), act)


def gemm_rs_in_fp8(workspace: SymmetricWorkspace) -> None:
    """The group that picks GEMM_RS from some size on, if the sharding stays the same: real GEMMs, some of which write to
    targets."""
    group, plain = (tuned(TorchGroup(dist.group.WORLD, device()), message_bytes=64 << 20, strategy=s) for s in ("AUTO", "TWOSHOT"))
    kind = Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE
    for tokens in (4096, 3001, 2048, 2047):
        _, _, _, fusion = case(workspace, tokens, 8192, torch.bfloat16, MODES[2])
        x, weight = (tensor_of(workspace.rank, size, 1024, torch.bfloat16, 27) for size in (tokens, 8192))
        quantized, weight_fp8 = Quantized(*quantize_fp8(x)), quantize_fp8(weight)
        outputs: list[list[Tensor]] = [[], []]
        for through, kept in ((group, outputs[0]), (plain, outputs[1])):
            residual: Tensor = fusion.residual
            for fp8 in (True, False, True):
                step_fusion = replace(fusion, residual=residual, accepts_sharded=through is group)
                scatter = through.gemm_reduce_scatter_targets(tokens, 8192, step_fusion) if fp8 else None
                stays = not isinstance(residual, ShardedResidual) or same_sharding(tokens, residual.chunk_rows, tokens)
                picked = group.decide(tokens, 8192, "bf16", kind, Caller.GEMM).strategy is Strategy.GEMM_RS
                assert (scatter is not None) == (fp8 and through is group and picked and stays)
                if scatter is None:
                    output = scaled_mm(quantized, weight_fp8[0], weight_fp8[1].view(-1), dtype=torch.bfloat16)
                    *norms, residual = through.all_reduce(output, step_fusion)
                else:
                    scaled_mm_into(quantized, weight_fp8[0], weight_fp8[1].view(-1), scatter.targets)
                    *norms, residual = scatter.finish()
                kept += norms
            kept.append(unshard(residual, through))
        for index, (left, right) in enumerate(zip(*outputs, strict=True)):
            same(left, right, f"{tokens} tokens: output {index}")


def gemm_rs_in_16_bit(workspace: SymmetricWorkspace) -> None:
    """GEMMs in bf16, whose sums may have another order where they have fewer rows."""
    group, plain = (tuned(TorchGroup(dist.group.WORLD, device()), message_bytes=64 << 20, strategy=s) for s in ("AUTO", "TWOSHOT"))
    for tokens in (4096, 2501):
        _, _, _, fusion = case(workspace, tokens, 8192, torch.bfloat16, MODES[0])
        x, weight = (tensor_of(workspace.rank, size, 1024, torch.bfloat16, 28) for size in (tokens, 8192))
        sharded_fusion = replace(fusion, accepts_sharded=True)
        scatter = group.gemm_reduce_scatter_targets(tokens, 8192, sharded_fusion)
        assert scatter is not None
        for rows, out in scatter.targets:
            linear(x[rows], weight, out=out)
        norm, residual = scatter.finish()
        wanted = plain.all_reduce(linear(x, weight), fusion)
        for left, right in zip((norm, unshard(residual, group)), wanted, strict=True):
            torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2 * right.float().abs().mean().item())


CHECKS = {
    check.__name__: check
    for check in (
        shapes,
        rows_of_405b,
        launches,
        chunks,
        strange_values,
        graph,
        picked,
        gemm_rs,
        gemm_rs_in_a_graph,
        gemm_rs_in_fp8,
        gemm_rs_in_16_bit,
    )
}


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
