# SPDX-License-Identifier: Apache-2.0
"""Products with weights in e4m3 that have a scale per block of 128 columns: `block_scaled_mm` where the device multiplies e4m3,
`widening_mm` elsewhere. Many tokens are torch's where it has such a product (`torch_takes`).

A weight [out, in] has scales [out, blocks]. It may be a slice whose first column is number `begin` of its block; activations are
quantized in groups that lie as the weight's blocks do.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import reference
from phalanx.kernels.norms import triton_is_here
from phalanx.kernels.products import cuts
from phalanx.kernels.products.cuts import WIDTH

ALIGNMENT = 16
"""Bytes that a thread loads at once: both sizes of a weight and `begin` are multiples."""


class _Gpu(NamedTuple):
    processors: int
    shared: int
    large: bool


def takes(outputs: int, inputs: int, block: int, begin: int) -> bool:
    """Whether `block_scaled_mm` takes such a weight. block: the columns of one; its rows do not matter."""
    return block == WIDTH and not any(size % ALIGNMENT for size in (outputs, inputs, begin))


def quantize_groups(x: Tensor, begin: int = 0) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_groups`, for groups of 128."""
    if x.is_cuda and x.is_contiguous() and triton_is_here():
        from phalanx.kernels.products.quantize_groups import quantize_groups as kernel

        return kernel(x, begin)
    return reference.quantize_groups(x, WIDTH, begin)


def torch_takes(outputs: int, inputs: int, begin: int, device: torch.device) -> bool:
    """Whether torch's product takes such a weight, whose rows begin with a block, on the device."""
    return not (outputs % WIDTH or inputs % (4 * WIDTH) or begin % WIDTH) and _torch_multiplies(device)


@cache
def _torch_multiplies(device: torch.device) -> bool:
    """Whether it has a product with scales by block: on Hopper, with a CUDA of 12.9 and later."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) >= (12, 9)


def once_a_block(scale: Tensor) -> Tensor:
    """scale [out, blocks] of a weight that `torch_takes`: [out / 128, blocks], as its product wants it."""
    return scale[::WIDTH].contiguous()


def block_scaled_mm(
    x: Tensor, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, begin: int = 0, by_block: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x [T, in] in 16 or 32 bit, quantized in groups, times a weight that `takes` names -> [T, out] in `dtype`. by_block: its
    scales `once_a_block`, where `torch_takes` it.

    One token and many are quantized alike, so that a token's result depends on how many there are by the order of sums alone.
    """
    if not (x.is_cuda and triton_is_here()):
        values, x_scale = reference.quantize_groups(x, WIDTH, begin)
        return reference.block_scaled_mm(values, x_scale, weight, scale, dtype, size=WIDTH, begin=begin)
    x = x.contiguous()
    if x.shape[0] == 1 and cuts.quantizes(weight.shape[0], begin + x.shape[1]):
        return _one_row(x, None, weight, scale, dtype, begin, quantize=True)
    if by_block is not None and dtype == torch.bfloat16 and cuts.torchs(x.shape[0], *weight.shape):
        return _torchs(x, weight, by_block)
    values, found = quantize_groups(x, begin)
    if x.shape[0] == 1:
        return _one_row(values, found, weight, scale, dtype, begin, quantize=True)
    return _rows(values, found, weight, scale, dtype, begin)


def widening_mm(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, block: int, begin: int = 0
) -> Tensor:  # fmt: skip
    """x [T, in] times the weight's meaning in x's dtype, plus bias [out] -> [T, out]. block: the columns of one.

    Few tokens on a GPU read the weight in e4m3 and widen it in registers, unrounded; otherwise it is widened in memory first.
    """
    outputs, inputs = weight.shape
    known = takes(outputs, inputs, block, begin) and x.dtype in (torch.bfloat16, torch.float16)
    if x.is_cuda and 0 < x.shape[0] <= cuts.FEW and known and triton_is_here():
        x = x.contiguous()
        if x.shape[0] == 1:
            product = _one_row(x, None, weight, scale, x.dtype, begin, quantize=False)
        else:
            product = _rows(x, None, weight, scale, x.dtype, begin)
        return product if bias is None else product + bias
    return F.linear(x, reference.dequantize(weight, scale, x.dtype, block=block, begin=begin), bias)


def _one_row(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, dtype: torch.dtype, begin: int, *, quantize: bool
) -> Tensor:  # fmt: skip
    from phalanx.kernels.products.block_scaled_row import block_scaled_row

    tiling = cuts.one_row(begin + weight.shape[1], quantizes=quantize and x_scale is None)
    return block_scaled_row(x, x_scale, weight, scale, dtype=dtype, begin=begin, quantize=quantize, tiling=tiling)


def _rows(x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, dtype: torch.dtype, begin: int) -> Tensor:
    from phalanx.kernels.products.block_scaled import block_scaled

    held = _gpu(x.device)
    tiling = cuts.rows(
        x.shape[0], *scale.shape, multiprocessors=held.processors, shared=held.shared, width=x.element_size(),
        large=held.large,
    )  # fmt: skip
    return block_scaled(x, x_scale, weight, scale, dtype=dtype, begin=begin, tiling=tiling)


def _torchs(x: Tensor, weight: Tensor, by_block: Tensor) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    from phalanx.kernels.products.quantize_groups import quantize_groups as kernel

    tokens = x.shape[0]
    values, scale = kernel(x, rows=-(-tokens // 4) * 4)  # cuBLAS reads scales of four tokens at a time
    by_token, by_both = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    product = scaled_mm(values, weight.t(), scale, by_token, by_block.t(), by_both, output_dtype=torch.bfloat16)
    return product[:tokens]


@cache
def _gpu(device: torch.device) -> _Gpu:
    found = torch.cuda.get_device_properties(device)
    return _Gpu(found.multi_processor_count, int(found.shared_memory_per_block_optin), found.major < 10)  # type: ignore[attr-defined]
