# SPDX-License-Identifier: Apache-2.0
"""Every op in plain torch, under the name of its kernel: the oracle of the kernels' tests, and what runs on CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / rms(x) * weight [H]; arithmetic in fp32, rounded to x's dtype before the weight (as transformers does)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [T, H] in x's dtype; the sum is rounded once before the norm."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
