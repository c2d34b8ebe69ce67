# SPDX-License-Identifier: Apache-2.0
"""Weights of 4-bit integers for the tests of their kernels, and what they mean."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.gemm.int4_packing import Int4Weight, packed

SIZES = [
    (96, 256, 128, False),
    (70, 352, 32, True),
    (70, 352, 32, False),
    (64, 512, 64, True),
    (64, 384, 384, False),
    (64, 256, 128, True),
]
"""(outputs, inputs, group, zeros): whole tiles and parts of them, groups within a k step and beyond."""


def drawn(outputs: int, inputs: int, group: int, zeros: bool, dtype: torch.dtype, device: str = "cpu") -> tuple[Int4Weight, Tensor]:
    """A weight and, by the formula alone, its elements in `dtype`."""
    torch.manual_seed(outputs + inputs + group)
    groups = -(-inputs // group)
    codes = torch.randint(0, 16, (outputs, inputs), device=device)
    scales = ((torch.rand(outputs, groups, device=device) + 0.5) / 10).to(dtype)
    zero_points = torch.randint(0, 16, (outputs, groups), device=device) if zeros else None
    elements = torch.empty(outputs, inputs, device=device)
    for k in range(inputs):
        zero = 8 if zero_points is None else zero_points[:, k // group]
        elements[:, k] = (codes[:, k] - zero).float() * scales[:, k // group].float()
    return packed(codes, scales, zero_points, group, dtype), elements.to(dtype)


def of_a_long_double(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.double() @ weight.double().t() + bias.double()
