# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMM of activations in e4m3, with a scale for each token, by weights of 4-bit integers (W4A8): for steps of many tokens, in which
16-bit tensor cores bind.

    out[t, n] = round(x_scale[t] * sum over g of scale[n, g] * sum over k of group g of x8[t, k] * (q[n, k] - zero[n, g]) + bias[n])

A value q - 8 is an integer from -8 to 7, which e4m3 has exactly: only the activations are rounded. What a zero differs from 8 is
taken off the sum of a group's activations, which are summed before. Sums of a group, of 128 columns at most, are in the tensor
cores, and are scaled and added up in fp32. The equivalent plain code is `int4_mm.int4_fp8_plain`.

The columns of x are put into the order of a weight's words (`int4_packing.ORDER`), so that both are read in runs."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.int4_gemm import WORDS_OF_TILE, dot, half, nibbles, scales_of_step, words_of
from phalanx.kernels.gemm.int4_packing import BLOCK, ORDER, TILE_COLUMNS, Int4Weight
from phalanx.kernels.vectors import nearest

BLOCK_K, WORDS = tl.constexpr(TILE_COLUMNS), tl.constexpr(BLOCK)
ROWS, BESIDE = 128, 8
"""Of a tile; tiles of rows that share x in the cache."""


def tile_tokens(weight: Int4Weight) -> int:
    """Of a tile. Zeros of small groups take registers of each sum."""
    return 64 if weight.zeros and weight.group < TILE_COLUMNS else 128


_WIDEN = """{{
.reg .b32 a, b, s, n, lo, hi, m;
shr.b32 a, $1, {shift};
shr.b32 b, $2, {shift};
and.b32 a, a, 0x000f000f;
and.b32 b, b, 0x000f000f;
shl.b32 b, b, 8;
or.b32 a, a, b;
shr.b32 b, a, 12;
or.b32 s, a, b;
and.b32 n, s, 0x7777;
prmt.b32 lo, 0xCACCCED0, 0xB8C0C4C8, n;
prmt.b32 hi, 0x44403800, 0x4E4C4A48, n;
prmt.b32 m, 0x80808080, 0x80808080, s;
lop3.b32 lo, hi, m, lo, 0xE2;
not.b32 m, m;
shl.b32 m, m, 1;
lop3.b32 $0, lo, m, 0x80808080, 0xF8;
}}"""
"""Four words ($1, $2) to the e4m3 bytes of q - 8 at one place of each: `prmt` looks up q below 8 and q from 8 on, and its sign mode
tells which of them holds. The sign bit is set behind that, since the mode leaves it in both."""
_WIDEN_0, _WIDEN_1, _WIDEN_2, _WIDEN_3 = (tl.constexpr(_WIDEN.format(shift=4 * place)) for place in range(4))


@triton.jit
def _widened(words, PLACE: tl.constexpr, SM: tl.constexpr):
    """words [R, 32] int16 -> q - 8 at one nibble of each, in e4m3; in the interpreter in fp32."""
    if SM == 0:
        value = nibbles(words, PLACE) - 8.0
    else:
        code: tl.constexpr = _WIDEN_0 if PLACE == 0 else _WIDEN_1 if PLACE == 1 else _WIDEN_2 if PLACE == 2 else _WIDEN_3
        value = tl.inline_asm_elementwise(code, "=r,r,r", [words], dtype=tl.int8, is_pure=True, pack=4)
        value = value.to(tl.float8e4nv, bitcast=True)
    return value


@triton.jit
def _corrected(total, scale, offset, sums, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """total - scale * (zero - 8) * the sum of the group's activations [TOKENS]. offset: -(magic + zero), see `Int4Weight`."""
    magic: tl.constexpr = 1024.0 if tl.float16 == DTYPE else 128.0
    zero = -half(offset, HIGH, DTYPE) - magic - 8.0
    return total - (scale * zero)[:, None] * sums[None, :]


@triton.jit(do_not_specialize=["tokens"])
def _int4_fp8(
    x, x_scale, sums, words, scales, bias, out, tokens, outputs, rows, blocks, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BESIDE: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """x e4m3 [tokens, 128 * blocks], x_scale [tokens]; sums fp32 [tokens, k steps, or blocks of 32 columns], of weights with zeros;
    words, scales: of an `Int4Weight` of `rows` padded rows."""
    BY_STEP: tl.constexpr = GROUP >= BLOCK_K
    DTYPE: tl.constexpr = out.dtype.element_ty
    tiles_n, program = tl.cdiv(outputs, ROWS), tl.program_id(0)
    tiles_t = tl.cdiv(tokens, TOKENS)
    group = program // (BESIDE * tiles_t)
    beside = tl.minimum(tiles_n - group * BESIDE, BESIDE)
    tile_t, tile = program % (BESIDE * tiles_t) // beside, group * BESIDE + program % (BESIDE * tiles_t) % beside
    row = tile * ROWS + tl.arange(0, ROWS)
    weight_row = tl.minimum(row, rows - 1)
    lane = tile_t * TOKENS + tl.arange(0, TOKENS)
    token = tl.minimum(lane, tokens - 1).to(tl.int64)  # those beyond the last repeat it, and are not stored
    place = words_of(weight_row, blocks)
    x_at = x + token[:, None] * (blocks * BLOCK_K) + tl.arange(0, WORDS)[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(0, blocks):
        w = tl.load(words + place + block * WORDS_OF_TILE)
        a, b, c, d = scales_of_step(scales, block, weight_row, rows, GROUP, ZEROS)
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in tl.static_range(4):
            part = dot(_widened(w, step, SM), tl.load(x_at + block * BLOCK_K + step * WORDS), part, SM)
            if not BY_STEP:
                scale = half(a if step < 2 else b, step % 2, DTYPE)
                total += part * scale[:, None]
                if ZEROS:
                    of_block = tl.load(sums + token * (4 * blocks) + 4 * block + step)
                    total = _corrected(total, scale, c if step < 2 else d, of_block, step % 2, DTYPE)
                part = tl.zeros([ROWS, TOKENS], tl.float32)
        if BY_STEP:
            scale = half(a, 0, DTYPE)
            total += part * scale[:, None]
            if ZEROS:
                total = _corrected(total, scale, a, tl.load(sums + token * blocks + block), 1, DTYPE)
    total *= tl.load(x_scale + token)[None, :]
    if bias is not None:
        total += tl.load(bias + row, row < outputs, 0.0).to(tl.float32)[:, None]
    target = lane.to(tl.int64)[None, :] * outputs + row[:, None]
    inside = (row < outputs)[:, None] & (lane < tokens)[None, :]
    tl.store(out + target, nearest(total, tl.zeros([ROWS, TOKENS], DTYPE), SM), inside)


@functools.cache
def _order(columns: int, device: torch.device) -> Tensor:
    """The column of x at each place, [columns], a multiple of BLOCK."""
    return torch.arange(columns).view(-1, BLOCK)[:, ORDER].flatten().to(device)


def int4_fp8_gemm(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] in the scales' dtype, quantized to e4m3 by token, times `weight`, plus bias [outputs] -> [T, outputs] in x's
    dtype. On GPUs with FP8 tensor cores, and in Triton's interpreter."""
    from phalanx.kernels.ops.dispatch import quantize_fp8

    values, x_scale = quantize_fp8(x.contiguous())
    tokens, blocks, sm = len(x), triton.cdiv(weight.inputs, TILE_COLUMNS), sm_arch(x.device)
    # A column that pads the weight has q = 0, which is -8 here.
    padded = F.pad(values.view(torch.uint8), (0, blocks * TILE_COLUMNS - weight.inputs))
    ordered = padded[:, _order(blocks * TILE_COLUMNS, x.device)].view(values.dtype)
    sums = x_scale
    if weight.zeros:
        sums = ordered.float().view(tokens, -1, TILE_COLUMNS if weight.group >= TILE_COLUMNS else BLOCK).sum(-1)
    out = torch.empty((tokens, weight.outputs), dtype=x.dtype, device=x.device)
    tile = tile_tokens(weight)
    grid = triton.cdiv(weight.outputs, ROWS) * triton.cdiv(tokens, tile)
    _int4_fp8[(grid,)](
        ordered, x_scale, sums, weight.words, weight.scales, bias, out, tokens, weight.outputs, weight.rows, blocks,
        GROUP=weight.group, ZEROS=weight.zeros, ROWS=ROWS, TOKENS=tile, BESIDE=BESIDE, SM=sm, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
