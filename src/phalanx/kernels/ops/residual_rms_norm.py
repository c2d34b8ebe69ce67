# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Residual add, RMSNorm and quantization in one kernel; and the same for one row, as the epilogue of other kernels.

    new = x + residual                                     rounded to the dtype
    norm = round(new * (1 / sqrt(mean(new^2) + eps))) * weight          rounded again
    fp8: e4m3(norm / scale), scale given or largest |norm| of the token / 448;  nvfp4: see `quantize`

The squares are added in fp32 within 16 bytes and in fp64 beyond, so that the result does not depend on how many threads share a
row: a kernel that ends in `finish_row` gives the bits that this one gives behind its sum.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.ops.heuristics import row_warps
from phalanx.kernels.quantize import fp4_vector, fp8_vector, token_scale
from phalanx.kernels.vectors import add, load, multiply, pack, rounded, store, unpack

Quant = Literal["none", "fp8", "fp8_token", "nvfp4"]


@triton.jit
def add_residual(total, residual, place, mask, residual_out, KIND: tl.constexpr, SM: tl.constexpr):
    """Store total (lanes, rounded to KIND) + residual (words); return the sum's lanes."""
    new = pack(add(total, unpack(residual, KIND)), KIND, SM)
    store(residual_out, place, new, mask, SM)
    return unpack(new, KIND)


@triton.jit
def square_sum(lanes):
    """The sum of squares of all lanes: an fp64 scalar."""
    squares = lanes[0] * lanes[0]
    for k in tl.static_range(1, len(lanes)):
        squares = tl.fma(lanes[k], lanes[k], squares)
    return tl.sum(squares.to(tl.float64), 0)


@triton.jit
def load_weight(weight, column, mask, FP32_WEIGHT: tl.constexpr, SM: tl.constexpr):
    """The weight of a norm, as `normed` takes it: words, or the lanes of two vectors where it is in fp32 and values in 16 bit."""
    if FP32_WEIGHT:
        low, high = load(weight, 2 * column, mask, SM), load(weight, 2 * column + 1, mask, SM)
        factors = unpack(low, "fp32") + unpack(high, "fp32")
    else:
        factors = load(weight, column, mask, SM)
    return factors


@triton.jit
def normed(lanes, squares, weight, hidden, eps, KIND: tl.constexpr, SM: tl.constexpr):
    """The norm of a row, or of a part of one, in words [BLOCK]; arguments as in `normalize`."""
    mean = tl.div_rn(squares.to(tl.float32), hidden.to(tl.float32))
    scaled = rounded(multiply(lanes, tl.div_rn(1.0, tl.sqrt_rn(mean + eps))), KIND, SM)
    if len(weight) > 4:
        factors = weight
    else:
        factors = unpack(weight, KIND)
    weighted = ()
    for k in tl.static_range(len(scaled)):
        weighted = weighted + (scaled[k] * factors[k],)
    return pack(weighted, KIND, SM)


@triton.jit
def normalize(
    lanes, squares, weight, row, column, mask, pointers, scale, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Norm and quantization of a row, or of a part of one that is whole blocks of 16 elements ("fp8_token": of a whole row).

    lanes [BLOCK]: of the new residual; squares: the whole row's; weight: see `load_weight`; column: the vector's place in the row;
    pointers: of (norm, new residual, quantized, scales); scale: fp32 pointer, read for "fp8" and "nvfp4".
    """
    norm_out, _, quantized, scales = pointers
    place = row.to(tl.int64) * (hidden // len(lanes)) + column
    norm = normed(lanes, squares, weight, hidden, eps, KIND, SM)
    if KEEP_NORM or QUANT == "none":
        store(norm_out, place, norm, mask, SM)
    if QUANT == "fp8":
        tl.store(quantized + place, fp8_vector(unpack(norm, KIND), tl.div_rn(1.0, tl.load(scale)), SM), mask)
    elif QUANT == "fp8_token":
        row_scale = token_scale(unpack(norm, KIND))
        tl.store(scales + row, row_scale)
        tl.store(quantized + place, fp8_vector(unpack(norm, KIND), tl.div_rn(1.0, row_scale), SM), mask)
    elif QUANT == "nvfp4":
        SHARED: tl.constexpr = 16 // len(lanes)
        packed, code = fp4_vector(unpack(norm, KIND), tl.load(scale), BLOCK)
        tl.store(quantized + place, packed, mask)
        tl.store(scales + place // SHARED, code.to(tl.uint8), mask & (column % SHARED == 0))


@triton.jit
def finish_row(
    total, residual, weight, row, column, mask, pointers, scale, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Residual, norm and quantization of one row. total: lanes [BLOCK] of the sum, rounded to KIND; residual: words [BLOCK];
    the rest as in `normalize`."""
    place = row.to(tl.int64) * (hidden // len(total)) + column
    lanes = add_residual(total, residual, place, mask, pointers[1], KIND, SM)
    normalize(lanes, square_sum(lanes), weight, row, column, mask, pointers, scale, hidden, eps, KIND, QUANT, KEEP_NORM, BLOCK, SM)


@triton.jit(do_not_specialize=["hidden"])
def _residual_rms_norm(
    x, residual, weight, pointers, scale, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, KEEP_NORM: tl.constexpr, FP32_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    LANES: tl.constexpr = 4 if KIND == "fp32" else 8
    column = tl.arange(0, BLOCK)
    mask = column < hidden // LANES
    row = tl.program_id(0)
    if SM >= 90:
        gdc_launch_dependents()
    factors = load_weight(weight, column, mask, FP32_WEIGHT, SM)  # no kernel before this one writes weights
    if SM >= 90:
        gdc_wait()
    place = row.to(tl.int64) * (hidden // LANES) + column
    words = load(x, place, mask, SM)
    old = load(residual, place, mask, SM)
    finish_row(
        unpack(words, KIND), old, factors, row, column, mask, pointers, scale, hidden, eps, KIND, QUANT, KEEP_NORM, BLOCK, SM
    )  # fmt: skip


class NormOutputs:
    """The outputs of residual add, norm and quantization for a sum [T, H], and their pointers as kernels take them."""

    def __init__(self, like: Tensor, quant: Quant, keep_norm: bool) -> None:
        tokens, hidden = like.shape
        device = like.device
        self.residual = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.norm = torch.empty_like(self.residual) if keep_norm or quant == "none" else None
        self.quantized: Tensor | None = None
        self.scales: Tensor | None = None
        if quant in ("fp8", "fp8_token"):
            self.quantized = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=device)
        if quant == "fp8_token":
            self.scales = torch.empty(tokens, 1, dtype=torch.float32, device=device)
        if quant == "nvfp4":
            self.quantized = torch.empty(tokens, hidden // 2, dtype=torch.uint8, device=device)
            self.scales = torch.empty(tokens, hidden // 16, dtype=torch.float8_e4m3fn, device=device)

    def pointers(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of rows first .. last - 1, viewed as the kernels write them; the residual stands in for outputs that are not written."""
        lanes = 16 // self.residual.element_size()
        plain = self.residual[first:last].view(torch.int32)
        norm = plain if self.norm is None else self.norm[first:last].view(torch.int32)
        quantized = scales = plain
        if self.quantized is not None:
            per_vector = lanes * self.quantized.shape[1] // self.residual.shape[1]
            quantized = self.quantized[first:last].view({8: torch.int64, 4: torch.int32, 2: torch.int16}[per_vector])
        if self.scales is not None:
            scales = self.scales[first:last]
            scales = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
        return norm, plain, quantized, scales

    def outputs(self) -> tuple[Tensor, ...]:
        """(norm, quantized, scales, residual), without those that are not written."""
        return tuple(t for t in (self.norm, self.quantized, self.scales, self.residual) if t is not None)


def quant_mode(quant: Literal["none", "fp8", "nvfp4"], scale: Tensor | None) -> Quant:
    """The kernel's mode; raises ValueError for nvfp4 without its global scale."""
    if quant == "nvfp4" and scale is None:
        raise ValueError("nvfp4 needs its global scale: a fp32 scalar tensor")
    return "fp8_token" if quant == "fp8" and scale is None else quant


def residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    quant: Literal["none", "fp8", "nvfp4"] = "none",
    scale: Tensor | None = None,
    keep_norm: bool = False,
) -> tuple[Tensor, ...]:
    """The kernel of `reference.residual_rms_norm`, for x and residual [T, H] (bf16, fp16, fp32; H a multiple of 8, for nvfp4 of
    16), weight [H] in their dtype or in fp32. Returns new tensors."""
    mode = quant_mode(quant, scale)
    x, residual = x.contiguous(), residual.contiguous()
    norm_outputs = NormOutputs(x, mode, keep_norm)
    tokens, hidden = x.shape
    if tokens:
        block = triton.next_power_of_2(hidden * x.element_size() // 16)
        sm = sm_arch(x.device)
        _residual_rms_norm[(tokens,)](
            x.view(torch.int32), residual.view(torch.int32), weight.view(torch.int32), norm_outputs.pointers(0, tokens),
            norm_outputs.residual if scale is None else scale, hidden, eps,
            KIND=DTYPE_NAMES[x.dtype], QUANT=mode, KEEP_NORM=keep_norm, FP32_WEIGHT=weight.dtype != x.dtype, BLOCK=block, SM=sm,
            num_warps=row_warps(block, tokens), launch_pdl=sm >= 90,
        )  # fmt: skip
    return norm_outputs.outputs()
