# SPDX-License-Identifier: Apache-2.0
"""Products in FP8: e4m3 activations times e4m3 weights, each with scales, summed in fp32 and given in 16 or 32 bit.

    out = (x.values * x.scale) @ (weight * scale[:, None]).T

The equivalent plain code is `reference.scaled_mm`. Few tokens have kernels of ours (`products.choice`). Where torch multiplies
them, its sums alone are faster, rounded to bf16, which holds whatever fp32 does; the scales are applied after, best of all by what
reads the product (`unscaled_mm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import EngineError
from phalanx.kernels import between, reference
from phalanx.kernels.norms import triton_is_here
from phalanx.kernels.products import choice, cut_for_few_rows
from phalanx.kernels.reference import Unscaled

FP8 = torch.float8_e4m3fn
WIDEST_ROW = 65536  # what the threads of one program hold in registers
ALIGNMENT = 16  # cuBLAS and CUTLASS want both sizes of an FP8 weight, and addresses, in multiples of this


class Quantized(NamedTuple):
    """values [T, H] e4m3, to be multiplied by scale: fp32, one per token [T, 1] or a scalar ()."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@cache
def has_fp8_products(device: torch.device) -> bool:
    """Whether the device multiplies e4m3 matrices: Ada (compute capability 8.9), Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_fp8_kernels(device: torch.device) -> bool:
    """Whether the products written here run on the device: on Hopper, where they were measured."""
    return has_fp8_products(device) and torch.cuda.get_device_capability(device) == (9, 0) and triton_is_here()


def scaled_mm(x: Quantized, weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """x [T, in] times weight [out, in] e4m3 with scale [out] fp32 -> [T, out] in `dtype`.

    On GPUs both sizes of the weight must be multiples of 16.
    """
    values, x_scale = x
    if not values.is_cuda:
        return reference.scaled_mm(values, x_scale, weight, scale, dtype)
    if _kernels_take(values, weight):
        few = cut_for_few_rows(values, weight)
        if few is not None:
            from phalanx.kernels.products.few_rows import few_rows

            return few_rows(values, weight, few, (_by_row(x), scale), dtype=dtype)
        how = choice.fp8(values.shape[0], *weight.shape)
        if isinstance(how, choice.OneRow):
            from phalanx.kernels.products.one_row_fp8 import one_row_fp8

            return one_row_fp8(values, x_scale, weight, scale, dtype=dtype, tiling=how)
        if how is choice.Torchs.SUMS and dtype == torch.bfloat16:
            from phalanx.kernels.products.scale_sums import scale_sums

            return scale_sums(_sums(x, weight, scale))
    return _torchs(x, weight, scale, dtype)


def unscaled_mm(x: Quantized, weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor | Unscaled:
    """`scaled_mm` for a reader that can apply the scales: the bare sums where they are faster."""
    if dtype == torch.bfloat16 and _kernels_take(x.values, weight):
        few = cut_for_few_rows(x.values, weight)
        if few is not None:
            from phalanx.kernels.products.few_rows import few_rows

            return Unscaled(few_rows(x.values, weight, few), _by_row(x), scale)
        how = choice.fp8(x.shape[0], *weight.shape, reader_scales=True)
        if how is choice.Torchs.SUMS:
            return _sums(x, weight, scale)
    return scaled_mm(x, weight, scale, dtype=dtype)


def _sums(x: Quantized, weight: Tensor, scale: Tensor) -> Unscaled:
    one, bf16 = _one(weight.device), torch.bfloat16
    sums = torch._scaled_mm(x.values, weight.t(), one, one, out_dtype=bf16, use_fast_accum=True)
    return Unscaled(sums, _by_row(x), scale)


@cache
def _one(device: torch.device) -> Tensor:
    """1.0 fp32 (): the scale of sums. The first call may not be captured."""
    if torch.cuda.is_current_stream_capturing():
        raise EngineError(
            "a product in FP8 asked for its scale of one while a graph is captured",
            why="it would be one only after that graph ran",
            next="run the product once before the capture",
        )
    return torch.ones((), dtype=torch.float32, device=device)


def _torchs(x: Quantized, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # Scales by row and column need [T, 1] and [1, out], and give bf16 only: its rounding is a sixteenth of e4m3's own.
    rows, columns, bf16 = _by_row(x), scale.view(1, -1), torch.bfloat16
    return torch._scaled_mm(x.values, weight.t(), rows, columns, out_dtype=bf16, use_fast_accum=True).to(dtype)


def scaled_mm_into(x: Quantized, weight: Tensor, scale: Tensor, pieces: Sequence[tuple[slice, Tensor]]) -> None:
    """`scaled_mm` in bf16, each of these rows of x into the tensor [rows, out] beside it: many rows, for which torch's product with
    scales is the fastest."""
    by_row, columns, turned = _by_row(x), scale.view(1, -1), weight.t()
    for rows, out in pieces:
        scales = by_row[rows]
        if not out.is_cuda:
            out.copy_(reference.scaled_mm(x.values[rows], scales, weight, scale, out.dtype))
            continue
        if scales.data_ptr() % ALIGNMENT:  # cuBLAS reads scales from such an address alone
            scales = scales.clone()
        torch._scaled_mm(x.values[rows], turned, scales, columns, out_dtype=out.dtype, use_fast_accum=True, out=out)


def _by_row(x: Quantized) -> Tensor:
    return x.scale if x.scale.dim() == 2 else x.scale.expand(x.shape[0], 1).contiguous()


def quantizing_mm(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`quantize_fp8` of x [T, in] with x_scale (None: one per token), then `scaled_mm`. One token takes one kernel:
    the same bits, but for the order in which large weights' products are added up there."""
    if x.is_cuda and weight.shape[1] <= choice.WIDEST_TO_QUANTIZE and _kernels_take(x, weight):
        how = choice.fp8(x.shape[0], *weight.shape)
        if isinstance(how, choice.OneRow):
            from phalanx.kernels.products.one_row_fp8 import one_row_fp8

            return one_row_fp8(x, x_scale, weight, scale, dtype=dtype, tiling=how)
    return scaled_mm(Quantized(*quantize_fp8(x, x_scale)), weight, scale, dtype=dtype)


def _kernels_take(x: Tensor, weight: Tensor) -> bool:
    return x.is_contiguous() and weight.is_contiguous() and has_fp8_kernels(x.device)


def quantize_fp8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_fp8`."""
    if x.is_cuda and x.dim() == 2 and x.is_contiguous() and x.shape[1] <= WIDEST_ROW and triton_is_here():
        from phalanx.kernels.quantize_rows import quantize_fp8 as kernel

        return kernel(x, scale)
    return reference.quantize_fp8(x, scale)


def silu_mul_quant_fp8(gate_up: Tensor | Unscaled, scale: Tensor | None = None) -> Quantized:
    """silu(gate) * up of gate_up [T, 2 * I] in e4m3: with the given scale, or with one per token."""
    return Quantized(*between.silu_mul_quant_fp8(gate_up, scale))
