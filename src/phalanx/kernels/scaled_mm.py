# SPDX-License-Identifier: Apache-2.0
"""Products in FP8: e4m3 activations times e4m3 weights, each with scales, summed in fp32 and given in 16 or 32 bit.

    out = (x.values * x.scale) @ (weight * scale[:, None]).T

The equivalent plain code is `reference.scaled_mm`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels import between, reference
from phalanx.kernels.norms import triton_is_here
from phalanx.kernels.products import choice

FP8 = torch.float8_e4m3fn
WIDEST_ROW = 65536  # what the threads of one program hold in registers
ALIGNMENT = 16  # cuBLAS and CUTLASS want both sizes of an FP8 weight in multiples of this


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


def scaled_mm(x: Quantized, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] e4m3 with scale [out] fp32 -> [T, out] in `dtype`, written into `out` where one is given.

    On GPUs both sizes of the weight must be multiples of 16.
    """
    values, x_scale = x
    if not values.is_cuda:
        product = reference.scaled_mm(values, x_scale, weight, scale, dtype)
        return product if out is None else out.copy_(product)
    if _kernels_take(values, weight, out):
        tiling = choice.fp8(values.shape[0], weight.shape[1])
        if tiling is not None:
            from phalanx.kernels.products.one_row_fp8 import one_row_fp8

            return one_row_fp8(values, x_scale, weight, scale, dtype=dtype, out=out, tiling=tiling)
    return _torchs(x, weight, scale, dtype, out)


def _torchs(x: Quantized, weight: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    # Scales by row and column need [T, 1] and [1, out], and give bf16 only: its rounding is a sixteenth of e4m3's own.
    rows = x.scale if x.scale.dim() == 2 else x.scale.expand(x.shape[0], 1).contiguous()
    columns, bf16 = scale.view(1, -1), torch.bfloat16
    if out is not None and dtype == bf16:
        return torch._scaled_mm(x.values, weight.t(), rows, columns, out_dtype=bf16, use_fast_accum=True, out=out)
    product = torch._scaled_mm(x.values, weight.t(), rows, columns, out_dtype=bf16, use_fast_accum=True)
    return product.to(dtype) if out is None else out.copy_(product)


def quantizing_mm(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """`quantize_fp8` of x [T, in] with x_scale (None: one per token), then `scaled_mm`. One token takes one kernel; same bits."""
    if x.is_cuda and weight.shape[1] <= choice.WIDEST_TO_QUANTIZE and _kernels_take(x, weight, out):
        tiling = choice.fp8(x.shape[0], weight.shape[1])
        if tiling is not None:
            from phalanx.kernels.products.one_row_fp8 import one_row_fp8

            return one_row_fp8(x, x_scale, weight, scale, dtype=dtype, out=out, tiling=tiling)
    return scaled_mm(Quantized(*quantize_fp8(x, x_scale)), weight, scale, dtype=dtype, out=out)


def _kernels_take(x: Tensor, weight: Tensor, out: Tensor | None) -> bool:
    whole = x.is_contiguous() and weight.is_contiguous() and (out is None or out.is_contiguous())
    return whole and has_fp8_kernels(x.device)


def quantize_fp8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_fp8`."""
    if x.is_cuda and x.dim() == 2 and x.is_contiguous() and x.shape[1] <= WIDEST_ROW and triton_is_here():
        from phalanx.kernels.quantize_rows import quantize_fp8 as kernel

        return kernel(x, scale)
    return reference.quantize_fp8(x, scale)


def silu_mul_quant_fp8(gate_up: Tensor, scale: Tensor | None = None) -> Quantized:
    """silu(gate) * up of gate_up [T, 2 * I] in e4m3: with the given scale, or with one per token."""
    return Quantized(*between.silu_mul_quant_fp8(gate_up, scale))
