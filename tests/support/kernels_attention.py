# SPDX-License-Identifier: Apache-2.0
"""What tests of the attention kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

SCALES = (0.25, 0.03)


def in_int8(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Caches [blocks, block_size, kv_heads, head_dim] in int8, and their token_scales."""
    from phalanx.kernels.reference import quantize_int8

    (key, key_scale), (value, value_scale) = quantize_int8(key), quantize_int8(value)
    return key, value, torch.cat((key_scale, value_scale), dim=-1).transpose(1, 2).contiguous()


def sinks_of(heads: int, dtype: torch.dtype, center: float | None) -> Tensor | None:
    """A sink of each head, about as large as the scores about `center`; None for none."""
    return None if center is None else (torch.randn(heads, generator=torch.Generator().manual_seed(9)) * 2 + center).to(dtype)
