# SPDX-License-Identifier: Apache-2.0
"""GEMM with weights in e4m3 that have a scale per block of 128 columns: `block_scaled_mm` where the device multiplies e4m3,
`w8a16_gemm` elsewhere. Many tokens run in cuBLAS where it has such a GEMM (`cublas_supports`).

A weight [out, in] has scales [out, blocks]. It may be a slice whose first column is column `begin` of its block; activations are
quantized in groups that lie as the weight's blocks do.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.capabilities import gpu, has_triton
from phalanx.kernels.gemm import block_heuristics
from phalanx.kernels.gemm.block_heuristics import BLOCK_K

ALIGNMENT = 16
"""Bytes that a thread loads at once: both sizes of a weight and `begin` are multiples."""


def supports(outputs: int, inputs: int, block: int, begin: int) -> bool:
    """Whether `block_scaled_mm` takes such a weight. block: the columns of one; its rows do not matter."""
    return block == BLOCK_K and not any(size % ALIGNMENT for size in (outputs, inputs, begin))


def per_token_group_quant_fp8(x: Tensor, begin: int = 0, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.per_token_group_quant_fp8`, for groups of 128. counts [2] int32, on a GPU: the results have only counts[1]
    rows, and any values behind them."""
    if x.is_cuda and x.is_contiguous() and has_triton():
        from phalanx.kernels.gemm.per_token_group_quant import per_token_group_quant_fp8 as kernel

        return kernel(x, begin, counts=counts)
    return reference.per_token_group_quant_fp8(x, BLOCK_K, begin)


def cublas_supports(outputs: int, inputs: int, begin: int, device: torch.device) -> bool:
    """Whether cuBLAS takes such a weight, whose rows begin with a block, on the device."""
    return not (outputs % BLOCK_K or inputs % (4 * BLOCK_K) or begin % BLOCK_K) and _cublas_scales_by_block(device)


@cache
def _cublas_scales_by_block(device: torch.device) -> bool:
    """Whether torch has a GEMM with scales by block: on Hopper, with a CUDA of 12.9 and later."""
    if device.type != "cuda" or gpu(device).sm != 90:
        return False
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) >= (12, 9)


def one_scale_per_block(scale: Tensor) -> Tensor:
    """scale [out, blocks] of a weight that `cublas_supports`: [out / 128, blocks], as cuBLAS reads it."""
    return scale[::BLOCK_K].contiguous()


def block_scaled_mm(
    x: Tensor, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, begin: int = 0, by_block: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x [T, in] in 16 or 32 bit, quantized in groups, times a weight that `supports` admits -> [T, out] in `dtype`. by_block: its
    scales as `one_scale_per_block` gives them, where `cublas_supports` it.

    One token and many are quantized alike, so that a token's result depends on how many there are by the order of sums alone.
    """
    if not (x.is_cuda and has_triton()):
        values, x_scale = reference.per_token_group_quant_fp8(x, BLOCK_K, begin)
        return reference.block_scaled_mm(values, x_scale, weight, scale, dtype, size=BLOCK_K, begin=begin)
    x = x.contiguous()
    if x.shape[0] == 1 and block_heuristics.gemv_quantizes(weight.shape[0], begin + x.shape[1]):
        return _gemv(x, None, weight, scale, dtype, begin, quantize=True)
    if by_block is not None and dtype == torch.bfloat16 and block_heuristics.prefers_cublas(x.shape[0], *weight.shape):
        return _cublas(x, weight, by_block)
    values, x_scale = per_token_group_quant_fp8(x, begin)
    if x.shape[0] == 1:
        return _gemv(values, x_scale, weight, scale, dtype, begin, quantize=True)
    return _gemm(values, x_scale, weight, scale, dtype, begin)


def w8a16_gemm(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, block: int, begin: int = 0
) -> Tensor:  # fmt: skip
    """x [T, in] times the dequantized weight in x's dtype, plus bias [out] -> [T, out]. block: the columns of one.

    Few tokens on a GPU read the weight in e4m3 and widen it in registers, unrounded; otherwise it is widened in memory first.
    """
    outputs, inputs = weight.shape
    known = supports(outputs, inputs, block, begin) and x.dtype in (torch.bfloat16, torch.float16)
    if x.is_cuda and 0 < x.shape[0] <= block_heuristics.FEW_TOKENS and known and has_triton():
        x = x.contiguous()
        if x.shape[0] == 1:
            output = _gemv(x, None, weight, scale, x.dtype, begin, quantize=False)
        else:
            output = _gemm(x, None, weight, scale, x.dtype, begin)
        return output if bias is None else output + bias
    return F.linear(x, reference.dequantize(weight, scale, x.dtype, block=block, begin=begin), bias)


def _gemv(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, dtype: torch.dtype, begin: int, *, quantize: bool
) -> Tensor:  # fmt: skip
    from phalanx.kernels.gemm.block_scaled_gemv import block_scaled_gemv

    tiling = block_heuristics.gemv_tiling(begin + weight.shape[1], quantizes=quantize and x_scale is None)
    return block_scaled_gemv(x, x_scale, weight, scale, dtype=dtype, begin=begin, quantize=quantize, tiling=tiling)


def _gemm(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, dtype: torch.dtype, begin: int) -> Tensor:
    from phalanx.kernels.gemm.block_scaled_gemm import block_scaled_gemm

    here = gpu(x.device)
    tiling = block_heuristics.block_tiling(
        x.shape[0], *scale.shape, num_sms=here.num_sms, shared_memory=here.shared_memory, itemsize=x.element_size(),
        large=here.sm < 100,
    )  # fmt: skip
    return block_scaled_gemm(x, x_scale, weight, scale, dtype=dtype, begin=begin, tiling=tiling)


def _cublas(x: Tensor, weight: Tensor, by_block: Tensor) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    from phalanx.kernels.gemm.per_token_group_quant import per_token_group_quant_fp8 as kernel

    tokens = x.shape[0]
    values, scale = kernel(x, rows=-(-tokens // 4) * 4)  # cuBLAS reads scales of four tokens at a time
    by_token, by_both = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    output = scaled_mm(values, weight.t(), scale, by_token, by_block.t(), by_both, output_dtype=torch.bfloat16)
    return output[:tokens]
