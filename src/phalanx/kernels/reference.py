# SPDX-License-Identifier: Apache-2.0
"""Every op in plain torch, under the name of its kernel: the oracle of the kernels' tests, and what runs on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 * I], gate in the first half of the columns -> [T, I]; both in gate_up's dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [T, heads, D] by its token's angles, cos and sin [T, D / 2] fp32; element i pairs with i + D / 2.

    Arithmetic in fp32, rounded once to x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Store key and value [T, kv_heads, D] in caches [num_blocks, block_size, kv_heads, D] at slots [T] int64, block * block_size +
    offset; a slot of -1 stores nothing. The other slots are distinct.

    Without a boolean index, whose size only the device knows: a padding token repeats what the token with the highest slot stores,
    or, where all are padding, what slot 0 holds.
    """
    padding = slots < 0
    real = slots.argmax().view(1)
    target = torch.where(padding, slots[real].clamp(min=0), slots)
    for part, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        repeated = torch.where(padding[real, None, None], flat[:1], part[real])
        flat[target] = torch.where(padding[:, None, None], repeated, part)
