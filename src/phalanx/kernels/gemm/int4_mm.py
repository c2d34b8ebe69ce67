# SPDX-License-Identifier: Apache-2.0
"""GEMM with weights of 4-bit integers: kernels of our own for few tokens, on Hopper and elsewhere; for more, the weight is widened
piece by piece and multiplied by cuBLAS, whose tensor cores then bind."""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx.kernels.reference as reference
from phalanx.kernels.capabilities import gpu, has_fp8_gemm, has_gluon, has_triton
from phalanx.kernels.gemm import int4_heuristics
from phalanx.kernels.gemm.int4_packing import TILE_ROWS, Int4Weight, dequantized

MAX_TOKENS = 64
"""Of `int4_gemm`: beyond it cuBLAS with a widened weight is faster."""
PIECE_BYTES = 128 << 20
"""Of the widened weight that is held at a time."""


FP8_MIN_TOKENS = 129
"""From so many tokens on activations are quantized, where that is wanted: fewer are multiplied by `int4_skinny`, which reads."""


def int4_mm(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, fp8: bool = False) -> Tensor:
    """x [T, inputs] times `weight` transposed, plus bias [outputs] -> [T, outputs] in x's dtype, which is the weight's.

    Each widened element is rounded once to that dtype, sums are in fp32 and rounded once. fp8: of FP8_MIN_TOKENS and more, x is
    quantized to e4m3 by token, where the device multiplies that, and on a CPU."""
    if fp8 and quantizes(x):
        if not (x.is_cuda and has_triton()):
            return int4_fp8_plain(x, weight, bias)
        from phalanx.kernels.gemm.int4_fp8 import int4_fp8_gemm

        return int4_fp8_gemm(x, weight, bias)
    if not (x.is_cuda and has_triton() and x.dtype in (torch.bfloat16, torch.float16)):
        total = x.float() @ dequantized(weight, x.dtype).float().t()
        return (total if bias is None else total + bias.float()).to(x.dtype)
    from phalanx.kernels.gemm.int4_gemm import int4_gemm, widen

    x = x.contiguous()
    if has_gluon() and bias is None:
        from phalanx.kernels.gemm import int4_skinny

        if int4_skinny.supports(x, weight):
            tiling = int4_heuristics.select_skinny(len(x), weight.outputs, num_sms=gpu(x.device).num_sms)
            return int4_skinny.int4_skinny_gemm(x, weight, tiling)
    if len(x) <= MAX_TOKENS:
        return int4_gemm(x, weight, bias)
    out = torch.empty((x.shape[0], weight.outputs), dtype=x.dtype, device=x.device)
    step = max(TILE_ROWS, PIECE_BYTES // (weight.inputs * x.element_size()) // TILE_ROWS * TILE_ROWS)
    for first in range(0, weight.outputs, step):
        rows = slice(first, min(first + step, weight.outputs))
        piece = widen(weight, rows)
        if bias is None:
            torch.mm(x, piece.t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, piece.t(), out=out[:, rows])
    return out


def quantizes(x: Tensor) -> bool:
    """Whether activations [T, inputs] are quantized, where that is wanted."""
    in_16_bit = x.dtype in (torch.bfloat16, torch.float16)
    return len(x) >= FP8_MIN_TOKENS and (not x.is_cuda or (in_16_bit and has_fp8_gemm(x.device)))


def int4_fp8_plain(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """What `int4_fp8.int4_fp8_gemm` computes, by the dequantized weight in fp32."""
    values, scale = reference.quantize_fp8(x)
    total = values.float() @ dequantized(weight, torch.float32).t() * scale
    return (total if bias is None else total + bias.float()).to(x.dtype)
