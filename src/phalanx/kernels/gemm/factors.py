# SPDX-License-Identifier: Apache-2.0
"""What a product is made of, in 16 bit or in e4m3."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.scaled_mm import Quantized


class Factors(NamedTuple):
    """x [T, in] and weight [out, in], in the same 16 or 32 bit; or the weight in e4m3, times scale [out] fp32, and x in e4m3, times
    x_scale, or to be quantized with x_scale, or with scales of its own where that is None. x_scale: one fp32 number, of any shape,
    where T is 1. bias [out] is added before the product is rounded, to `dtype`."""

    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(
        cls, x: Tensor | Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, scale: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> Factors:  # fmt: skip
        """input_scale: what x is to be quantized with, () fp32, where it is not yet; None: a scale of its own."""
        values, x_scale = x if isinstance(x, Quantized) else (x, input_scale)
        return cls(values, x_scale, weight, scale, bias, dtype)
