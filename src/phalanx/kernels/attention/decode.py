# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Attention of rows of one token over paged keys and values, in one launch that nobody plans on the host.

    out[r, h] = softmax(scale * query[r, h] . keys[begin:length]) @ values[begin:length]        see `reference.decode_attention`

A program has some tokens of one row for one KV head and up to 16 of its query heads (a tensor core's rows). Its warps each take
tokens of their own through the whole loop, with a maximum, a sum and an output of their own, and meet once at the end: what is
under way from memory is all that counts, and no warp waits for another's softmax.

How many programs share a row is decided by each of them from the row's length. Where several do, each leaves what it has in a
workspace and counts itself; the last one to arrive adds all up in the order of the tokens, so that the result does not depend on
who is last, and sets the count back to 0 for the next launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.attention.split import MOST_PIECES, Split, Workspace
from phalanx.kernels.between.silu_gate import nearest
from phalanx.kernels.residual_rms_norm import capability

LOG2_E = 1.4426950408889634

HEADS = tl.constexpr(16)
"""Query heads that a program computes, padding among them: the rows of a tensor core's product."""

LOWEST = tl.constexpr(-1e30)
"""Below every score, and still finite: the difference of two is a number."""

AT_ONCE = tl.constexpr(8)
"""Pieces whose outputs are under way together where a row's are added up."""


@triton.jit
def _widened(code, like, PTX: tl.constexpr):
    """e4m3 bytes in the dtype of `like`, exactly."""
    if PTX >= 89:
        value = code.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    else:
        bits = code.to(tl.int32)
        size = bits & 0x7F
        # Exponent and mantissa where fp32 has them: exponent bias 7 is read as 127, which the factor 2^120 makes good.
        size = tl.where(size == 0x7F, 0x7F800001, size << 20)
        value = ((size | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(like.dtype)
    return value


@triton.jit
def _product(left, right, total, PTX: tl.constexpr):
    """left @ right + total in fp32. Triton's interpreter multiplies no bf16."""
    if PTX == 0:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _in_fp16(query):
    """bf16 [HEADS, WIDTH] -> (the same over powers of two [HEADS], in fp16; those powers). Then fp16 holds all that e4m3 is to
    meet: from e4m3 to fp16 is one instruction for two values, and to bf16 five."""
    wide = query.to(tl.float32)
    power = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), power.to(tl.float32, bitcast=True)


@triton.jit
def _part(
    query, key_cache, value_cache, table, begin, end, first, slot_stride, score_scales,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """query [HEADS, WIDTH] over tokens begin .. end - 1 of a row -> (maximum [HEADS], sum [HEADS], output [HEADS, WIDTH]), where
    the output is yet to be divided by the sum. first: the head's place within a token; slot_stride: from one token to the next;
    score_scales [HEADS]: of the products, log2(e) among them."""
    TOKENS: tl.constexpr = TILE // WARPS
    dim = tl.arange(0, WIDTH)
    inside = dim < DIM
    step = tl.arange(0, WARPS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    queries = tl.broadcast_to(query[None, :, :], (WARPS, HEADS, WIDTH))
    top = tl.full([WARPS, HEADS], LOWEST, tl.float32)
    total = tl.zeros([WARPS, HEADS], tl.float32)
    out = tl.zeros([WARPS, HEADS, WIDTH], tl.float32)
    block = tl.load(table + (begin + step) // BLOCK_SIZE, begin + step < end, 0)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        token = at + step
        seen = token < end
        coming = tl.load(table + (token + TILE) // BLOCK_SIZE, token + TILE < end, 0)
        place = (block * BLOCK_SIZE + token % BLOCK_SIZE).to(tl.int64) * slot_stride + first
        # What is not seen is not read either: stale memory may hold NaN, which no factor 0 removes.
        there, read = place[:, :, None] + dim[None, None, :], seen[:, :, None] & inside[None, None, :]
        key = tl.load(key_cache + there, read, 0)
        if FP8:
            key = _widened(key, query, PTX)
        nothing = tl.zeros([WARPS, HEADS, TOKENS], tl.float32)
        score = tl.where(
            seen[:, None, :], _product(queries, tl.trans(key, (0, 2, 1)), nothing, PTX) * score_scales[None, :, None], float("-inf")
        )
        higher = tl.maximum(top, tl.max(score, 2))
        weight = tl.exp2(score - higher[:, :, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 2)
        value = tl.load(value_cache + there, read, 0)
        if FP8:
            value = _widened(value, query, PTX)
        out = _product(nearest(weight, query, PTX), value, out * fade[:, :, None], PTX)
        top, block = higher, coming
    highest = tl.max(top, 0)
    fade = tl.exp2(top - highest[None, :])
    return highest, tl.sum(total * fade, 0), tl.sum(out * fade[:, :, None], 0)


@triton.jit
def _added_up(tops, totals, outs, group, pieces, MOST: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """What the pieces of a row left in the workspace from `group` on -> (sum [LANES], output [LANES, WIDTH])."""
    lane, dim = tl.arange(0, LANES), tl.arange(0, WIDTH)
    piece = tl.arange(0, MOST)[:, None]
    every = (group + piece) * HEADS + lane[None, :]
    top = tl.load(tops + every, piece < pieces, LOWEST, cache_modifier=".cg")
    highest = tl.max(top, 0)
    sums = tl.load(totals + every, piece < pieces, 0.0, cache_modifier=".cg")
    total = tl.sum(sums * tl.exp2(top - highest[None, :]), 0)
    out = tl.zeros([LANES, WIDTH], tl.float32)
    for first in range(0, pieces, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            there = first + k < pieces
            place = (group + first + k) * HEADS + lane
            fade = tl.exp2(tl.load(tops + place, there, LOWEST, cache_modifier=".cg") - highest)
            part = tl.load(outs + place[:, None] * WIDTH + dim[None, :], there, 0.0, cache_modifier=".cg")
            out += part * fade[:, None]
    return total, out


@triton.jit
def _store(out, row, first_head, members, total, mixed, like, value_scale, q_heads, DIM: tl.constexpr, PTX: tl.constexpr):
    """mixed [lanes, WIDTH] / total [lanes] as the output of the `members` heads from first_head on."""
    lane, dim = tl.arange(0, mixed.shape[0])[:, None], tl.arange(0, mixed.shape[1])[None, :]
    place = (row.to(tl.int64) * q_heads + first_head + lane) * DIM + dim
    result = mixed * tl.where(total > 0, value_scale / total, 0.0)[:, None]
    tl.store(out + place, nearest(result, like, PTX), (lane < members) & (dim < DIM))


@triton.jit(
    do_not_specialize=["table_stride", "window", "chunk"],
    do_not_specialize_on_alignment=["tables", "table_rows", "lengths"],
)
def _decode(
    query, key_cache, value_cache, tables, table_rows, lengths, out, tops, totals, outs, arrivals,
    table_stride, window, chunk, q_heads, kv_heads, score_scale, value_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, INDIRECT: tl.constexpr, FP8: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Program (KV head and band of 16 of its query heads, row, piece). window: 0 for none. MOST: pieces, at most."""
    if PTX >= 90:
        gdc_launch_dependents()
        gdc_wait()  # lengths, tables, queries and the newest keys and values: all may be what the kernel before has written
    BANDS: tl.constexpr = (GROUP + 15) // 16
    row, piece = tl.program_id(1), tl.program_id(2)
    kv_head, band = tl.program_id(0) // BANDS, tl.program_id(0) % BANDS
    length = tl.load(lengths + row)
    held = row.to(tl.int64)
    if INDIRECT:
        held = tl.load(table_rows + row).to(tl.int64)
    begin = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    tiles = tl.cdiv(length - begin, TILE)
    each = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.minimum(tl.cdiv(length - begin, chunk), tl.num_programs(2)), 1)), 1)
    pieces = tl.maximum(tl.cdiv(tiles, each), 1)
    if piece >= pieces:
        return
    begin += piece * each * TILE
    end = tl.minimum(begin + each * TILE, length)

    first_head, members = kv_head * GROUP + band * HEADS, GROUP - band * HEADS
    lane, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    place = (row.to(tl.int64) * q_heads + first_head + lane[:, None]) * DIM + dim[None, :]
    own = tl.load(query + place, (lane[:, None] < members) & (dim[None, :] < DIM), 0.0)
    scales, narrow = tl.full([HEADS], score_scale, tl.float32), own
    if FP8 and own.dtype == tl.bfloat16:
        narrow, powers = _in_fp16(own)
        scales *= powers
    top, total, mixed = _part(
        narrow, key_cache, value_cache, tables + held * table_stride, begin, end, kv_head * DIM, kv_heads * DIM, scales,
        DIM, WIDTH, BLOCK_SIZE, TILE, WARPS, STAGES, FP8, PTX,
    )  # fmt: skip
    if pieces == 1:
        _store(out, row, first_head, members, total, mixed, own, value_scale, q_heads, DIM, PTX)
    else:
        counted = row * tl.num_programs(0) + tl.program_id(0)
        group = counted * tl.num_programs(2)
        left = (group + piece) * HEADS + lane
        tl.store(tops + left, top)
        tl.store(totals + left, total)
        tl.store(outs + left[:, None] * WIDTH + dim[None, :], mixed, (lane < members)[:, None])
        tl.debug_barrier()  # all warps have stored before one of them releases what they stored
        if tl.atomic_add(arrivals + counted, 1, sem="acq_rel") == pieces - 1:
            tl.store(arrivals + counted, 0)
            whole, added = _added_up(tops, totals, outs, group, pieces, MOST, WIDTH, LANES)
            _store(out, row, first_head, members, whole, added, own, value_scale, q_heads, DIM, PTX)


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor,
    *, scale: float, window: int | None, kv_scales: tuple[float, float] | None, workspace: Workspace, split: Split,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel of `reference.decode_attention`, for contiguous queries and caches; `workspace` is this stream's alone."""
    rows, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    out = torch.empty_like(query) if out is None else out
    if not rows:
        return out
    ptx, fp8, group = capability(query.device), key_cache.dtype == torch.float8_e4m3fn, q_heads // kv_heads
    width, programs = max(16, triton.next_power_of_2(head_dim)), kv_heads * triton.cdiv(group, 16)
    tops, totals, outs, arrivals = workspace.take(rows * programs, split.pieces, width)
    key_scale, value_scale = kv_scales or (1.0, 1.0)
    caches = [cache.view(torch.uint8) if fp8 else cache for cache in (key_cache, value_cache)]
    _decode[(programs, rows, split.pieces)](
        query, *caches, block_tables, kv_lengths if table_rows is None else table_rows, kv_lengths, out,
        tops, totals, outs, arrivals, block_tables.stride(0), window or 0, split.chunk, q_heads, kv_heads,
        scale * key_scale * LOG2_E, value_scale,
        GROUP=group, DIM=head_dim, WIDTH=width, LANES=min(16, triton.next_power_of_2(group)), BLOCK_SIZE=block_size,
        MOST=MOST_PIECES, TILE=split.tile, WARPS=split.warps, STAGES=split.stages,
        INDIRECT=table_rows is not None, FP8=fp8, PTX=ptx, num_warps=split.warps, maxnreg=split.registers, launch_pdl=ptx >= 90,
    )  # fmt: skip
    return out
