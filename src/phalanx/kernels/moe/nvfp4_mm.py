# SPDX-License-Identifier: Apache-2.0
"""GEMM with weights in NVFP4: the grouped GEMM of experts, with one expert."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from phalanx.kernels.capabilities import gpu, has_triton
from phalanx.kernels.moe import biased_heuristics
from phalanx.kernels.moe.nvfp4_packing import Nvfp4Weight, dequantized


def nvfp4_mm(x: Tensor, weight: Nvfp4Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] times `weight` transposed, plus bias [outputs] -> [T, outputs] in x's dtype. Values are widened exactly, sums
    are in fp32, scaled by the row's scale and rounded once."""
    if not (x.is_cuda and has_triton() and x.dtype in (torch.bfloat16, torch.float16)):
        total = x.float() @ dequantized(weight, torch.float32).t()
        return (total if bias is None else total + bias.float()).to(x.dtype)
    return launched(x, weight, bias)


def launched(x: Tensor, weight: Nvfp4Weight, bias: Tensor | None = None) -> Tensor:
    """`nvfp4_mm` by the kernel, on a GPU or in Triton's interpreter."""
    from phalanx.kernels.moe.biased_gemm import biased_gemm
    from phalanx.kernels.moe.sort_by_expert import Tiles

    tokens, device = len(x), gpu(x.device)
    if not tokens:
        return x.new_empty(0, weight.outputs)
    size = min(128, max(8, 1 << (tokens - 1).bit_length()))
    tiling = biased_heuristics.select(
        1, size, weight.outputs, weight.inputs, gated=False, in_4_bits=True, num_sms=device.num_sms, sm=device.sm
    )
    tables = _tables(tokens, size, x.device)
    tiles = Tiles(*tables, most=len(tables[1]), in_order=True)
    sums = biased_gemm(x.contiguous(), weight, None, bias, tiles, tiling, top_k=1, experts=1)
    return sums[0] if len(sums) == 1 else sums.sum(0).to(x.dtype)


@functools.cache
def _tables(tokens: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The lists of `Tiles` of one expert that all tokens reach. They stay: captured graphs read them."""
    from phalanx.kernels.moe.sort_by_expert import TILE_FIELDS

    first = torch.arange(0, tokens, size, dtype=torch.int32)
    tiles = torch.stack((torch.zeros_like(first), first, (tokens - first).clamp(max=size)), 1)
    padded = torch.nn.functional.pad(tiles, (0, TILE_FIELDS - 3))
    counts = torch.tensor([len(first), tokens], dtype=torch.int32)
    return torch.empty(1, dtype=torch.int32, device=device).expand(tokens), padded.to(device), counts.to(device)
