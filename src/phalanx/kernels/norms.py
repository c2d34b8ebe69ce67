# SPDX-License-Identifier: Apache-2.0
"""Which code runs a residual-add, norm and quantization: the Triton kernel on GPUs, plain torch elsewhere."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from phalanx.kernels import reference


@cache
def triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernel_takes(x: Tensor, weight: Tensor) -> bool:
    # A vector is 16 bytes; a row is a whole number of them and starts on one.
    whole = x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and weight.dtype == x.dtype
    return x.is_cuda and x.dim() == 2 and known and whole and triton_is_here()


def residual_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    quant: Literal["none", "fp8", "nvfp4"] = "none",
    scale: Tensor | None = None,
    keep_norm: bool = False,
) -> tuple[Tensor, ...]:
    """See `reference.residual_rms_norm_quant`."""
    if _kernel_takes(x, weight):
        from phalanx.kernels.residual_rms_norm import residual_rms_norm as kernel

        return kernel(x, residual, weight, eps, quant=quant, scale=scale, keep_norm=keep_norm)
    return reference.residual_rms_norm_quant(x, residual, weight, eps, quant=quant, scale=scale, keep_norm=keep_norm)
