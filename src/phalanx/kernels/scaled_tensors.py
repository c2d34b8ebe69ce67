# SPDX-License-Identifier: Apache-2.0
"""Tensors that travel with scales: quantized activations, the operands of a GEMV, and GEMM outputs before their scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.adapters.rows import GemvDelta

FP8 = torch.float8_e4m3fn


class Quantized(NamedTuple):
    """Activations in e4m3. values [T, H] e4m3 are to be multiplied by scale: fp32, one per token [T, 1] or a scalar ()."""

    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


class Unscaled(NamedTuple):
    """The output of an FP8 GEMM before its scales, which the next kernel applies: values [T, ...], N of them for each token, times
    rows [T, 1] fp32 times columns [N] fp32. The next kernel computes in fp32 and rounds once, to the values' dtype."""

    values: Tensor
    rows: Tensor
    columns: Tensor

    def view(self, *shape: int) -> Unscaled:
        """The same with values of another shape [T, ...]."""
        return self._replace(values=self.values.view(*shape))

    def to_fp32(self) -> Tensor:
        """The finished GEMM output, in fp32."""
        flat = self.values.float().flatten(1) * self.rows * self.columns
        return flat.view(self.values.shape)

    @staticmethod
    def parts(output: Tensor | Unscaled) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(values, rows, columns) of a GEMM output; both scales are None where the output is finished."""
        return output if isinstance(output, Unscaled) else (output, None, None)


class GemvArgs(NamedTuple):
    """The operands of a GEMV: x [T, in] and weight [out, in], in the same 16 or 32 bit; or the weight in e4m3, times scale [out]
    fp32, and x in e4m3, times x_scale, or to be quantized with x_scale, or with scales of its own where that is None. x_scale: one
    fp32 number, of any shape, where T is 1. bias [out] and the delta of the token's adapter are added before the output is rounded,
    to `dtype`."""

    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    dtype: torch.dtype
    delta: GemvDelta | None = None

    @classmethod
    def of(
        cls, x: Tensor | Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, scale: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> GemvArgs:  # fmt: skip
        """input_scale: what x is to be quantized with, () fp32, where it is not yet; None: a scale of its own."""
        values, x_scale = x if isinstance(x, Quantized) else (x, input_scale)
        return cls(values, x_scale, weight, scale, bias, dtype)
