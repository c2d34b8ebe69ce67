# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's lists grow by +)
"""Decode attention over the paged KV cache with split-KV (flash-decoding), in one launch or two that nobody plans on the host.

    out[r, h] = softmax(scale * query[r, h] . keys[begin:length]) @ values[begin:length]        see `reference.decode_attention`

A program has some tokens of one row for one KV head and up to 16 of its query heads. Scores are [tokens, heads] and outputs
[dims, heads]: all 16 rows of a tensor core are then used, and of its 8 columns as many as there are heads. Where throughput counts,
each warp takes tokens of its own through the entire loop, with a maximum, a sum and an output of its own; where the latency of few
tokens counts, the warps are `cooperative`: they have one maximum, and each has dims of the output to itself.

Keys in int8 are multiplied as they are, by two digits of the queries in int8. Values in int8 are read as fp16 with an offset of
128, which is taken off each tile's sums in fp32. So they take fewer instructions than e4m3, which is widened to fp16.

How many programs share a row is decided on the device, from all rows' lengths (`split_kv`). Where several do, each leaves its
partial result in a workspace. Either it also counts itself, and the last one to arrive merges all (`split_reduce`), in an order
that does not depend on which is last, and sets the count back to 0 for the next launch; or a second kernel merges them
(`split_reduce.split_merge`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.attention.heuristics import DecodeTiling, SplitKvWorkspace
from phalanx.kernels.attention.split_kv import load_split, plan, visible_range
from phalanx.kernels.attention.split_reduce import LOG2_E, LOWEST, merge_apart, split_reduce
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.quantize import widened
from phalanx.kernels.vectors import largest_along, nearest

MAX_HEADS = 16
"""Query heads that a program computes, at most."""


OFFSET = tl.constexpr(-(2.0**-17))
"""Of the values of `_int8_half`: -128 * 2^-24."""

DIGIT_STEPS = tl.constexpr(32639.0)
"""The largest magnitude of two digits of `_digits`: 127 * 256 + 127."""

ONES = tl.constexpr(0x3F803F80)
"""Two scales of 1, as a word of `token_scales`."""


@triton.jit
def _half(pairs, like, ODD: tl.constexpr, SM: tl.constexpr):
    """The first or (ODD) the second of the two bytes of e4m3 in each element of 16 bits, in the dtype of `like`, exactly. 16 bits
    are the smallest element that a tensor core's transposing read knows."""
    if SM >= 89:
        if ODD:
            value = tl.inline_asm_elementwise(
                "{ .reg .b32 two; .reg .b16 low, high; prmt.b32 two, $1, 0, 0x4431; mov.b32 {low, high}, two;"
                " cvt.rn.f16x2.e4m3x2 $0, low; }",
                "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            value = tl.inline_asm_elementwise(
                "{ .reg .b32 two; .reg .b16 low, high; prmt.b32 two, $1, 0, 0x4420; mov.b32 {low, high}, two;"
                " cvt.rn.f16x2.e4m3x2 $0, low; }",
                "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        value = widened((pairs >> (8 if ODD else 0)).to(tl.uint8), like, SM)
    return value


@triton.jit
def _int8_half(pairs, ODD: tl.constexpr, SM: tl.constexpr):
    """The first or (ODD) the second of the two int8 values in each element of 16 bits, as fp16: (value + 128) * 2^-24, exactly. The
    bits of value + 128, which flips the sign bit, are those of this subnormal number: one instruction for two values, or two."""
    if SM > 0:
        if ODD:
            value = tl.inline_asm_elementwise(
                "{ .reg .b32 high; shr.u32 high, $1, 8; lop3.b32 $0, high, 0x00FF00FF, 0x00800080, 0x6A; }",
                "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            value = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00FF00FF, 0x00800080, 0x6A;",
                "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        value = (((pairs >> (8 if ODD else 0)) & 0xFF) ^ 0x80).to(tl.uint16).to(tl.float16, bitcast=True)
    return value


@triton.jit
def _add_int8_values(out, odd, fade, pairs, weight, SM: tl.constexpr):
    """out, odd [dims / 2, heads] * fade + 2^-24 * the first and second values of pairs [dims / 2, tokens] @ weight, fp16 [tokens,
    heads].

    The values have an offset of 128 (see `_int8_half`), so that sums begin with the weights' times -128 * 2^-24 instead of 0. They
    are of one tile each: in fp32 the offset costs less than 2^-12 of the step of int8, however many tokens there are."""
    offset = _dot(tl.full(pairs.shape, OFFSET, tl.float16), weight, tl.zeros_like(out), SM)
    out = out * fade + _dot(_int8_half(pairs, False, SM), weight, offset, SM)
    odd = odd * fade + _dot(_int8_half(pairs, True, SM), weight, offset, SM)
    return out, odd


@triton.jit
def _dot(left, right, total, SM: tl.constexpr):
    """left @ right + total in fp32. Triton's interpreter multiplies no bf16."""
    if SM == 0:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _in_fp16(query):
    """bf16 [HEADS, WIDTH] -> (the same divided by powers of two [HEADS], in fp16; those powers). Then e4m3 may be widened to fp16,
    which takes one instruction for two values; to bf16 it takes five."""
    values = query.to(tl.float32)
    power = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    return (values * inverse[:, None]).to(tl.float16), power.to(tl.float32, bitcast=True)


@triton.jit
def _digits(query):
    """[HEADS, WIDTH] -> (high, low int8 [WIDTH, HEADS], unit fp32 [HEADS]): query = (256 * high + low) * unit.

    int8 keys need no widening then. The error is 2^-16 of a head's largest magnitude; bf16 has 2^-9 of each. NaN is in the unit."""
    values = query.to(tl.float32)
    top = tl.maximum(largest_along(tl.abs(values), 1), 1e-30, propagate_nan=tl.PropagateNan.ALL)
    # 1.5 x 2^23: the integer is in the low bits of the mantissa
    steps = (values * (DIGIT_STEPS / top) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    high = (steps + 128) >> 8
    unit = tl.reshape(top, [query.shape[0]]) * (1.0 / DIGIT_STEPS)
    return tl.trans(high.to(tl.int8)), tl.trans((steps - high * 256).to(tl.int8)), unit


@triton.jit
def _digit_dot(key, high, low):
    """int8: key @ (256 * high + low), exactly until it is rounded to fp32: int32 holds the sums of heads of up to 256 dims."""
    return tl.dot(key, low, tl.dot(key, high, out_dtype=tl.int32) * 256, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def _blocks(table, at, end, TILE: tl.constexpr, RUN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The KV blocks of tokens at .. at + TILE - 1: one block for RUN of them."""
    first = at + tl.arange(0, TILE // RUN) * RUN
    return tl.load(table + first.to(tl.uint32) // BLOCK_SIZE, first < end, 0)


@triton.jit
def _places(
    block, at, head, APART: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Offsets of a head of TILE tokens, in APART groups if that is more than 1. HEAD, SLOT: elements from one head or token to the
    next."""
    run = at + tl.arange(0, TILE // RUN) * RUN
    first = (block * BLOCK_SIZE + run % BLOCK_SIZE).to(tl.int64) * SLOT
    each = first[:, None] + tl.arange(0, RUN)[None, :] * SLOT
    # Stated, since Triton loses it where shapes change: with it a load takes 16 bytes.
    ALIGNED: tl.constexpr = HEAD & -HEAD
    if APART > 1:
        place = tl.multiple_of(tl.reshape(each, [APART, TILE // APART]) + head * HEAD, [ALIGNED, ALIGNED])
    else:
        place = tl.multiple_of(tl.reshape(each, [TILE]) + head * HEAD, [ALIGNED])
    return place


@triton.jit
def _token_scales(
    token_scales, block, at, head, visible, APART: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, COPIES: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Of a head's TILE keys the scales; of its values the scales' logarithms to base 2, and their inverses; fp32. They are two bf16
    in a word, and a block's words lie side by side. A scale is 1 where a token is not visible: stale memory may contain NaN.

    COPIES: columns of the load, of which only the first is read. A load of fewer words than threads would be repeated by each
    thread for all words that it needs, and the logarithms, too."""
    first = (block.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE
    if RUN != BLOCK_SIZE:
        first += (at + tl.arange(0, TILE // RUN) * RUN) % BLOCK_SIZE
    place = first[:, None] + tl.arange(0, RUN)[None, :]
    if APART > 1:
        place = tl.reshape(place, [APART, TILE // APART])
    else:
        place = tl.reshape(place, [TILE])
    if COPIES > 1:
        column = tl.arange(0, COPIES)[None, :]
        words = tl.sum(tl.load(token_scales + place[:, None] + column * 0, column == 0, 0), 1)
    else:
        words = tl.load(token_scales + place)
    words = tl.where(visible, words, ONES)
    value_scale = (words & -65536).to(tl.float32, bitcast=True)
    return (words << 16).to(tl.float32, bitcast=True), _log2(value_scale, SM), _inverse(value_scale, SM)


@triton.jit
def _log2(value, SM: tl.constexpr):
    """Of a normal number above 0, by the hardware: to within 2^-22."""
    if SM > 0:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        result = tl.log2(value)
    return result


@triton.jit
def _inverse(value, SM: tl.constexpr):
    """Of a normal number above 0, by the hardware: to within the last bit."""
    if SM > 0:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], tl.float32, is_pure=True, pack=1)
    else:
        result = 1.0 / value
    return result


@triton.jit
def _with_token_scales(
    score, AXIS: tl.constexpr, token_scales, block, at, head, visible, APART: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, COPIES: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """score: of int8 keys, whose tokens lie along AXIS -> the same with their scales and their values'; the inverses of the latter.

    A score gets its key's scale as a factor. Its weight 2^score gets its value's: the logarithm is added to the score, so that the
    largest weight is 1, and no weight that counts is too small for fp16. Weights times the inverses add up to the softmax's sum."""
    key_scale, log2_scale, inverse = _token_scales(
        token_scales, block, at, head, visible, APART, TILE, RUN, BLOCK_SIZE, KV_HEADS, COPIES, SM
    )  # fmt: skip
    OTHER: tl.constexpr = 1 - AXIS if len(score.shape) == 2 else 2
    score = score * tl.expand_dims(key_scale, OTHER) + tl.expand_dims(log2_scale, OTHER)
    return score, tl.expand_dims(inverse, OTHER)


@triton.jit
def _joined(top, total, out, odd, APART: tl.constexpr, PAIRS: tl.constexpr):
    """Merge the results of APART groups of tokens; and interleave even and odd dims."""
    if APART > 1:
        groups, top = top, tl.max(top, 0)
        fade = tl.exp2(groups - top[None, :])
        total, out = tl.sum(total * fade, 0), tl.sum(out * fade[:, None, :], 0)
        if PAIRS:
            odd = tl.sum(odd * fade[:, None, :], 0)
    if PAIRS:
        out = tl.reshape(tl.permute(tl.join(out, odd), (0, 2, 1)), [2 * out.shape[0], out.shape[1]])
    return top, total, out


@triton.jit
def _operands(query, scales, APART: tl.constexpr, DIGITS: tl.constexpr):
    """query [HEADS, WIDTH] -> (what keys are multiplied by, for each of APART groups [WIDTH, HEADS]: the query, or (DIGITS) its two
    digits; the scales of the scores [HEADS])."""
    if DIGITS:
        high, low, unit = _digits(query)
        operands, scales = (_of_each_group(high, APART), _of_each_group(low, APART)), scales * unit
    else:
        operands = (_of_each_group(tl.trans(query), APART),)
    return operands, scales


@triton.jit
def _of_each_group(operand, APART: tl.constexpr):
    if APART > 1:
        operand = tl.broadcast_to(operand[None, :, :], [APART, operand.shape[0], operand.shape[1]])
    return operand


@triton.jit
def _as_operand(values, like, SM: tl.constexpr):
    """Cached values in the dtype of `like`, exactly."""
    if values.dtype == tl.int8 or values.dtype == tl.uint8:
        values = widened(values, like, SM)
    return values


@triton.jit
def _scores(key, operands, query, zeros, SM: tl.constexpr):
    """Keys [tokens, WIDTH] @ what `_operands` gives -> fp32 [tokens, HEADS] as zeros, yet to be scaled."""
    if len(operands) == 2:
        score = _digit_dot(key, operands[0], operands[1])
    else:
        score = _dot(_as_operand(key, query, SM), operands[0], zeros, SM)
    return score


@triton.jit
def _add_pairs(out, odd, fade, pairs, weight, INT8: tl.constexpr, SM: tl.constexpr):
    """out, odd [dims / 2, heads] * fade + the first and second values of pairs [dims / 2, tokens] @ weight, fp16 [tokens, heads];
    of int8 2^-24 of them."""
    if INT8:
        out, odd = _add_int8_values(out, odd, fade, pairs, weight, SM)
    else:
        out = _dot(_half(pairs, weight, False, SM), weight, out * fade, SM)
        odd = _dot(_half(pairs, weight, True, SM), weight, odd * fade, SM)
    return out, odd


@triton.jit
def _part(
    query, scales, key_cache, value_cache, token_scales, table, block, begin, low, end, head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, RUN: tl.constexpr,
    TILE: tl.constexpr, APART: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, PAIRS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """query [HEADS, WIDTH] over tokens low .. end - 1 of a row, begin <= low a multiple of RUN -> (maximum [HEADS], sum [HEADS],
    output [WIDTH, HEADS], yet to be divided by the sum). scales [HEADS]: of the scores, log2(e) among them; block: of tile one.
    PAIRS: two values are read as one element (see `_half`), and even and odd dims are outputs of their own."""
    HEADS: tl.constexpr = query.shape[0]
    INT8: tl.constexpr = key_cache.dtype.element_ty == tl.int8
    AXIS: tl.constexpr = 1 if APART > 1 else 0
    GROUPS: tl.constexpr = [APART] if APART > 1 else []
    EACH: tl.constexpr = 2 if PAIRS else 1
    key_dim, value_dim = tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH // EACH)[:, None]
    operands, scales = _operands(query, scales, APART, INT8 and PAIRS)
    if APART > 1:
        key_dim, value_dim = key_dim[None, :, :], value_dim[None, :, :]
    top = tl.full(GROUPS + [HEADS], LOWEST, tl.float32)
    total = tl.zeros(GROUPS + [HEADS], tl.float32)
    out = tl.zeros(GROUPS + [WIDTH // EACH, HEADS], tl.float32)
    odd = out
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        token = at + tl.reshape(tl.arange(0, TILE), GROUPS + [TILE // APART])
        visible = token < end
        if WINDOWED:
            visible &= token >= low
        next_block = _blocks(table, at + TILE, end, TILE, RUN, BLOCK_SIZE)
        place = _places(block, at, head, APART, TILE, RUN, BLOCK_SIZE, DIM, KV_HEADS * DIM)
        # Keys that are not visible may be read, from any block, as their scores are replaced.
        there = tl.expand_dims(place, AXIS + 1) + key_dim
        key = tl.load(key_cache + there) if DIM == WIDTH else tl.load(key_cache + there, key_dim < DIM, 0)
        score = _scores(key, operands, query, tl.zeros(GROUPS + [TILE // APART, HEADS], tl.float32), SM) * scales
        if INT8:
            each = token_scales, block, at, head, visible
            score, inverse = _with_token_scales(score, AXIS, *each, APART, TILE, RUN, BLOCK_SIZE, KV_HEADS, 1, SM)
        score = tl.where(tl.expand_dims(visible, AXIS + 1), score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, AXIS))
        weight = tl.exp2(score - tl.expand_dims(higher, AXIS))
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight * inverse if INT8 else weight, AXIS)
        # Values that are not visible are not read: stale memory may contain NaN, which a factor of 0 does not remove; but int8 has
        # none.
        read = value_dim < DIM // EACH
        if not INT8:
            read &= tl.expand_dims(visible, AXIS)
        operand, fade = nearest(weight, tl.zeros([1], tl.float16) if PAIRS else query, SM), tl.expand_dims(fade, AXIS)
        if PAIRS:
            place = _places(block, at, head, APART, TILE, RUN, BLOCK_SIZE, DIM // 2, KV_HEADS * DIM // 2)
            there = tl.expand_dims(place, AXIS) + value_dim
            pairs = tl.load(value_cache.to(tl.pointer_type(tl.uint16)) + there, read, 0)
            out, odd = _add_pairs(out, odd, fade, pairs, operand, INT8, SM)
        else:
            value = tl.load(value_cache + tl.expand_dims(place, AXIS) + value_dim, read, 0)
            out = _dot(_as_operand(value, query, SM), operand, out * fade, SM)
        top, block = higher, next_block
    if INT8 and PAIRS:
        out, odd = out * 16777216.0, odd * 16777216.0  # 2^24
    return _joined(top, total, out, odd, APART, PAIRS)


@triton.jit
def _prefetch(
    key_cache, value_cache, table, begin, end, head, DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Ask for the first TILES tiles of a split to be in the L2 cache, while the kernel before may still write the newest tokens and
    blocks: nothing that is read here is used. A table's old entries name blocks of the cache, too."""
    LINE: tl.constexpr = 128 * 8 // key_cache.dtype.element_ty.primitive_bitwidth  # elements of a line of the cache
    LINES: tl.constexpr = (DIM + LINE - 1) // LINE
    line = tl.arange(0, triton.next_power_of_2(LINES))[None, :]
    for at in range(begin, tl.minimum(end, begin + TILES * TILE), TILE):
        first = at + tl.arange(0, TILE // RUN) * RUN
        # Not into the L1 cache, where it would be found again when the newest blocks are in the table.
        block = tl.load(table + first.to(tl.uint32) // BLOCK_SIZE, first < end, 0, cache_modifier=".cg")
        place = _places(block, at, head, 1, TILE, RUN, BLOCK_SIZE, DIM, KV_HEADS * DIM)
        there = place[:, None] + tl.minimum(line, LINES - 1) * LINE
        _prefetch_lines(key_cache + there)
        _prefetch_lines(value_cache + there)


@triton.jit
def _prefetch_lines(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "table_rows", "lengths"],
)
def _decode(
    query, key_cache, value_cache, token_scales, tables, table_rows, lengths, splits, sinks, out, split_max, totals, outs, arrivals,
    table_stride, window, score_scale, value_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, PREFETCH: tl.constexpr, TILE: tl.constexpr,
    APART: tl.constexpr, STAGES: tl.constexpr, INDIRECT: tl.constexpr, WINDOWED: tl.constexpr, EARLY: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """Program (KV head and band of HEADS of its query heads, split, or row where splits is None). EARLY: see
    early_lengths; PREFETCH: tiles; AT_ONCE, BLOCK: see `split_reduce`."""
    if SM >= 90:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()  # lengths, tables, queries and the newest keys and values: the kernel before may have written all of them
    BANDS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.uint8
    QUANTIZED: tl.constexpr = FP8 or key_cache.dtype.element_ty == tl.int8
    RUN: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1  # tokens that certainly lie in one block, from a multiple of it on
    item, kv_head, band = tl.program_id(1), tl.program_id(0) // BANDS, tl.program_id(0) % BANDS
    if splits is not None:
        row, first, count, begin, end, low, table_row = load_split(splits, item)
    else:
        row, first, count, table_row = item, item, 1, item
        low, begin, end = visible_range(tl.load(lengths + row, cache_modifier=".cg"), window, RUN, WINDOWED)
        if INDIRECT:
            table_row = tl.load(table_rows + row, cache_modifier=".cg")
    if table_row < 0:  # no split
        return
    table = tables + table_row.to(tl.int64) * table_stride
    if SM >= 90 and EARLY and PREFETCH > 0:
        _prefetch(key_cache, value_cache, table, begin, end, kv_head, DIM, KV_HEADS, BLOCK_SIZE, RUN, TILE, PREFETCH)
    # Every row has a first split, which waits: so a kernel that waits for this one has waited for those before it, too.
    if SM >= 90 and EARLY:
        gdc_wait()
    block = _blocks(table, begin, end, TILE, RUN, BLOCK_SIZE)

    first_head, members = kv_head * GROUP + band * HEADS, GROUP - band * HEADS
    lane, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    place = (row.to(tl.int64) * (KV_HEADS * GROUP) + first_head + lane[:, None]) * DIM + dim[None, :]
    own = tl.load(query + place, (lane[:, None] < members) & (dim[None, :] < DIM), 0.0)
    scales, operand = tl.full([HEADS], score_scale, tl.float32), own
    if FP8 and own.dtype == tl.bfloat16:
        operand, powers = _in_fp16(own)
        scales *= powers
    top, total, transposed = _part(
        operand, scales, key_cache, value_cache, token_scales, table, block, begin, low, end, kv_head,
        DIM, WIDTH, KV_HEADS, BLOCK_SIZE, RUN, TILE, APART, STAGES, WINDOWED, QUANTIZED and operand.dtype != tl.float32, SM,
    )  # fmt: skip
    split_reduce(
        out, sinks, None, split_max, totals, outs, arrivals, row, item, first, count, first_head, members, top, total,
        tl.trans(transposed), own, value_scale, KV_HEADS * GROUP, DIM, LANES, AT_ONCE, BLOCK, SM,
    )  # fmt: skip


def decode_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, table_rows: Tensor | None, kv_lengths: Tensor,
    *, scale: float, window: int | None, kv_scales: tuple[float, float] | None, workspace: SplitKvWorkspace, tiling: DecodeTiling,
    splits: Tensor | None = None, early_lengths: bool = False, out: Tensor | None = None, sinks: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel of `reference.decode_attention`, for contiguous queries and caches; `workspace` is this stream's alone. splits:
    what `split_kv.plan` gives for these rows and this tiling; None: it runs here, where the tiling has extra_splits."""
    rows, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    out = torch.empty_like(query) if out is None else out
    if not rows:
        return out
    if splits is None and tiling.extra_splits:
        splits, early_lengths = plan(kv_lengths, table_rows, tiling, window=window, block_size=block_size), False
    sm, fp8, group = sm_arch(query.device), key_cache.dtype == torch.float8_e4m3fn, q_heads // kv_heads
    # Tensor cores multiply int8 in steps of 32.
    least = 16 if token_scales is None else 32
    width, heads = max(least, triton.next_power_of_2(head_dim)), 8 if group <= 8 else MAX_HEADS
    programs, lanes = kv_heads * triton.cdiv(group, heads), min(heads, triton.next_power_of_2(group))
    groups = rows * programs if tiling.extra_splits else 0
    results = groups * (1 + triton.cdiv(tiling.extra_splits, rows))
    split_max, totals, outs, arrivals = workspace.take(groups, results, heads, width)
    key_scale, value_scale = kv_scales or (1.0, 1.0)
    caches = [cache.view(torch.uint8) if fp8 else cache for cache in (key_cache, value_cache)]
    words = None if token_scales is None else token_scales.view(torch.int32)
    apart = splits is not None and tiling.merge_heads > 0
    _decode[(programs, rows if splits is None else len(splits))](
        query, *caches, words, block_tables, kv_lengths if table_rows is None else table_rows, kv_lengths, splits, sinks, out,
        split_max, totals, outs, None if apart else arrivals, block_tables.stride(0), window or 0, scale * key_scale * LOG2_E,
        value_scale, GROUP=group, KV_HEADS=kv_heads, DIM=head_dim, WIDTH=width, HEADS=heads, LANES=lanes,
        BLOCK_SIZE=block_size,
        AT_ONCE=tiling.merge_splits or min(16, max(1, 16 * tiling.warps // lanes)), BLOCK=tiling.merge_splits > 0,
        PREFETCH=tiling.prefetch, TILE=tiling.tile,
        APART=1 if tiling.cooperative else tiling.warps, STAGES=tiling.stages, INDIRECT=splits is None and table_rows is not None,
        WINDOWED=window is not None, EARLY=early_lengths, SM=sm, num_warps=tiling.warps, maxnreg=tiling.registers,
        launch_pdl=sm >= 90,
    )  # fmt: skip
    if splits is not None and apart:
        merge_apart(
            splits, out, sinks, split_max, totals, outs, kv_heads=kv_heads, heads=heads, width=width,
            lanes=min(tiling.merge_heads, lanes), at_once=tiling.merge_splits or 8, block=tiling.merge_splits > 0,
            value_scale=value_scale, early_lengths=early_lengths, sm=sm,
        )  # fmt: skip
    return out
