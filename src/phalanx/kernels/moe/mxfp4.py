# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""MXFP4 (OCP Microscaling formats 1.0) in registers: words of four e2m1 values as `packing.packed` arranges them, and e8m0 scales,
one for 32 values.

Widening is what a GEMM of few tokens spends its time on beside reading: each value takes less than two instructions here. A word's
halves have the same place in two neighbouring words of a row, so that no value changes its half; masks, shifts and the product by
the scale make two values. Masks and right shifts are issued every other cycle, as is what multiplies integers, in another pipe: so
left shifts are multiplications, where that spares one of the former.

The equivalent plain code is `reference.dequantize_mxfp4`; results are equal bit for bit."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.moe.nvfp4_packing import SCALE_BIAS
from phalanx.kernels.moe.packing import MAGNITUDES, SIGNS

_TEMPLATE = """
{{
.reg .b32 sign, value, factor, zero;
mov.b32 zero, 0;
prmt.b32 factor, $2, zero, $4;
mad.lo.u32 factor, factor, $6, 0x3F003F00;
mov.b32 zero, 0x80008000;
{widen}
fma.rn.bf16x2 $0, value, factor, zero;
}}
"""


def _widen(place: int) -> str:
    """The instructions that bring the value at `place` of two words ($1) to sign, exponent and mantissa of two bf16: the sign to
    bit 15, and the three bits below it to the lowest two bits of the exponent and the highest of the mantissa."""
    sign, value = 15 - SIGNS[place], 6 - MAGNITUDES[place]

    def shifted(name: str, by: int) -> str:
        return f"{'shl' if by > 0 else 'shr'}.b32 {name}, $1, {abs(by)};\n"

    if sign == value:
        moved = shifted("value", value) if value else "mov.b32 value, $1;\n"
        return f"{moved}and.b32 value, value, 0x81C081C0;"
    if sign > 0 and value > 0:  # both to the left: no two of the masked bits meet, so that one product shifts them
        mask = (1 << SIGNS[place] | 7 << MAGNITUDES[place]) * 0x10001
        moved = f"and.b32 value, $1, {mask};\nmul.lo.u32 value, value, {(1 << sign) + (1 << value)};\n"
        return f"{moved}and.b32 value, value, 0x81C081C0;"
    return (
        f"{shifted('sign', sign)}{shifted('value', value)}and.b32 sign, sign, 0x80008000;\n"
        "lop3.b32 value, value, 0x01C001C0, sign, 0xEA;"
    )


WIDEN = [_TEMPLATE.format(widen=_widen(place)) for place in range(4)]
"""Two words ($1), the scales of their row ($2 and $3: the same), the selector of their block ($4 and $5: the same) and `SHIFT` ($6
and $7) to the values at one place of each, in bf16. The exponent's bias is 126 too large after the shifts, which the factor makes
good: 2^(scale - 1), twice in 32 bits. Subnormals come out right by the product, too."""

SHIFT = 0x80
"""Brings a scale to the exponent of bf16. A kernel loads it: the compiler makes a shift of a constant, in the busier pipe."""

NVFP4_BIAS, NVFP4_EXPONENT = tl.constexpr(SCALE_BIAS), 0xE0
"""What is added to the exponent of a scale in bf16: the highest bits, which its five leave free."""
_WIDEN_0, _WIDEN_1, _WIDEN_2, _WIDEN_3 = (tl.constexpr(code) for code in WIDEN)


@triton.jit
def _plain(words, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    """As above, with the bits of fp32."""
    bits = (((words >> MAGNITUDE) & 7) << 22) | (((words >> SIGN) & 1) << 31)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _exponent(byte):
    """2^(byte - 127) of int32 0..254 in fp32."""
    return tl.maximum(byte << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def dequantized(words, scales, selectors, shift, SM: tl.constexpr):
    """words [R, 32] int16 of a row's 128 columns, scales [R] int32 of four scales each, the first in the lowest byte; selectors
    [32] and shift [1], the two parts of `selectors` -> four tensors [R, 32] in bf16, in the interpreter in fp32: of the columns
    `columns_at(0..3)`. Scales are 128 at most."""
    scale, selector = tl.broadcast_to(scales[:, None], words.shape), tl.broadcast_to(selectors[None, :], words.shape)
    if SM == 0:
        in_32_bit, unit = words.to(tl.int32), _exponent((scale >> ((selector & 3) * 8)) & 0xFF)
        a, b = _plain(in_32_bit, SIGN_0, MAGNITUDE_0) * unit, _plain(in_32_bit, SIGN_1, MAGNITUDE_1) * unit
        c, d = _plain(in_32_bit, SIGN_2, MAGNITUDE_2) * unit, _plain(in_32_bit, SIGN_3, MAGNITUDE_3) * unit
    else:
        at = [words, scale, selector, tl.broadcast_to(shift[None, :], words.shape)]
        a = tl.inline_asm_elementwise(_WIDEN_0, "=r,r,r,r,r,r,r,r", at, dtype=tl.bfloat16, is_pure=True, pack=2)
        b = tl.inline_asm_elementwise(_WIDEN_1, "=r,r,r,r,r,r,r,r", at, dtype=tl.bfloat16, is_pure=True, pack=2)
        c = tl.inline_asm_elementwise(_WIDEN_2, "=r,r,r,r,r,r,r,r", at, dtype=tl.bfloat16, is_pure=True, pack=2)
        d = tl.inline_asm_elementwise(_WIDEN_3, "=r,r,r,r,r,r,r,r", at, dtype=tl.bfloat16, is_pure=True, pack=2)
    return a, b, c, d


NVFP4_SCALE = f"""
{{
.reg .b32 scale, zero;
mov.b32 zero, 0;
prmt.b32 scale, $1, zero, $3;
mad.lo.u32 $0, scale, 16, {NVFP4_EXPONENT << 7 | NVFP4_EXPONENT << 23:#x};
}}
"""
"""Four scales of a row ($1 and $2: the same) and the selector of a block ($3 and $4: the same) to the scale of the block in bf16,
twice."""
_NVFP4 = """
{{
.reg .b32 sign, value, zero;
mov.b32 zero, 0x80008000;
{widen}
fma.rn.bf16x2 $0, value, $2, zero;
}}
"""
NVFP4_WIDEN = [_NVFP4.format(widen=_widen(place)) for place in range(4)]
"""Two words ($1) and the scales of their 16 columns ($2) to the values at one place of each, in bf16, by `nvfp4_unit` too small."""
_NVFP4_S = tl.constexpr(NVFP4_SCALE)
_NVFP4_0, _NVFP4_1, _NVFP4_2, _NVFP4_3 = (tl.constexpr(code) for code in NVFP4_WIDEN)


@triton.jit
def _nvfp4_scale(scales, selectors, SM: tl.constexpr):
    """scales [R] int32 of four, selectors [32] -> [R, 32]: that of each word's block, of SM 0 in fp32, else the bits of bf16."""
    scale, selector = scales[:, None], selectors[None, :]
    if SM == 0:
        byte = (scale >> ((selector & 3) * 8)) & 0xFF
        result = ((byte << 20) + ((127 - NVFP4_BIAS) << 23)).to(tl.float32, bitcast=True)
    else:
        scale, selector = tl.broadcast(scale, selector)
        result = tl.inline_asm_elementwise(_NVFP4_S, "=r,r,r,r,r", [scale, selector], tl.int16, is_pure=True, pack=2)
    return result


@triton.jit
def widened_nvfp4(words, low, high, selectors, DTYPE: tl.constexpr, SM: tl.constexpr):
    """words and selectors as above; low, high [R] int32: four scales (`nvfp4_packing`) of the first and the last 16 columns of
    each block of 32 -> four tensors [R, 32] in DTYPE, exactly: a product has six bits. By `nvfp4_unit` too small."""
    EXACT: tl.constexpr = SM == 0 or tl.bfloat16 != DTYPE
    first, last = _nvfp4_scale(low, selectors, 0 if EXACT else SM), _nvfp4_scale(high, selectors, 0 if EXACT else SM)
    if EXACT:
        bits = words.to(tl.int32)
        a, b = _plain(bits, SIGN_0, MAGNITUDE_0) * first, _plain(bits, SIGN_1, MAGNITUDE_1) * first
        c, d = _plain(bits, SIGN_2, MAGNITUDE_2) * last, _plain(bits, SIGN_3, MAGNITUDE_3) * last
        a, b, c, d = a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)
    else:
        a = tl.inline_asm_elementwise(_NVFP4_0, "=r,r,r", [words, first], dtype=tl.bfloat16, is_pure=True, pack=2)
        b = tl.inline_asm_elementwise(_NVFP4_1, "=r,r,r", [words, first], dtype=tl.bfloat16, is_pure=True, pack=2)
        c = tl.inline_asm_elementwise(_NVFP4_2, "=r,r,r", [words, last], dtype=tl.bfloat16, is_pure=True, pack=2)
        d = tl.inline_asm_elementwise(_NVFP4_3, "=r,r,r", [words, last], dtype=tl.bfloat16, is_pure=True, pack=2)
    return a, b, c, d


@triton.constexpr_function
def nvfp4_unit(dtype, sm):
    """What sums of `widened_nvfp4` are to be multiplied by: e2m1's exponent is too small by 126 in bf16, a scale's as much too
    large as its five bits leave room for."""
    return float(2 ** (126 + 127 - NVFP4_BIAS.value - NVFP4_EXPONENT)) if sm and dtype == tl.bfloat16 else 1.0


SIGN_0, SIGN_1, SIGN_2, SIGN_3 = (tl.constexpr(bit) for bit in SIGNS)
MAGNITUDE_0, MAGNITUDE_1, MAGNITUDE_2, MAGNITUDE_3 = (tl.constexpr(bit) for bit in MAGNITUDES)


@triton.jit
def columns_at(PLACE: tl.constexpr):
    """The columns [1, 32] of 128 whose values words have at this place."""
    at = tl.arange(0, 32)[None, :]
    return at // 8 * 32 + PLACE * 8 + at % 8


@functools.cache
def selectors(device: torch.device) -> Tensor:
    """[33] int32: for each word of 128 columns, what brings the scale of its block, of four in 32 bits, to the low byte of both
    halves of a register (`prmt`); and `SHIFT`.

    A kernel loads them, although they follow from the column: what is made of loaded values only, the compiler computes where
    tensor cores want it. Otherwise widened weights go through shared memory once more."""
    return torch.tensor([*(0x4040 + word // 8 * 0x0101 for word in range(32)), SHIFT], dtype=torch.int32, device=device)
