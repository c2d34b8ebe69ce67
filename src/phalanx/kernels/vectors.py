# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Vectors of 16 bytes in Triton: loaded and stored at once, unpacked to fp32, added up, and packed again; and `nearest`, which
rounds tensors that are no such vectors.

A vector is four int32 words, a tuple of four tensors; unpacked it is a tuple of 16 / itemsize fp32 tensors ("lanes"), in the
order of memory. KIND names the words' contents: "bf16", "fp16" or "fp32". The output of an FP8 GEMM may come unscaled: its scales
are then applied as it is loaded (`load_output`, `load_row`), with the bits that `gemm.apply_scales` stores. SM is the GPU's compute
capability times 10 (90 is Hopper), or 0 for Triton's interpreter, which knows no PTX: there the same arithmetic runs in plain
Triton, bit for bit (only the sign and the payload of a NaN may differ).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOAD = tl.constexpr("""{
  .reg .pred %go;
  setp.ne.s32 %go, $5, 0;
  mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
  @%go ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_STORE = tl.constexpr("""{
  .reg .pred %go;
  setp.ne.s32 %go, $6, 0;
  @%go st.global.v4.b32 [$1], {$2, $3, $4, $5};
  mov.b32 $0, 0;
}""")


@triton.jit
def load(base, index, mask, SM: tl.constexpr):
    """Vectors `index` behind the int32 pointer `base`; zeros where the mask is off."""
    address = base + index.to(tl.int64) * 4
    if SM > 0:
        words = tl.inline_asm_elementwise(
            _LOAD,
            "=&r,=&r,=&r,=&r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        words = (
            tl.load(address, mask, 0),
            tl.load(address + 1, mask, 0),
            tl.load(address + 2, mask, 0),
            tl.load(address + 3, mask, 0),
        )
    return words


@triton.jit
def store(base, index, words, mask, SM: tl.constexpr):
    """Write vectors `index` behind the int32 pointer `base`."""
    address = base + index.to(tl.int64) * 4
    if SM > 0:
        tl.inline_asm_elementwise(
            _STORE,
            "=r,l,r,r,r,r,r",
            [address, words[0], words[1], words[2], words[3], mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        for k in tl.static_range(4):
            tl.store(address + k, words[k], mask)


@triton.jit
def nearest(value, like, SM: tl.constexpr):
    """fp32 values in the dtype of `like`, rounded to nearest even. Triton's interpreter truncates to bf16 instead."""
    if SM == 0 and like.dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return value.to(like.dtype)


@triton.jit
def _half_bits(value, KIND: tl.constexpr):
    """The 16 bits of an fp32 value rounded to KIND, in an int32."""
    if KIND == "bf16":
        bits = value.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        result = tl.where(value == value, rounded, 0x7FFF)
    else:
        result = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return result


@triton.jit
def _pair(low, high, KIND: tl.constexpr, SM: tl.constexpr):
    """Two fp32 rounded to nearest even into one word of 16-bit halves."""
    if SM == 0:
        word = (_half_bits(high, KIND) << 16) | _half_bits(low, KIND)
    elif KIND == "bf16":
        word = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1)
    else:
        word = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, is_pure=True, pack=1)
    return word


@triton.jit
def unpack(words, KIND: tl.constexpr):
    """The lanes of a vector, in fp32, exactly."""
    lanes = ()
    for k in tl.static_range(4):
        if KIND == "fp32":
            lanes = lanes + (words[k].to(tl.float32, bitcast=True),)
        elif KIND == "bf16":
            low = (words[k] << 16).to(tl.float32, bitcast=True)
            high = (words[k] & -65536).to(tl.float32, bitcast=True)
            lanes = lanes + (low, high)
        else:
            low = (words[k] & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = ((words[k] >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            lanes = lanes + (low, high)
    return lanes


@triton.jit
def pack(lanes, KIND: tl.constexpr, SM: tl.constexpr):
    """The vector of these lanes, each rounded once to nearest even."""
    words = ()
    for k in tl.static_range(4):
        if KIND == "fp32":
            words = words + (lanes[k].to(tl.int32, bitcast=True),)
        else:
            words = words + (_pair(lanes[2 * k], lanes[2 * k + 1], KIND, SM),)
    return words


@triton.jit
def rounded(lanes, KIND: tl.constexpr, SM: tl.constexpr):
    """The lanes rounded to KIND, in fp32."""
    return unpack(pack(lanes, KIND, SM), KIND)


@triton.jit
def add(left, right):
    """Lane by lane."""
    total = ()
    for k in tl.static_range(len(left)):
        total = total + (left[k] + right[k],)
    return total


@triton.jit
def multiply(lanes, factor):
    """Every lane times one factor (a scalar, or a tensor like a lane)."""
    scaled_lanes = ()
    for k in tl.static_range(len(lanes)):
        scaled_lanes = scaled_lanes + (lanes[k] * factor,)
    return scaled_lanes


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(lanes):
    """The largest magnitude in each vector; NaN where a lane is NaN."""
    top = tl.abs(lanes[0])
    for k in tl.static_range(1, len(lanes)):
        top = _larger(top, tl.abs(lanes[k]))
    return top


@triton.jit
def largest_along(values, AXIS: tl.constexpr):
    """The largest of `values` along an axis, which stays with size 1 where there is another; NaN wins."""
    return tl.reduce(values, AXIS, _larger, keep_dims=True)


@triton.jit
def load_scales(columns, column, mask, KIND: tl.constexpr, SM: tl.constexpr):
    """The column scales of a row's vectors `column`, as lanes, from a fp32 pointer that is aligned to 16 bytes; no lanes where it
    is None. No kernel writes these scales, so that they may be loaded before the wait."""
    lanes = ()
    if columns is not None:
        WORDS: tl.constexpr = 1 if KIND == "fp32" else 2
        for k in tl.static_range(WORDS):
            words = load(columns, column * WORDS + k, mask, SM)
            for j in tl.static_range(4):
                lanes = lanes + (words[j].to(tl.float32, bitcast=True),)
    return lanes


@triton.jit
def _rounded_product(left, right, KIND: tl.constexpr, SM: tl.constexpr):
    """left * right in fp32, rounded before anything else. In 16 bit the result is rounded next anyway. In fp32 it may be added up
    next, and the compiler would fuse both into an fma: each rank would add its own part more exactly than its peers can."""
    if KIND == "fp32" and SM > 0:
        product = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, is_pure=True, pack=1)
    else:
        product = left * right
    return product


@triton.jit
def scaled(words, row_scale, column_scales, KIND: tl.constexpr, SM: tl.constexpr):
    """Unscaled outputs (words) * row_scale (a scalar, or one for each vector) * column_scales (lanes), in fp32, rounded once:
    words. The words themselves where there are no column_scales."""
    if len(column_scales) > 0:
        lanes = unpack(words, KIND)
        scaled_lanes = ()
        for k in tl.static_range(len(lanes)):
            scaled_lanes = scaled_lanes + (_rounded_product(lanes[k] * row_scale, column_scales[k], KIND, SM),)
        words = pack(scaled_lanes, KIND, SM)
    return words


@triton.jit
def load_output(x, rows, columns, index, pitch, mask, KIND: tl.constexpr, SM: tl.constexpr):
    """Vectors `index` of a GEMM output [T, H] of `pitch` vectors a row, whose scales rows [T] and columns [H] (fp32 pointers) are
    applied; rows and columns are None for a finished output."""
    words = load(x, index, mask, SM)
    if rows is not None:
        row = index // pitch
        column_scales = load_scales(columns, index - row * pitch, mask, KIND, SM)
        words = scaled(words, tl.load(rows + row, mask, 0.0), column_scales, KIND, SM)
    return words


@triton.jit
def load_row_scale(rows, row):
    """The scale of a row, from `rows` as `load_output` takes them. A kernel writes it, so load it after the wait."""
    if rows is not None:
        scale = tl.load(rows + row)
    else:
        scale = 1.0
    return scale


@triton.jit
def load_row(x, rows, column_scales, row, index, mask, KIND: tl.constexpr, SM: tl.constexpr):
    """As `load_output`, for vectors `index` of one row, number `row`; column_scales: what `load_scales` returned for them."""
    words = load(x, index, mask, SM)
    return scaled(words, load_row_scale(rows, row), column_scales, KIND, SM)
