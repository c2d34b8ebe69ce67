# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMM with weights of 4-bit integers, which are widened in the registers that the tensor cores read (W4A16).

    out[t, n] = round(sum over k of x[t, k] * round((q[n, k] - zero[n, k / group]) * scale[n, k / group]) + bias[n])

The widened weight is rounded once to x's dtype, as a checkpoint that was dequantized has it; the sum is in fp32, rounded once. The
equivalent plain code is `int4_packing.dequantized` and a product.

Weights are the rows of the tensor cores' product and tokens its columns. Several programs may share a tile's columns of the weight
(split-K): each leaves its sums in fp32, and the last adds all up in the order of the programs, so that a run repeats."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import gpu, sm_arch
from phalanx.kernels.gemm import int4_heuristics
from phalanx.kernels.gemm.counters import counters
from phalanx.kernels.gemm.int4_heuristics import Int4Tiling
from phalanx.kernels.gemm.int4_packing import BLOCK, TILE_COLUMNS, TILE_ROWS, Int4Weight
from phalanx.kernels.vectors import nearest


@triton.constexpr_function
def widening(name, place, zeros, by_step):
    """The instructions that bring two words ($1) of a row to the two values at `place` of each, in 16 bit.

    by_step: groups are whole k steps. Then $2 is their scale twice, or with zeros their scale below their offset. Else $2 has the
    scales of this block and of its neighbour, and with zeros $4 their offsets."""
    kind, one, magic, eight = {
        "bf16": ("bf16x2", "0x3F803F80", "0x43004300", "0xC308C308"), "fp16": ("f16x2", "0x3C003C00", "0x64006400", "0xE408E408")
    }[name]  # fmt: skip
    half = "0x1010" if by_step or place % 2 == 0 else "0x3232"
    scale = "mov.b32 scale, $2;" if by_step and not zeros else f"prmt.b32 scale, $2, $2, {half};"
    offset = f"mov.b32 offset, {eight};"
    if zeros:
        offset = "prmt.b32 offset, $2, $2, 0x3232;" if by_step else f"prmt.b32 offset, $4, $4, {half};"
    return f"""{{
.reg .b32 value, one, zero, scale, offset;
mov.b32 one, {one};
mov.b32 zero, 0x80008000;
{scale}
{offset}
shr.b32 value, $1, {4 * place};
lop3.b32 value, value, 0x000f000f, {magic}, 0xEA;
fma.rn.{kind} value, value, one, offset;
fma.rn.{kind} $0, value, scale, zero;
}}"""


BLOCK_K, GROUP_ROWS, WORDS = tl.constexpr(TILE_COLUMNS), tl.constexpr(TILE_ROWS), tl.constexpr(BLOCK)
WORDS_OF_TILE = tl.constexpr(TILE_ROWS * BLOCK)


@triton.jit
def words_of(row, blocks):
    """Where the words of these rows [R] lie in `Int4Weight.words`, [R, 32], for the first k step."""
    place = (row // GROUP_ROWS).to(tl.int64)[:, None] * blocks * WORDS_OF_TILE
    return place + ((row % GROUP_ROWS)[:, None] * WORDS + tl.arange(0, WORDS)[None, :])


@triton.jit
def nibbles(words, PLACE: tl.constexpr):
    """The values 0..15 at one place of each word, in fp32: for the interpreter."""
    return ((words.to(tl.int32) >> (4 * PLACE)) & 15).to(tl.float32)


@triton.jit
def half(words, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One of the two 16-bit values in each of these int32, in fp32."""
    return ((words >> (16 * HIGH)) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def widened_at(
    words, scale, offset, PLACE: tl.constexpr, BY_STEP: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """words [R, 32] int16 of a k step -> the values at one nibble of each word, in DTYPE. scale, offset [R]: see `widening`."""
    if SM == 0:
        q = nibbles(words, PLACE)
        if ZEROS:
            q += (1024.0 if tl.float16 == DTYPE else 128.0) + half(offset, BY_STEP or PLACE % 2, DTYPE)[:, None]
        else:
            q -= 8.0
        value = nearest(q * half(scale, (not BY_STEP) and PLACE % 2, DTYPE)[:, None], tl.zeros(words.shape, DTYPE), 0)
    else:
        code: tl.constexpr = widening("fp16" if tl.float16 == DTYPE else "bf16", PLACE, ZEROS, BY_STEP)
        scale = tl.broadcast_to(scale[:, None], words.shape)
        if ZEROS and not BY_STEP:
            offset = tl.broadcast_to(offset[:, None], words.shape)
            value = tl.inline_asm_elementwise(code, "=r,r,r,r,r,r", [words, scale, offset], dtype=tl.int16, is_pure=True, pack=2)
        else:
            value = tl.inline_asm_elementwise(code, "=r,r,r,r", [words, scale], dtype=tl.int16, is_pure=True, pack=2)
        value = value.to(DTYPE, bitcast=True)
    return value


@triton.jit
def columns_at(PLACE: tl.constexpr):
    """The columns [1, 32] of a tile whose values words have at this place: see `int4_packing.ORDER`."""
    at = tl.arange(0, WORDS)[None, :]
    return PLACE * WORDS + at // 4 % 2 * 16 + at // 2 % 2 * 8 + at // 8 * 2 + at % 2


@triton.jit
def dot(w, v, total, SM: tl.constexpr):
    """total + w by v transposed, in fp32."""
    if SM == 0:
        w, v = w.to(tl.float32), v.to(tl.float32)
    return tl.dot(w, tl.trans(v), total, input_precision="ieee")


@triton.jit
def _x_at(x_row, valid, column, inputs, FULL: tl.constexpr):
    return tl.load(x_row + column, valid, 0.0) if FULL else tl.load(x_row + column, valid & (column < inputs), 0.0)


@triton.jit
def _plane(table, block, row, rows, PLANE: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """Words [R] of `Int4Weight.scales` for a k step's rows."""
    if GROUP >= BLOCK_K:
        place = block // (GROUP // BLOCK_K)
    else:
        place = block * (4 if ZEROS else 2) + PLANE
    return tl.load(table + place * rows + row)


@triton.jit
def scales_of_step(table, block, row, rows, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """(scales of the first two blocks of a k step, of the others, offsets of the first two, of the others), words [R]. What groups
    do not have of their own is the first again."""
    a = _plane(table, block, row, rows, 0, GROUP, ZEROS)
    b, c, d = a, a, a
    if GROUP < BLOCK_K:
        b = _plane(table, block, row, rows, 1, GROUP, ZEROS)
        if ZEROS:
            c, d = _plane(table, block, row, rows, 2, GROUP, ZEROS), _plane(table, block, row, rows, 3, GROUP, ZEROS)
    return a, b, c, d


@triton.jit(do_not_specialize=["tokens", "part_blocks"])
def _int4_gemm(
    x, words, scales, bias, out, parts, arrivals, tokens, outputs, rows, inputs, blocks, part_blocks, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, FULL: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """x [tokens, inputs]; words, scales: of an `Int4Weight` of `rows` padded rows; parts fp32 [programs of a tile, tokens,
    outputs]."""
    BY_STEP: tl.constexpr = GROUP >= BLOCK_K
    if SM >= 90:
        gdc_launch_dependents()
    tile, part, tile_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    weight_row = tl.minimum(row, rows - 1)
    lane = tile_t * TOKENS + tl.arange(0, TOKENS)
    valid = (lane < tokens)[:, None]
    place = words_of(weight_row, blocks)
    if SM >= 90:
        gdc_wait()
    x_row = x + lane.to(tl.int64)[:, None] * inputs
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(part * part_blocks, tl.minimum((part + 1) * part_blocks, blocks)):
        first = block * BLOCK_K
        w = tl.load(words + place + block * WORDS_OF_TILE)
        a, b, c, d = scales_of_step(scales, block, weight_row, rows, GROUP, ZEROS)
        for step in tl.static_range(4):
            value = widened_at(w, a if step < 2 else b, c if step < 2 else d, step, BY_STEP, ZEROS, x.dtype.element_ty, SM)
            total = dot(value, _x_at(x_row, valid, first + columns_at(step), inputs, FULL), total, SM)
    inside = (row < outputs)[:, None] & (lane < tokens)[None, :]
    target = lane.to(tl.int64)[None, :] * outputs + row[:, None]
    last = True
    if SHARED:
        size = (part * 0 + tokens).to(tl.int64) * outputs
        arrival = arrivals + tile_t * tl.num_programs(0) + tile
        tl.store(parts + part * size + target, total, inside)
        tl.debug_barrier()
        last = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1
        if last:
            tl.store(arrival, 0)
            total = tl.load(parts + target, inside, 0.0, cache_modifier=".cg")
            for other in range(1, tl.num_programs(1)):
                total += tl.load(parts + other * size + target, inside, 0.0, cache_modifier=".cg")
    if last:
        if bias is not None:
            total += tl.load(bias + row, row < outputs, 0.0).to(tl.float32)[:, None]
        tl.store(out + target, nearest(total, tl.zeros([ROWS, TOKENS], out.dtype.element_ty), SM), inside)


@triton.jit
def _int4_widen(
    words, scales, out, first, outputs, rows, inputs, blocks, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    SM: tl.constexpr
):  # fmt: skip
    """The weight's tiles of GROUP_ROWS rows from the row `first` on, a program for each of columns -> out [outputs, inputs]."""
    BY_STEP: tl.constexpr = GROUP >= BLOCK_K
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * GROUP_ROWS + tl.arange(0, GROUP_ROWS)
    block = tl.program_id(1)
    weight_row = first + row
    place = words_of(weight_row, blocks)
    w = tl.load(words + place + block * WORDS_OF_TILE)
    a, b, c, d = scales_of_step(scales, block, weight_row, rows, GROUP, ZEROS)
    for step in tl.static_range(4):
        value = widened_at(w, a if step < 2 else b, c if step < 2 else d, step, BY_STEP, ZEROS, out.dtype.element_ty, SM)
        column = block * BLOCK_K + columns_at(step)
        target = out + row.to(tl.int64)[:, None] * inputs + column
        tl.store(target, value, (row < outputs)[:, None] & (column < inputs))


def widen(weight: Int4Weight, rows: slice) -> Tensor:
    """Rows of `weight` in its dtype, [rows, inputs], each element rounded once. The first is a multiple of TILE_ROWS."""
    outputs, sm = rows.stop - rows.start, sm_arch(weight.words.device)
    out = torch.empty((outputs, weight.inputs), dtype=weight.dtype, device=weight.words.device)
    blocks = weight.words.numel() * 4 // weight.rows // TILE_COLUMNS
    _int4_widen[(triton.cdiv(outputs, TILE_ROWS), blocks)](
        weight.words, weight.scales, out, rows.start, outputs, weight.rows, weight.inputs, blocks, GROUP=weight.group,
        ZEROS=weight.zeros, SM=sm, num_warps=2, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out


def int4_gemm(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, tiling: Int4Tiling | None = None) -> Tensor:
    """x [T, inputs] in the scales' dtype, contiguous, times `weight` plus bias [outputs] -> [T, outputs] in x's dtype.

    Two GEMMs with one weight must not run at the same time: they use the same counters."""
    tokens, inputs = x.shape
    words, scales, outputs, group = weight.words, weight.scales, weight.outputs, weight.group
    device, rows = gpu(x.device), weight.rows
    blocks = words.numel() * 4 // rows // TILE_COLUMNS
    tiling = tiling or int4_heuristics.select(tokens, outputs, inputs, num_sms=device.num_sms)
    part_blocks = triton.cdiv(blocks, min(tiling.parts, blocks))
    parts = triton.cdiv(blocks, part_blocks)
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    tiles, tiles_t = triton.cdiv(outputs, tiling.rows), triton.cdiv(tokens, tiling.tokens)
    sums, arrivals = out, out
    if parts > 1:
        sums = torch.empty((parts, tokens, outputs), dtype=torch.float32, device=x.device)
        arrivals = counters(x.device).of(words.data_ptr(), tiles * tiles_t)
    sm = sm_arch(x.device)
    _int4_gemm[(tiles, parts, tiles_t)](
        x, words, scales, bias, out, sums, arrivals, tokens, outputs, rows, inputs, blocks, part_blocks,
        GROUP=group, ZEROS=weight.zeros, FULL=inputs % TILE_COLUMNS == 0, SHARED=parts > 1, ROWS=tiling.rows,
        TOKENS=tiling.tokens, SM=sm, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
