# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Device functions in Triton that quantize rows: FP8 (e4m3) and int8 with one scale, NVFP4 (e2m1) with a scale per 16 elements.

The equivalent plain code is `reference.quantize_fp8`, `quantize_int8` and `quantize_nvfp4`; results are equal bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.vectors import largest, largest_along, multiply, nearest

FP8_MAX = tl.constexpr(448.0)
FP4_MAX = tl.constexpr(6.0)
INT8_MAX = tl.constexpr(127.0)
SMALLEST_AMAX = tl.constexpr(1e-10)  # a row of zeros gets a scale that divides


@triton.jit
def e4m3_bits(value):
    """The bits (0..255, in int32) of fp32 rounded to nearest even e4m3, clipped to +-448; NaN stays NaN."""
    size = tl.minimum(tl.abs(value), FP8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    # Exponent bias 127 becomes 7, and 20 of the 23 mantissa bits are rounded off.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9: adding 1.5 x 2^23 rounds size / 2^-9 to an integer in the low mantissa bits.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    return tl.where(value == value, code, 0x7F) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def clipped(value, SM: tl.constexpr):
    """Any fp32 as `e4m3_byte` takes it: clipped to +-448 unless that function does so. NaN stays NaN. A row times the inverse of
    its `scale_of` needs no clipping: it exceeds 448 only by its rounding, which the rounding to e4m3 takes back."""
    if SM >= 89:
        value = tl.clamp(value, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return value


@triton.jit
def e4m3_byte(value, SM: tl.constexpr):
    """fp32 rounded to nearest even e4m3, by the hardware where it can (from Ada on), in uint8; NaN stays NaN. See `clipped`."""
    if SM >= 89:
        byte = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        byte = e4m3_bits(value).to(tl.uint8)
    return byte


@triton.jit
def e4m3_value(code):
    """fp32 of non-negative, finite e4m3 bits (int32)."""
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def widened(code, like, SM: tl.constexpr):
    """e4m3 bytes (uint8), where NaN stays NaN, or int8 in the dtype of `like`, exactly."""
    if code.dtype == tl.int8:
        value = int8_widened(code, like, SM)
    elif SM >= 89:
        value = code.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    else:
        bits = code.to(tl.int32)
        size = bits & 0x7F
        # Exponent and mantissa at fp32's bits: the exponent bias 7 is read as 127, which the factor 2^120 corrects.
        size = tl.where(size == 0x7F, 0x7F800001, size << 20)
        value = ((size | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(like.dtype)
    return value


@triton.jit
def int8_scale(top, SM: tl.constexpr):
    """The scale in bf16 of rows whose largest magnitudes are `top` (fp32): 127 steps, rounded to nearest even.

    The values are divided by the rounded scale, so that its rounding, by 2^-8 at most, costs no accuracy: the largest magnitude
    becomes 127 * (1 +- 2^-8), which still rounds to 127."""
    return nearest(tl.div_rn(_at_least(top), INT8_MAX), tl.zeros([1], tl.bfloat16), SM)


@triton.jit
def _at_least(top):
    return tl.where(top < SMALLEST_AMAX, SMALLEST_AMAX, top)


@triton.jit
def int8_code(value, SM: tl.constexpr):
    """fp32 within +-127.5 rounded to nearest even, in int8."""
    if SM > 0:
        code = tl.inline_asm_elementwise("cvt.rni.sat.s8.f32 $0, $1;", "=r,f", [value], tl.int32, is_pure=True, pack=1)
    else:
        code = (value + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 x 2^23: the integer is in the low bits of the mantissa
    return code.to(tl.int8)


@triton.jit
def int8_widened(code, like, SM: tl.constexpr):
    """int8 in the dtype of `like`, exactly. To fp16 without a conversion: the bits 0x6400 + n stand for 1024 + n, and n is the
    value + 128, which flips its sign bit."""
    if SM > 0 and like.dtype == tl.float16:
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 code, ones; xor.b32 code, $2, 0x80808080; mov.b32 ones, 0x64646464;"
            " prmt.b32 $0, code, ones, 0x4140; prmt.b32 $1, code, ones, 0x4342; mov.b32 ones, 0x64806480;"
            " sub.f16x2 $0, $0, ones; sub.f16x2 $1, $1, ones; }",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        value = code.to(like.dtype)
    return value


@triton.jit
def e2m1_bits(value):
    """The four bits (in int32) of fp32 rounded to nearest even e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), clipped to
    +-6; NaN becomes 0, since the format has none."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return tl.where(value == value, code | ((value.to(tl.int32, bitcast=True) >> 28) & 0x8), 0)


@triton.jit
def _e4m3_pair(low, high, SM: tl.constexpr):
    """Two lanes as two bytes, in an int32."""
    if SM >= 89:
        both = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], tl.int16, is_pure=True, pack=1
        )
        result = both.to(tl.int32) & 0xFFFF
    else:
        result = e4m3_bits(low) | (e4m3_bits(high) << 8)
    return result


@triton.jit
def fp8_vector(lanes, inverse, SM: tl.constexpr):
    """A vector's lanes times `inverse` as e4m3 bytes: int64 for 8 lanes, int32 for 4."""
    scaled = multiply(lanes, inverse)
    first = _e4m3_pair(scaled[0], scaled[1], SM) | (_e4m3_pair(scaled[2], scaled[3], SM) << 16)
    if len(lanes) == 8:
        second = _e4m3_pair(scaled[4], scaled[5], SM) | (_e4m3_pair(scaled[6], scaled[7], SM) << 16)
        packed = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    else:
        packed = first
    return packed


@triton.jit
def scale_of(top):
    """The scale that maps a row's largest magnitude, `top`, to 448 (fp32)."""
    return tl.div_rn(_at_least(top), FP8_MAX)


@triton.jit
def token_scale(lanes):
    """The scale that maps a row's largest magnitude to 448, a scalar (fp32). Lanes beyond the row are zero."""
    return scale_of(tl.max(largest_along(largest(lanes), 0), 0))


@triton.jit
def fp4_vector(lanes, scale, BLOCK: tl.constexpr):
    """A vector's lanes as e2m1, low nibble first (int32 for 8 lanes, int16 for 4), and the e4m3 bits of its block's scale.

    Each 16 elements share one scale: largest / 6 / scale (the global one).
    """
    GROUP: tl.constexpr = 16 // len(lanes)
    top = tl.reshape(largest(lanes), (BLOCK // GROUP, GROUP))
    top = tl.reshape(tl.broadcast_to(largest_along(top, 1), (BLOCK // GROUP, GROUP)), (BLOCK,))
    code = e4m3_bits(tl.div_rn(top, FP4_MAX * scale))
    step = e4m3_value(code & 0x7F) * scale
    inverse = tl.where((step > 0) & (top == top), tl.div_rn(1.0, step), 0.0)
    packed = e2m1_bits(lanes[0] * inverse)
    for k in tl.static_range(1, len(lanes)):
        packed |= e2m1_bits(lanes[k] * inverse) << (4 * k)
    if len(lanes) == 4:
        packed = packed.to(tl.int16)
    return packed, code
