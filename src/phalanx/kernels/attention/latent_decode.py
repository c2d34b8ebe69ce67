# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Decode attention of MLA (arXiv 2405.04434), absorbed, over the paged latent cache, with split-KV, in one launch or two that
nobody plans on the host.

    scores = (query[r, h] . latents[:, :rank] + rotated[r, h] . latents[:, rank:]) * scale
    out[r, h] = softmax(scores) @ latents[:, :rank]                          see `reference.latent_decode_attention`

All heads of a rank attend to the same latents, so the heads are the rows of the tensor cores' tiles: a program has up to HEADS
heads of one row, and some of its tokens. A tile of latents is read once, and is both keys and values.

Rows are split as in `decode`: on the device, by all rows' lengths. The results of a split are WIDTH * HEADS numbers in fp32: where
rows have many splits, a second kernel merges them (`split_reduce.split_merge`), else the last split to arrive."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.attention.decode import _blocks, _dot, _in_fp16
from phalanx.kernels.attention.heuristics import LatentTiling, SplitKvWorkspace, select_latent_merge
from phalanx.kernels.attention.split_kv import load_split, plan
from phalanx.kernels.attention.split_reduce import LOG2_E, LOWEST, merge_apart, split_reduce
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.quantize import widened
from phalanx.kernels.vectors import nearest


@triton.jit
def _token_places(block, at, WIDTH: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Offsets [TILE, 1] of tokens at .. at + TILE - 1, of WIDTH elements each. As `decode._places` of one head: adding its 0 would
    lose what is stated."""
    run = at + tl.arange(0, TILE // RUN) * RUN
    first = (block * BLOCK_SIZE + run % BLOCK_SIZE).to(tl.int64) * WIDTH
    each = first[:, None] + tl.arange(0, RUN)[None, :] * WIDTH
    ALIGNED: tl.constexpr = WIDTH & -WIDTH
    return tl.multiple_of(tl.reshape(each, [TILE]), [ALIGNED])[:, None]


@triton.jit
def _widened_once(code, like, SM: tl.constexpr):
    """As `widened`, in one layout: two GEMMs read the latents, each from a layout of its own, and Triton 3.6 widens e4m3 once for
    each, from a load that it then does not prefetch. An instruction that is not pure is not repeated; on Blackwell, no loop with
    such a one is compiled."""
    if SM >= 89 and SM < 100 and like.dtype == tl.float16:
        value = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        if SM > 0 and SM < 100:
            code = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [code], dtype=tl.uint8, is_pure=False, pack=4)
        value = widened(code, like, SM)
    return value


@triton.jit
def _latent_part(
    query, rotated, scales, cache, table, block, begin, end,
    RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """query [HEADS, WIDTH], rotated [HEADS, ROPE_WIDTH] over tokens begin .. end - 1 -> (maximum [HEADS], sum [HEADS], output
    [HEADS, WIDTH], yet to be divided by the sum). scales [HEADS]: of the scores, log2(e) among them; block: of tile one."""
    HEADS: tl.constexpr = query.shape[0]
    FP8: tl.constexpr = cache.dtype.element_ty == tl.uint8
    dim, rope_lane = tl.arange(0, WIDTH)[None, :], tl.arange(0, ROPE_WIDTH)[None, :]
    top = tl.full([HEADS], LOWEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, WIDTH], tl.float32)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        visible = at + tl.arange(0, TILE) < end
        next_block = _blocks(table, at + TILE, end, TILE, RUN, BLOCK_SIZE)
        place = _token_places(block, at, RANK + ROPE, TILE, RUN, BLOCK_SIZE)
        # Latents that are not visible are not read: stale memory may contain NaN, which a factor of 0 does not remove.
        latent = tl.load(cache + place + dim, visible[:, None] & (dim < RANK), 0)
        key = tl.load(cache + place + RANK + rope_lane, visible[:, None] & (rope_lane < ROPE), 0)
        if FP8:
            latent, key = _widened_once(latent, query, SM), widened(key, query, SM)
        score = _dot(rotated, tl.trans(key), tl.zeros([HEADS, TILE], tl.float32), SM)
        score = _dot(query, tl.trans(latent), score, SM) * scales[:, None]
        score = tl.where(visible[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        out = _dot(nearest(weight, query, SM), latent, out * fade[:, None], SM)
        top, block = higher, next_block
    return top, total, out


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables", "table_rows", "lengths"],
)
def _latent_decode(
    query, rotated, cache, tables, table_rows, lengths, splits, out, lse, split_max, totals, outs, arrivals,
    table_stride, row_stride, head_stride, rotated_row_stride, rotated_head_stride, score_scale,
    MEMBERS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, INDIRECT: tl.constexpr,
    EARLY: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Program (band of HEADS of the MEMBERS heads, split, or row where splits is None). row_stride, head_stride: of `query`.
    EARLY: see early_lengths of `decode_attention`."""
    if SM >= 90:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()  # lengths, tables, queries and the newest latents: the kernel before may have written all of them
    FP8: tl.constexpr = cache.dtype.element_ty == tl.uint8
    RUN: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1  # tokens that certainly lie in one block, from a multiple of it on
    item, band = tl.program_id(1), tl.program_id(0)
    if splits is not None:
        row, first, count, begin, end, _, table_row = load_split(splits, item)
    else:
        row, first, count, table_row = item, item, 1, item
        begin, end = 0, tl.load(lengths + row, cache_modifier=".cg")
        if INDIRECT:
            table_row = tl.load(table_rows + row, cache_modifier=".cg")
    if table_row < 0:  # no split
        return
    # Every row has a first split, which waits: so a kernel that waits for this one has waited for those before it, too.
    if SM >= 90 and EARLY:
        gdc_wait()
    table = tables + table_row.to(tl.int64) * table_stride
    block = _blocks(table, begin, end, TILE, RUN, BLOCK_SIZE)

    first_head, members = band * HEADS, MEMBERS - band * HEADS
    lane = tl.arange(0, HEADS)
    dim, rope_lane = tl.arange(0, WIDTH), tl.arange(0, ROPE_WIDTH)
    place = row.to(tl.int64) * row_stride + (first_head + lane[:, None]).to(tl.int64) * head_stride + dim[None, :]
    own = tl.load(query + place, (lane[:, None] < members) & (dim[None, :] < RANK), 0.0)
    place = row.to(tl.int64) * rotated_row_stride + (first_head + lane[:, None]) * rotated_head_stride + rope_lane[None, :]
    own_rotated = tl.load(rotated + place, (lane[:, None] < members) & (rope_lane[None, :] < ROPE), 0.0)
    scales, operand = tl.full([HEADS], score_scale, tl.float32), own
    if FP8 and own.dtype == tl.bfloat16:
        operand, own_rotated, powers = _both_in_fp16(own, own_rotated)
        scales *= powers
    top, total, mixed = _latent_part(
        operand, own_rotated, scales, cache, table, block, begin, end, RANK, ROPE, WIDTH, ROPE_WIDTH, BLOCK_SIZE, RUN, TILE,
        STAGES, SM,
    )  # fmt: skip
    split_reduce(
        out, None, lse, split_max, totals, outs, arrivals, row, item, first, count, first_head, members, top, total, mixed, own,
        1.0, MEMBERS, RANK, HEADS, 1, False, SM,
    )  # fmt: skip


@triton.jit
def _both_in_fp16(query, rotated):
    """As `_in_fp16`, of both parts of a query by the same power."""
    _, powers = _in_fp16(query)
    _, others = _in_fp16(rotated)
    powers = tl.maximum(powers, others)
    inverse = (0x7F000000 - powers.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)[:, None]
    return (query.to(tl.float32) * inverse).to(tl.float16), (rotated.to(tl.float32) * inverse).to(tl.float16), powers


def latent_decode_attention(
    query: Tensor, rotated: Tensor, cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor, *,
    scale: float, workspace: SplitKvWorkspace, tiling: LatentTiling, splits: Tensor | None = None, early_lengths: bool = False,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel of `reference.latent_decode_attention`, for a contiguous cache; the last dims of `query` and `rotated`
    are contiguous. `workspace` is this stream's alone. splits: what `split_kv.plan` gives for these rows and this tiling;
    None: it runs here, where the tiling has extra_splits."""
    rows, members, rank = query.shape
    rope_dim, block_size = rotated.shape[2], cache.shape[1]
    out = query.new_empty(query.shape) if out is None else out
    if not rows:
        return out
    if splits is None and tiling.extra_splits:
        splits, early_lengths = plan(kv_lengths, table_rows, tiling.split, window=None, block_size=block_size), False
    sm, fp8, heads = sm_arch(query.device), cache.dtype == torch.float8_e4m3fn, tiling.heads
    width, bands = max(16, triton.next_power_of_2(rank)), triton.cdiv(members, heads)
    groups = rows * bands if tiling.extra_splits else 0
    results = groups * (1 + triton.cdiv(tiling.extra_splits, rows))
    split_max, totals, outs, arrivals = workspace.take(groups, results, heads, width)
    merged_apart = splits if tiling.apart else None
    _latent_decode[(bands, rows if splits is None else len(splits))](
        query, rotated, cache.view(torch.uint8) if fp8 else cache, block_tables,
        kv_lengths if table_rows is None else table_rows, kv_lengths, splits, out, lse, split_max, totals, outs,
        arrivals if merged_apart is None else None, block_tables.stride(0), *query.stride()[:2], *rotated.stride()[:2],
        scale * LOG2_E,
        MEMBERS=members, RANK=rank, ROPE=rope_dim, WIDTH=width, ROPE_WIDTH=max(16, triton.next_power_of_2(rope_dim)), HEADS=heads,
        BLOCK_SIZE=block_size, TILE=tiling.tile, STAGES=tiling.stages,
        INDIRECT=splits is None and table_rows is not None, EARLY=early_lengths, SM=sm, num_warps=tiling.warps, launch_pdl=sm >= 90,
    )  # fmt: skip
    if merged_apart is not None:
        lanes, at_once, block = select_latent_merge(rows)
        merge_apart(
            merged_apart, out, None, split_max, totals, outs, kv_heads=1, heads=heads, width=width, lanes=lanes, at_once=at_once,
            block=block, value_scale=1.0, early_lengths=early_lengths, sm=sm, lse=lse,
        )  # fmt: skip
    return out
