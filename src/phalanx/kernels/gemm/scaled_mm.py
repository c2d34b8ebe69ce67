# SPDX-License-Identifier: Apache-2.0
"""FP8 GEMM: e4m3 activations times e4m3 weights, each with scales, summed in fp32 and rounded to 16 or 32 bit.

    out = (x.values * x.scale) @ (weight * scale[:, None]).T

The equivalent plain code is `reference.scaled_mm`. Up to 64 tokens run in our kernels (`heuristics`). Where torch multiplies,
cuBLAS is faster without scales: its output is rounded to bf16, which has fp32's range, and the scales are applied after it, best of
all by the kernel that reads the output (`unscaled_mm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import phalanx.kernels.reference as reference
from phalanx.errors import EngineError
from phalanx.kernels.capabilities import gpu, has_fp8_kernels, has_gluon
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.ops.dispatch import quantize_fp8
from phalanx.kernels.scaled_tensors import Quantized, Unscaled

ALIGNMENT = 16
"""cuBLAS and CUTLASS want both sizes of an FP8 weight, and addresses, in multiples of this."""


def scaled_mm(x: Quantized, weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """x [T, in] times weight [out, in] e4m3 with scale [out] fp32 -> [T, out] in `dtype`.

    On GPUs both sizes of the weight must be multiples of 16.
    """
    values, x_scale = x
    if not values.is_cuda:
        return reference.scaled_mm(values, x_scale, weight, scale, dtype)
    if _kernels_take(values, weight):
        skinny = _skinny_tiling(values, weight)
        if skinny is not None:
            from phalanx.kernels.gemm.fp8_skinny import fp8_skinny_gemm

            return fp8_skinny_gemm(values, weight, skinny, (_scale_by_row(x), scale), dtype=dtype)
        selected = heuristics.select_fp8(values.shape[0], *weight.shape)
        if isinstance(selected, heuristics.GemvTiling):
            from phalanx.kernels.gemm.gemv_fp8 import gemv_fp8

            return gemv_fp8(values, x_scale, weight, scale, dtype=dtype, tiling=selected)
        if selected is heuristics.Cublas.UNSCALED and dtype == torch.bfloat16:
            from phalanx.kernels.gemm.apply_scales import apply_scales

            return apply_scales(_cublas_unscaled(x, weight, scale))
    return _cublas_scaled(x, weight, scale, dtype)


def unscaled_mm(x: Quantized, weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor | Unscaled:
    """`scaled_mm` for a reader that can apply the scales: the unscaled output where that is faster."""
    if dtype == torch.bfloat16 and _kernels_take(x.values, weight):
        skinny = _skinny_tiling(x.values, weight)
        if skinny is not None:
            from phalanx.kernels.gemm.fp8_skinny import fp8_skinny_gemm

            return Unscaled(fp8_skinny_gemm(x.values, weight, skinny), _scale_by_row(x), scale)
        selected = heuristics.select_fp8(x.shape[0], *weight.shape, reader_scales=True)
        if selected is heuristics.Cublas.UNSCALED:
            return _cublas_unscaled(x, weight, scale)
    return scaled_mm(x, weight, scale, dtype=dtype)


def scaled_mm_into(x: Quantized, weight: Tensor, scale: Tensor, chunks: Sequence[tuple[slice, Tensor]]) -> None:
    """`scaled_mm` in bf16, each of these rows of x into the tensor [rows, out] beside it. For many rows, for which cuBLAS with
    scales is the fastest."""
    by_row, columns, transposed = _scale_by_row(x), scale.view(1, -1), weight.t()
    for rows, out in chunks:
        scales = by_row[rows]
        if not out.is_cuda:
            out.copy_(reference.scaled_mm(x.values[rows], scales, weight, scale, out.dtype))
            continue
        if scales.data_ptr() % ALIGNMENT:  # cuBLAS reads scales from such an address alone
            scales = scales.clone()
        torch._scaled_mm(x.values[rows], transposed, scales, columns, out_dtype=out.dtype, use_fast_accum=True, out=out)


def quant_gemm(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`quantize_fp8` of x [T, in] with x_scale (None: one per token), then `scaled_mm`. One token takes one kernel: the same bits,
    but for the order in which the sums of large weights are added up there."""
    if x.is_cuda and weight.shape[1] <= heuristics.GEMV_QUANT_MAX_INPUTS and _kernels_take(x, weight):
        selected = heuristics.select_fp8(x.shape[0], *weight.shape)
        if isinstance(selected, heuristics.GemvTiling):
            from phalanx.kernels.gemm.gemv_fp8 import gemv_fp8

            return gemv_fp8(x, x_scale, weight, scale, dtype=dtype, tiling=selected)
    return scaled_mm(Quantized(*quantize_fp8(x, x_scale)), weight, scale, dtype=dtype)


def _kernels_take(x: Tensor, weight: Tensor) -> bool:
    return x.is_contiguous() and weight.is_contiguous() and has_fp8_kernels(x.device)


def _skinny_tiling(x: Tensor, weight: Tensor) -> heuristics.SkinnyTiling | None:
    """How `fp8_skinny_gemm` is to cut the weight, both in e4m3, where it takes these and is the fastest; else None."""
    if x.shape[0] > heuristics.SKINNY_MAX_TOKENS or not has_gluon():
        return None
    from phalanx.kernels.gemm.fp8_skinny import supports

    if not supports(x, weight):
        return None
    outputs, inputs = weight.shape
    return heuristics.select_fp8_skinny(x.shape[0], outputs, inputs, gpu(x.device).num_sms)


def _scale_by_row(x: Quantized) -> Tensor:
    return x.scale if x.scale.dim() == 2 else x.scale.expand(x.shape[0], 1).contiguous()


def _cublas_scaled(x: Quantized, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # Scales by row and column need [T, 1] and [1, out], and give bf16 only: its rounding is a sixteenth of e4m3's own.
    rows, columns, bf16 = _scale_by_row(x), scale.view(1, -1), torch.bfloat16
    return torch._scaled_mm(x.values, weight.t(), rows, columns, out_dtype=bf16, use_fast_accum=True).to(dtype)


def _cublas_unscaled(x: Quantized, weight: Tensor, scale: Tensor) -> Unscaled:
    one, bf16 = _one(weight.device), torch.bfloat16
    values = torch._scaled_mm(x.values, weight.t(), one, one, out_dtype=bf16, use_fast_accum=True)
    return Unscaled(values, _scale_by_row(x), scale)


@cache
def _one(device: torch.device) -> Tensor:
    """1.0 fp32 (): the scale of an unscaled GEMM. The first call may not be captured."""
    if torch.cuda.is_current_stream_capturing():
        raise EngineError(
            "the first FP8 GEMM without scales runs while a CUDA graph is captured",
            why="it creates its scale of one, which would hold that value only after the graph ran",
            next="run the GEMM once before the capture",
        )
    return torch.ones((), dtype=torch.float32, device=device)
