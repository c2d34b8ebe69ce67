# SPDX-License-Identifier: Apache-2.0
"""Absorbed decode attention over latents: in Triton's interpreter against the reference, and compiled for three generations of
GPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from phalanx.kernels.attention.heuristics import LatentTiling
from tests.support.kernels_compiled import by_generation, compiled_as, spilled
from tests.support.kernels_interpreted import interpret
from tests.support.kernels_latent import SIGNATURE, Case, Inputs, inputs_of

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

CPU = torch.device("cpu")


def check(case: Case, workspace: Any = None, seed: int = 0) -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace
    from phalanx.kernels.attention.latent_decode import latent_decode_attention

    inputs, scale = inputs_of(case, seed), 0.3 * (case.rank + case.rope) ** -0.5
    wanted_lse, lse = [torch.full(inputs.query.shape[:2], torch.nan) if case.lse else None for _ in range(2)]
    wanted = reference.latent_decode_attention(*inputs, scale=scale, lse=wanted_lse)
    workspace = workspace or SplitKvWorkspace(CPU)
    tiling = LatentTiling(case.band, case.extra_splits, case.tile, 4, 2, case.chunk, case.apart)
    out = latent_decode_attention(*inputs, scale=scale, workspace=workspace, tiling=tiling, lse=lse)
    assert not wanted.isnan().any()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    step = torch.finfo(case.dtype).eps
    torch.testing.assert_close(
        out, wanted, rtol=2 * step, atol=2 * step if case.dtype != torch.float32 else 1e-5, msg=lambda m: f"{case}: {m}"
    )
    assert all(int(counts.abs().sum()) == 0 for *_, counts in workspace._buffers), "the counts are 0 again"


def check_heads_in_bands() -> None:
    for heads, band in ((1, 16), (20, 16), (70, 32)):
        check(Case([1, 33, 100], heads, band=band))


def check_widths_dtypes_and_quantized_latents() -> None:
    for rank, rope, dtype in ((512, 64, torch.bfloat16), (24, 8, torch.float32), (40, 8, torch.float16), (128, 32, torch.bfloat16)):
        for fp8 in (False, True):
            check(Case([5, 97], 4, rank, rope, dtype=dtype, fp8=fp8))


def check_lengths_about_the_edges() -> None:
    """Of tiles (32), of splits, and enough for every split; one split alone, and more than a row needs."""
    lengths = [1, 31, 32, 33, 65, 128, 129, 330]
    for extra_splits in (0, 1, 60):
        check(Case(lengths, extra_splits=extra_splits))
    check(Case(lengths, tile=16, indirect=False))
    check(Case([0, *lengths, 0, 1], extra_splits=32, indirect=False, fp8=True))


def check_splits_merged_apart() -> None:
    """Rows of no, one, a few and many splits, in bands of heads that the last one does not fill."""
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    lengths = [0, 1, 31, 33, 330, 1100]
    for heads, band, fp8 in ((1, 16, False), (5, 16, True), (37, 32, False)):
        check(Case(lengths, heads, rank=24, rope=8, extra_splits=45, chunk=32, apart=True, band=band, fp8=fp8, indirect=fp8))
    check(Case([2] * 3, extra_splits=6, apart=True))
    workspace = SplitKvWorkspace(CPU)
    workspace.num_sms = 132  # each program merges some dims of one head, and many splits at once
    check(Case(lengths, 3, rank=256, rope=16, extra_splits=70, tile=16, chunk=16, apart=True), workspace)


def check_log_sum_exp() -> None:
    """Of rows without a token, of one split, and of several that the last one or a second kernel merges; in bands of heads."""
    lengths = [0, 1, 31, 33, 330, 0, 1100]
    for extra_splits, apart in ((0, False), (40, False), (40, True)):
        check(Case(lengths, 20, extra_splits=extra_splits, apart=apart, lse=True))
    check(Case(lengths, 5, extra_splits=9, fp8=True, indirect=False, block_size=8, lse=True))


def check_block_sizes() -> None:
    for block_size in (1, 5, 256):
        check(Case([1, 49, 150], block_size=block_size))


def check_launches_share_a_workspace() -> None:
    """As replays of captured launches do, with other lengths each time."""
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    workspace = SplitKvWorkspace(CPU)
    for seed, lengths in enumerate(([400, 3], [1, 1], [90, 401], [41, 900])):
        check(Case(lengths, 20, extra_splits=12), workspace, seed)
    assert len(workspace._buffers) == 1


def check_queries_of_any_size_meet_quantized_latents() -> None:
    """bf16 has a wider range than fp16, in which GEMMs with e4m3 run; both parts of a query share a power of two."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace
    from phalanx.kernels.attention.latent_decode import latent_decode_attention

    query, rotated, *rest = inputs_of(Case([60, 60], fp8=True))
    for first, second, scale in ((1e30, 1e30, 1e-31), (1e-30, 1e-30, 1e29), (0.0, 1.0, 0.1), (1.0, 0.0, 0.1)):
        wanted = reference.latent_decode_attention(query * first, rotated * second, *rest, scale=scale)
        out = latent_decode_attention(
            query * first,
            rotated * second,
            *rest,
            scale=scale,
            workspace=SplitKvWorkspace(CPU),
            tiling=LatentTiling(16, 2, 32, 4, 2),
        )
        torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)


CHECKS = [
    check_heads_in_bands, check_widths_dtypes_and_quantized_latents, check_lengths_about_the_edges, check_splits_merged_apart,
    check_log_sum_exp, check_block_sizes, check_launches_share_a_workspace, check_queries_of_any_size_meet_quantized_latents,
]  # fmt: skip


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


SPLIT, UNSPLIT = (16, False, 64), (128, True, 5000)
"""Heads, whether the cache is e4m3, rows."""


@pytest.mark.parametrize(("variant", "arch"), by_generation([SPLIT, (16, True, 1), (128, False, 64), UNSPLIT], {SPLIT, UNSPLIT}))
def test_compiles(variant: tuple[int, bool, int], arch: int) -> None:
    """Down to machine code, as it is launched for DeepSeek-V3 in bf16 on 8 ranks and on one: within a multiprocessor's shared
    memory, with reads of 16 bytes under way."""
    from phalanx.kernels.attention.heuristics import select_latent_decode

    heads, fp8, rows = variant
    tiling = select_latent_decode(rows, heads, 576, 1 if fp8 else 2, 132, shared_memory=SHARED[arch])
    compiled = compiled_kernel(tiling, fp8=fp8, heads=heads, arch=arch, lse=rows == 64)
    assert compiled.metadata.shared <= SHARED[arch]
    ptx = compiled.asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == (arch >= 90)
    assert "mma.sync" in ptx or "wgmma" in ptx or "tcgen05.mma" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert ("atom.gpu.global.acq_rel" in ptx or "atom.global.gpu.acq_rel" in ptx) == (tiling.extra_splits > 0 and not tiling.apart)
    if heads == 16:
        assert spilled(compiled) == 0


@pytest.mark.parametrize(("rows", "lse", "arch"), [(1, True, 80), (1, False, 90), (64, True, 90), (64, False, 100)])
def test_the_merging_kernel_compiles(rows: int, lse: bool, arch: int) -> None:
    from phalanx.kernels.attention import split_reduce
    from phalanx.kernels.attention.heuristics import select_latent_merge

    lanes, at_once, block = select_latent_merge(rows)
    constants = {
        "GROUP": 128, "KV_HEADS": 1, "DIM": 512, "WIDTH": 512, "HEADS": 64, "LANES": lanes, "AT_ONCE": at_once, "BLOCK": block,
        "EARLY": True, "SM": arch, "sinks": None, **({} if lse else {"lse": None}),
    }  # fmt: skip
    kernel = split_reduce.split_merge
    kinds = {name: {**SIGNATURE, "items": "i32", "value_scale": "fp32"}.get(name, "*bf16") for name in kernel.arg_names}
    compiled = compiled_as(kernel, kinds, constants, arch, aligned=[name for name, kind in kinds.items() if kind[0] == "*"])
    assert spilled(compiled) == 0
    assert "ld.global.cg.v4" in compiled.asm["ptx"]


def compiled_kernel(tiling: LatentTiling, *, fp8: bool, heads: int, arch: int, lse: bool = False) -> Any:
    """The kernel as Triton compiles it."""
    from phalanx.kernels.attention import latent_decode

    constants = {
        "MEMBERS": heads, "RANK": 512, "ROPE": 64, "WIDTH": 512, "ROPE_WIDTH": 64, "HEADS": tiling.heads, "BLOCK_SIZE": 16,
        "TILE": tiling.tile, "STAGES": tiling.stages, "INDIRECT": not tiling.extra_splits,
        "EARLY": fp8, "SM": arch, **({} if tiling.extra_splits else {"splits": None}), **({} if lse else {"lse": None}),
        **({"arrivals": None} if tiling.apart else {}),
    }  # fmt: skip
    kernel = latent_decode._latent_decode
    kinds = {name: SIGNATURE.get(name, "*u8" if fp8 and name == "cache" else "*bf16") for name in kernel.arg_names}
    aligned = [name for name, kind in kinds.items() if kind[0] == "*" or ("stride" in name and name != "table_stride")]
    return compiled_as(kernel, kinds, constants, arch, aligned=aligned, num_warps=tiling.warps)


def test_how_rows_and_heads_are_divided() -> None:
    """Few rows are shared by as many programs as the GPU runs at once, many rows' heads go together; everything fits its memory."""
    from phalanx.kernels.attention.heuristics import ROW_CLASSES, _latent_bytes, select_latent_decode

    for shared, rows, heads, itemsize in itertools.product(
        (99 << 10, 163 << 10, 227 << 10), (1, 2, 8, 64, 512), (1, 16, 32, 128), (1, 2)
    ):
        tiling = select_latent_decode(rows, heads, 576, itemsize, 132, shared_memory=shared)
        bands = -(-heads // tiling.heads)
        assert _latent_bytes(tiling.heads, 576, itemsize, tiling.tile, tiling.stages) <= shared
        assert tiling.heads == 16 or tiling.heads <= heads
        assert 1 <= tiling.extra_splits <= max(2 * 132 // bands - rows, 132 // (2 * bands), 1)
        assert not tiling.apart or tiling.extra_splits >= 2 * rows
    assert select_latent_decode(1, 128, 576, 2, 132) == LatentTiling(16, 15, 32, 4, 4, 64, apart=True)
    assert select_latent_decode(64, 16, 576, 2, 132) == LatentTiling(16, 68, 32, 4, 3)
    assert select_latent_decode(256, 128, 576, 2, 132).heads == 64
    assert select_latent_decode(ROW_CLASSES[-1] + 1, 16, 576, 2, 132).extra_splits == 0


@pytest.mark.gpu1
@pytest.mark.parametrize("case", [
    Case([1, 33, 700, 2000], 16, 512, 64), Case([1, 33, 700, 2000], 128, 512, 64, fp8=True), Case([5] * 40 + [3000], 20, 512, 64),
    Case([0, 1, 700, 9000], 128, 512, 64, lse=True), Case([0, 5] * 20 + [3000], 128, 512, 64, lse=True),
], ids=lambda case: f"{case.heads} heads, {len(case.lengths)} rows{', lse' * case.lse}")  # fmt: skip
def test_replayed_on_a_gpu_with_other_lengths(case: Case) -> None:
    """Captured once with lengths of 1, replayed with those of the case; each time the same bits."""
    from phalanx.kernels import reference
    from phalanx.kernels.attention.dispatch import SplitKvWorkspace, latent_decode_attention

    inputs = Inputs(*(None if each is None else each.cuda() for each in inputs_of(case)))  # type: ignore[arg-type]
    workspace, lengths = SplitKvWorkspace(torch.device("cuda")), torch.ones_like(inputs.lengths)
    replayed = inputs._replace(lengths=lengths)
    lse, wanted_lse = (torch.zeros(inputs.query.shape[:2], device="cuda") if case.lse else None for _ in range(2))
    latent_decode_attention(*replayed, scale=0.05, workspace=workspace, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = latent_decode_attention(*replayed, scale=0.05, workspace=workspace, lse=lse)
    lengths.copy_(inputs.lengths)
    wanted, outputs = reference.latent_decode_attention(*inputs, scale=0.05, lse=wanted_lse), []
    for _ in range(20):
        graph.replay()
        outputs.append(out.clone())
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    step = 2 * torch.finfo(case.dtype).eps
    torch.testing.assert_close(outputs[0], wanted, rtol=step, atol=step)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
