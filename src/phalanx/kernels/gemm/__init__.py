# SPDX-License-Identifier: Apache-2.0
"""Products of activations and weights in 16 and 32 bit: `linear` picks the code; `scaled_mm` does for e4m3, and asks here whether
the kernel for a few rows is to be taken."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.norms import triton_is_here
from phalanx.kernels.products import choice

__all__ = ["choice", "cut_for_few_rows", "knows_gluon", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out], written into `out` where one is given (without a
    bias); summed in fp32, rounded to x's dtype.

    One row on a GPU reads the weight and does next to nothing else: it has a kernel that does only that.
    """
    if x.is_cuda and bias is None and _kernels_take(x, weight, out):
        tiling = choice.sixteen(x.shape[0], weight.shape[1])
        if tiling is not None:
            from phalanx.kernels.products.one_row import one_row

            return one_row(x, weight, out, **tiling._asdict())
    if out is not None:
        return torch.mm(x, weight.t(), out=out)
    return F.linear(x, weight, bias)


def cut_for_few_rows(x: Tensor, weight: Tensor) -> choice.FewRows | None:
    """How `few_rows.few_rows` is to cut the weight, both in e4m3, where it takes these and is the fastest; else None."""
    if x.shape[0] > choice.MOST_FEW or not knows_gluon():
        return None
    from phalanx.kernels.products.few_rows import processors, takes

    if not takes(x, weight):
        return None
    outputs, inputs = weight.shape
    return choice.few_rows(x.shape[0], outputs, inputs, processors(x.device))


@cache
def knows_gluon() -> bool:
    """Whether `few_rows` was verified with this Triton: its language, Gluon, is said to be experimental there."""
    if not triton_is_here():
        return False
    import triton

    return str(triton.__version__).startswith("3.6.")


def _kernels_take(x: Tensor, weight: Tensor, out: Tensor | None) -> bool:
    whole = x.dim() == 2 and weight.shape[1] % 8 == 0 and x.is_contiguous() and weight.is_contiguous()
    whole = whole and (out is None or out.is_contiguous())
    return whole and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and triton_is_here()
