# SPDX-License-Identifier: Apache-2.0
"""GEMM in 16 and 32 bit: torch's, and a GEMV kernel for one token on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.scaled_tensors import GemvArgs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out], written into `out` where one is given; summed in
    fp32, rounded to x's dtype.

    For one token the time is that of reading the weight: a GEMV kernel does little else.
    """
    if x.is_cuda and _gemv_takes(x, weight, out):
        tiling = heuristics.select_16bit(x.shape[0], weight.shape[1])
        if tiling is not None:
            from phalanx.kernels.gemm.gemv import gemv

            return gemv(x, weight, out, bias, **tiling._asdict())
    if out is not None:
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    return F.linear(x, weight, bias)


def linear_with_delta(args: GemvArgs, out: Tensor | None = None) -> Tensor | None:
    """`linear` of one token with the delta of its adapter, args.delta. None: no kernel takes the operands."""
    tiling = heuristics.select_16bit(args.x.shape[0], args.weight.shape[1])
    if tiling is None or args.scale is not None or not args.x.is_cuda or not _gemv_takes(args.x, args.weight, out):
        return None
    from phalanx.kernels.adapters.gemv_delta import gemv

    return gemv(args, out, tiling)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out] in fp32, as if both were: there, products of 16 bit are exact."""
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        tiling = heuristics.select_16bit(x.shape[0], weight.shape[1])
        if tiling is not None and _gemv_takes(x, weight, None):
            from phalanx.kernels.gemm.gemv import gemv

            out = torch.empty((1, weight.shape[0]), dtype=torch.float32, device=x.device)
            return gemv(x, weight, out, **tiling._asdict())
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def _gemv_takes(x: Tensor, weight: Tensor, out: Tensor | None) -> bool:
    dense = x.dim() == 2 and weight.shape[1] % 8 == 0 and x.is_contiguous() and weight.is_contiguous()
    dense = dense and (out is None or out.is_contiguous())
    return dense and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and has_triton()
