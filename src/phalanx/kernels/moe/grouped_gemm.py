# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Grouped GEMM: the GEMMs of all experts in one launch, over the tiles of `sort_by_expert`.

    inner[p, i] = silu(gate_e[i] . x[token of p]) * (up_e[i] . x[token of p])        pairs p in sorted order, e the pair's expert
    or with gelu; or max(up_e[i] . x[token of p], 0)^2                               of experts that are not gated
    out[q, h]   = down_e[h] . inner[p]                                               q: the pair's number, token * top_k + slot

Weights are the rows of a tile and tokens its columns, of which tensor cores take any multiple of 8, where rows come in 64. One
expert's gate and up are two tiles of one program, so that it has both operands of SwiGLU in registers. Programs beyond the tiles
that exist end at once: the grid depends on the number of tokens alone, as a captured graph needs.

Weights are in 16 or 32 bit; or in e4m3 with a scale per row, or per row and block of 128 columns; or in int8 with a scale per row.
x is like the weights; or (with e4m3) in 16 or 32 bit, and the weights are widened in registers. All sums are in fp32, of int8 in
int32. Programs that share a tile's columns
(split-K) leave fp32 sums, which `combine` adds up in their order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.moe.heuristics import BLOCK_K, ExpertTiling
from phalanx.kernels.moe.sort_by_expert import TILE_FIELDS, Tiles, tile_at
from phalanx.kernels.moe.tensors import GATED_ACTIVATIONS, ExpertActivation
from phalanx.kernels.quantize import widened
from phalanx.kernels.vectors import nearest

BLOCK_COLUMNS = tl.constexpr(BLOCK_K)
"""Columns of one k step, and of a block with a scale."""
FEW = 32
"""Pairs up to which a tile for more is computed as a small one."""


@triton.jit
def _dot(w, v, total, WIDEN: tl.constexpr, ADD: tl.constexpr, SM: tl.constexpr):
    """w [rows, columns] times v [tokens, columns], transposed; added to `total` or apart."""
    if WIDEN:
        w = widened(w, total, SM)
    if SM == 0:  # the interpreter does not multiply bf16
        result = tl.dot(w.to(tl.float32), tl.trans(v.to(tl.float32)), input_precision="ieee").to(total.dtype)
        result = total + result if ADD else result
    else:
        if WIDEN:
            w = w.to(v.dtype)
        if ADD:
            result = tl.dot(w, tl.trans(v), total, input_precision="ieee", out_dtype=total.dtype)
        else:
            result = tl.dot(w, tl.trans(v), input_precision="ieee")
    return result


@triton.jit
def _columns(place, column, inputs, FULL: tl.constexpr):
    """One k step's columns; FULL: none of them lies outside a row."""
    if FULL:
        values = tl.load(place)
    else:
        values = tl.load(place, (column >= 0) & (column < inputs), 0.0)
    return values


@triton.jit
def _accumulate(
    total, w, v, w_unit, x_unit, WIDEN: tl.constexpr, BY_BLOCK: tl.constexpr, X_SCALE: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """total + w times v, of which each may have its own scale in this k step (BY_BLOCK: w's, w_unit [rows]; X_SCALE "block": v's,
    x_unit [tokens])."""
    if BY_BLOCK:
        total += _dot(w, v, total, WIDEN, False, SM) * (w_unit[:, None] * x_unit[None, :])
    elif X_SCALE == "block":
        total += _dot(w, v, total, WIDEN, False, SM) * x_unit[None, :]
    else:
        total = _dot(w, v, total, WIDEN, True, SM)
    return total


@triton.jit
def _rescaled(total, scale, weight_row, x_scale, source, BY_BLOCK: tl.constexpr, X_SCALE: tl.constexpr):
    """total [rows, tokens] in fp32, with the scales that hold for whole rows of the weight and of x."""
    total = total.to(tl.float32)
    if scale is not None and not BY_BLOCK:
        total *= tl.load(scale + weight_row)[:, None]
    if X_SCALE == "static":
        total *= tl.load(x_scale)
    elif X_SCALE == "token":
        total *= tl.load(x_scale + source)[None, :]
    return total


@triton.jit
def _pairs_of(
    pairs, first, size, BEGIN: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr, FIRST: tl.constexpr, IN_ORDER: tl.constexpr
):  # fmt: skip
    """Of a tile's pairs, TOKENS from BEGIN on: place in the tile and in sorted order, number, and row of x. Those beyond the last
    repeat the last, and are not stored. IN_ORDER: see `Tiles`."""
    lane = BEGIN + tl.arange(0, TOKENS)
    position = first + tl.maximum(tl.minimum(lane, size - 1), 0)
    pair = position if IN_ORDER else tl.load(pairs + position)
    source = pair // TOP_K if FIRST != "" else position
    return lane, position, pair, source


@triton.jit
def _x_unit(x_scale, x_token_stride, x_block_stride, source, block, X_SCALE: tl.constexpr):
    """The scales [tokens] of x in a block of columns; ones where they hold for more than it."""
    if X_SCALE == "block":
        unit = tl.load(x_scale + source * x_token_stride + block * x_block_stride)
    else:
        unit = tl.full(source.shape, 1.0, tl.float32)
    return unit


@triton.jit
def _w_unit(scale, row, blocks, block, BY_BLOCK: tl.constexpr):
    """The scales [rows] of a weight's rows in a block of columns; ones where they hold for more than it."""
    if BY_BLOCK:
        unit = tl.load(scale + row * blocks + block)
    else:
        unit = tl.full(row.shape, 1.0, tl.float32)
    return unit


@triton.jit
def gate_activation(gate, GELU: tl.constexpr):
    """SiLU, or GELU by tanh: gate / (1 + exp(-t)), where t is the gate, or 2 sqrt(2 / pi) (gate + 0.044715 gate^3)."""
    if GELU:
        exponent = gate * (1.0 + 0.044715 * gate * gate) * -1.5957691216
    else:
        exponent = -gate
    return gate / (1.0 + tl.exp(exponent))


@triton.jit
def _store(
    out, total, total_up, scale, weight_row, up_row, x_scale, lane, position, pair, source, row, size, part, count, outputs,
    FIRST: tl.constexpr, BY_BLOCK: tl.constexpr, X_SCALE: tl.constexpr, PARTS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The sums [rows, tokens] of _pairs_of(..), rescaled, to where they belong; total_up: of up's rows, where gated."""
    total = _rescaled(total, scale, weight_row, x_scale, source, BY_BLOCK, X_SCALE)
    inside = (row < outputs)[:, None] & (lane < size)[None, :]
    if FIRST == "silu" or FIRST == "gelu":
        total_up = _rescaled(total_up, scale, up_row, x_scale, source, BY_BLOCK, X_SCALE)
        total = gate_activation(total, FIRST == "gelu") * total_up
    elif FIRST == "squared":
        total = tl.maximum(total, 0.0)
        total = total * total
    if FIRST != "":
        target = position.to(tl.int64)
    else:
        target = pair.to(tl.int64) + part.to(tl.int64) * count
    place = out + target[None, :] * outputs + row[:, None]
    if PARTS:
        tl.store(place, total, inside)
    else:
        tl.store(place, nearest(total, tl.zeros(total.shape, out.dtype.element_ty), SM), inside)


@triton.jit
def _tile(
    x, x_scale, x_token_stride, x_block_stride, weight, scale, out, pairs, expert, first, size, tile_n, part, count, outputs,
    inputs, blocks, part_blocks, TOP_K: tl.constexpr, FIRST: tl.constexpr, BY_BLOCK: tl.constexpr, X_SCALE: tl.constexpr,
    WIDEN: tl.constexpr, SKIP: tl.constexpr, FULL: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    EXTRA: tl.constexpr, IN_ORDER: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """ROWS rows of an expert's weight (of gate and of up, where it has both) times `size` pairs from `first` on, TOKENS + EXTRA at
    most: the EXTRA are a GEMM of their own, whose operand is in shared memory already."""
    lane, position, pair, source = _pairs_of(pairs, first, size, 0, TOKENS, TOP_K, FIRST, IN_ORDER)
    row = tile_n * ROWS + tl.arange(0, ROWS)
    real_row = tl.minimum(row, outputs - 1)  # rows beyond the last repeat the last, and are not stored
    column = tl.arange(0, BLOCK_COLUMNS)[None, :] - SKIP
    GATED: tl.constexpr = FIRST == "silu" or FIRST == "gelu"
    weight_row = expert * outputs * (2 if GATED else 1) + real_row
    up_row = weight_row + outputs
    SUMS: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([ROWS, TOKENS], SUMS)
    total_up = tl.zeros([ROWS, TOKENS], SUMS)
    if EXTRA > 0:
        lane_2, position_2, pair_2, source_2 = _pairs_of(pairs, first, size, TOKENS, EXTRA, TOP_K, FIRST, False)
        total_2 = tl.zeros([ROWS, EXTRA], SUMS)
        total_up_2 = tl.zeros([ROWS, EXTRA], SUMS)
    begin, end = part * part_blocks, tl.minimum((part + 1) * part_blocks, blocks)
    # Scales come one step ahead: their loads are no operands of a product, which alone are pipelined.
    w_unit = _w_unit(scale, weight_row, blocks, begin, BY_BLOCK)
    x_unit = _x_unit(x_scale, x_token_stride, x_block_stride, source, begin, X_SCALE)
    if GATED:
        u_unit = _w_unit(scale, up_row, blocks, begin, BY_BLOCK)
    if EXTRA > 0:
        x_unit_2 = _x_unit(x_scale, x_token_stride, x_block_stride, source_2, begin, X_SCALE)
    for block in range(begin, end):
        at, ahead = column + block * BLOCK_COLUMNS, tl.minimum(block + 1, end - 1)
        next_w = _w_unit(scale, weight_row, blocks, ahead, BY_BLOCK)
        next_x = _x_unit(x_scale, x_token_stride, x_block_stride, source, ahead, X_SCALE)
        w = _columns(weight + weight_row[:, None] * inputs + at, at, inputs, FULL)
        v = _columns(x + source[:, None].to(tl.int64) * inputs + at, at, inputs, FULL)
        total = _accumulate(total, w, v, w_unit, x_unit, WIDEN, BY_BLOCK, X_SCALE, SM)
        if EXTRA > 0:
            next_x_2 = _x_unit(x_scale, x_token_stride, x_block_stride, source_2, ahead, X_SCALE)
            v_2 = _columns(x + source_2[:, None].to(tl.int64) * inputs + at, at, inputs, FULL)
            total_2 = _accumulate(total_2, w, v_2, w_unit, x_unit_2, WIDEN, BY_BLOCK, X_SCALE, SM)
        if GATED:
            next_u = _w_unit(scale, up_row, blocks, ahead, BY_BLOCK)
            u = _columns(weight + up_row[:, None] * inputs + at, at, inputs, FULL)
            total_up = _accumulate(total_up, u, v, u_unit, x_unit, WIDEN, BY_BLOCK, X_SCALE, SM)
            if EXTRA > 0:
                total_up_2 = _accumulate(total_up_2, u, v_2, u_unit, x_unit_2, WIDEN, BY_BLOCK, X_SCALE, SM)
            u_unit = next_u
        w_unit, x_unit = next_w, next_x
        if EXTRA > 0:
            x_unit_2 = next_x_2
    _store(
        out, total, total_up, scale, weight_row, up_row, x_scale, lane, position, pair, source, row, size, part, count, outputs,
        FIRST, BY_BLOCK, X_SCALE, PARTS, SM,
    )  # fmt: skip
    if EXTRA > 0:
        _store(
            out, total_2, total_up_2, scale, weight_row, up_row, x_scale, lane_2, position_2, pair_2, source_2, row, size, part,
            count, outputs, FIRST, BY_BLOCK, X_SCALE, PARTS, SM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["x_token_stride", "x_block_stride", "count", "tiles_most", "blocks", "part_blocks"])
def _grouped_gemm(
    x, x_scale, x_token_stride, x_block_stride, weight, scale, out, pairs, tiles, num_tiles, count, tiles_most, outputs, inputs,
    blocks, part_blocks, TOP_K: tl.constexpr, FIRST: tl.constexpr, BY_BLOCK: tl.constexpr, X_SCALE: tl.constexpr,
    WIDEN: tl.constexpr, SKIP: tl.constexpr, FULL: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    EXTRA: tl.constexpr, FEW: tl.constexpr, BESIDE: tl.constexpr, IN_ORDER: tl.constexpr, FIELDS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """FIRST: "silu", "gelu" or "squared", x [T, inputs], out [count, outputs] in sorted order; "": x [count, inputs] in sorted
    order, and out [count, outputs] or fp32 [parts, count, outputs] by the pairs' numbers. X_SCALE: "none", "static" (a scalar),
    "token" or "block". A tile with more pairs than TOKENS has up to EXTRA more. FEW: a tile with so few pairs, as an expert's last
    often is, computes no more than that; 0: there is no such way."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    program, part = tl.program_id(0), tl.program_id(1)
    tiles_n = tl.cdiv(outputs, ROWS)
    group = program // (BESIDE * tiles_most)
    beside = tl.minimum(tiles_n - group * BESIDE, BESIDE)
    tile = program % (BESIDE * tiles_most) // beside
    tile_n = group * BESIDE + program % (BESIDE * tiles_most) % beside
    existing = tl.load(num_tiles)
    expert, first, size = tile_at(tiles, tile, FIELDS)
    if tile >= existing:
        return
    if FEW > 0 and size <= FEW:
        _tile(
            x, x_scale, x_token_stride, x_block_stride, weight, scale, out, pairs, expert, first, size, tile_n, part, count,
            outputs, inputs, blocks, part_blocks, TOP_K, FIRST, BY_BLOCK, X_SCALE, WIDEN, SKIP, FULL, PARTS, ROWS, FEW, 0, False,
            SM,
        )  # fmt: skip
    elif EXTRA > 0 and size > TOKENS:
        _tile(
            x, x_scale, x_token_stride, x_block_stride, weight, scale, out, pairs, expert, first, size, tile_n, part, count,
            outputs, inputs, blocks, part_blocks, TOP_K, FIRST, BY_BLOCK, X_SCALE, WIDEN, SKIP, FULL, PARTS, ROWS, TOKENS, EXTRA,
            False, SM,
        )  # fmt: skip
    else:
        _tile(
            x, x_scale, x_token_stride, x_block_stride, weight, scale, out, pairs, expert, first, size, tile_n, part, count,
            outputs, inputs, blocks, part_blocks, TOP_K, FIRST, BY_BLOCK, X_SCALE, WIDEN, SKIP, FULL, PARTS, ROWS, TOKENS, 0,
            IN_ORDER, SM,
        )  # fmt: skip


def grouped_gemm(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor | None, tiles: Tiles, tiling: ExpertTiling, *, top_k: int,
    experts: int, activation: ExpertActivation = "", dtype: torch.dtype, begin: int = 0,
) -> Tensor:  # fmt: skip
    """activation: of x [T, H] times each expert's gate, times its up, weight [experts * 2 * I, H]; "squared": of x times up alone,
    [experts * I, H] -> [P, I] in sorted order, in `dtype`. "": x [P, I] in sorted order times down, weight [experts * H, I] ->
    [parts, P, H] by the pairs' numbers, in fp32 where parts > 1.

    x_scale: of x in e4m3: a scalar, [rows, 1] or [rows, blocks]. Rows of pairs with experts of other ranks are not written."""
    inputs, outputs = weight.shape[1], weight.shape[0] // (experts * (2 if activation in GATED_ACTIVATIONS else 1))
    count, sm = tiles.pairs.numel(), sm_arch(x.device)
    blocks = triton.cdiv(begin + inputs, BLOCK_K)
    part_blocks = triton.cdiv(blocks, tiling.parts)
    parts = triton.cdiv(blocks, part_blocks)
    shape = (count, outputs) if activation else (parts, count, outputs)
    out = torch.empty(shape, dtype=torch.float32 if parts > 1 else dtype, device=x.device)
    by_block = scale is not None and scale.dim() == 2
    if x_scale is None:
        kind, strides = "none", (0, 0)
    elif x_scale.dim() == 0:
        kind, strides = "static", (0, 0)
    else:
        kind, strides = ("token", (0, 0)) if x_scale.shape[1] == 1 and not by_block else ("block", x_scale.stride())
    widen = scale is not None and x_scale is None
    _grouped_gemm[(tiles.most * triton.cdiv(outputs, tiling.rows), parts)](
        x, x_scale, *strides, weight.view(torch.uint8) if widen else weight, scale, out, *tiles[:3], count, tiles.most, outputs,
        inputs, blocks, part_blocks, TOP_K=top_k, FIRST=activation, BY_BLOCK=by_block, X_SCALE=kind, WIDEN=widen, SKIP=begin,
        FULL=begin == 0 and inputs % BLOCK_K == 0, PARTS=parts > 1, ROWS=tiling.rows, TOKENS=tiling.tokens,
        EXTRA=tiling.extra, FEW=FEW if tiling.tokens > 2 * FEW else 0, BESIDE=tiling.beside, IN_ORDER=tiles.in_order,
        FIELDS=TILE_FIELDS, SM=sm, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
