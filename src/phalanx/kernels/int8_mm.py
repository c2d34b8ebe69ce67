# SPDX-License-Identifier: Apache-2.0
"""GEMM of int8 by int8, whose sums are exact on every device, and the quantization of its input, by operations of torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127
_LEAST_ROWS, _UNIT = 32, 8
"""Of torch's GEMM on a GPU: more than 16 rows, and multiples of 8 in its other sizes."""


def quantize_int8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, in] in int8, rounded to nearest even, and its scale in fp32: `scale` () where it is static, else of each token [T, 1],
    its largest magnitude / 127; a token of zeros stays zeros."""
    in_fp32 = x.float()
    if scale is None:
        scale = (in_fp32.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.round(in_fp32 / scale).clamp(-LARGEST - 1, LARGEST).to(torch.int8), scale


def int8_mm(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] int8 times weight [out, in] int8 transposed -> [T, out] int32, exactly."""
    if not x.is_cuda:  # sums of products are whole numbers below 2^53
        return (x.double() @ weight.double().t()).to(torch.int32)
    tokens, (outputs, inputs) = len(x), weight.shape
    rows = max(_LEAST_ROWS, -(-tokens // _UNIT) * _UNIT)
    more = -inputs % _UNIT, -outputs % _UNIT
    padded = F.pad(x, (0, more[0], 0, rows - tokens))
    weight = F.pad(weight, (0, more[0], 0, more[1])) if any(more) else weight  # which would copy it
    return torch._int_mm(padded, weight.t())[:tokens, :outputs]
