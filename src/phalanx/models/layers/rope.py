# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (arXiv 2104.09864): cosines and sines per position, with the context extensions of Llama 3.1, YaRN
and LongRoPE."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.rope import Rope, Temperature


class CosSin(NamedTuple):
    """Cosines and sines of the batch's positions, [T, pairs] fp32 each: one for each pair of a head. temperature [T, 1, 1] fp32:
    what multiplies the queries, or None."""

    cos: Tensor
    sin: Tensor
    temperature: Tensor | None = None


class Rotary(nn.Module):
    """Cosines and sines of a batch's positions, computed once per forward and used by each layer with this `rope`. Of a head's
    `head_dim` elements the first `rotary_dim` are rotated; the other pairs have cosine 1 and sine 0, and weights are ordered so
    (`rotary_order`). Without RoPE all pairs have these."""

    inv_freq: Tensor

    def __init__(self, rope: Rope, rotary_dim: int, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.attention_factor, self.rest = rope.attention_factor, (head_dim - rotary_dim) // 2
        self.temperature = rope.temperature
        self.register_buffer("inv_freq", inv_freq(rope, rotary_dim).to(device), persistent=False)

    def forward(self, positions: Tensor) -> CosSin:
        """positions [T] int64 -> cos and sin, both [T, head_dim / 2] fp32, and the temperature."""
        if len(self.inv_freq):
            cos, sin = kernels.rope_cos_sin(positions, self.inv_freq, self.attention_factor)
        else:
            cos = sin = torch.empty(len(positions), 0, device=positions.device)
        if self.rest:
            cos, sin = F.pad(cos, (0, self.rest), value=1.0), F.pad(sin, (0, self.rest))
        return CosSin(cos, sin, None if self.temperature is None else temperature(self.temperature, positions))


def temperature(rule: Temperature, positions: Tensor) -> Tensor:
    """positions [T] int64 -> what multiplies their queries, [T, 1, 1] fp32."""
    steps = torch.div(positions + rule.shift, rule.interval, rounding_mode="floor")
    return torch.log1p(steps.float()).mul_(rule.beta).add_(1.0).view(-1, 1, 1)


def rotary_order(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> list[int]:
    """Kernels rotate element i of a head with element i + head_dim / 2. Checkpoints rotate the first rotary_dim elements: i with
    i + rotary_dim / 2, or, interleaved, 2i with 2i + 1. The order in which a head's elements are what kernels take; queries and
    keys in one order have the scores of the other."""
    rest, elements = (head_dim - rotary_dim) // 2, list(range(head_dim))
    first, second = elements[: rotary_dim // 2], elements[rotary_dim // 2 : rotary_dim]
    if interleaved:
        first, second = elements[:rotary_dim:2], elements[1:rotary_dim:2]
    return first + elements[rotary_dim : rotary_dim + rest] + second + elements[rotary_dim + rest :]


def inv_freq(rope: Rope, head_dim: int) -> Tensor:
    """Radians per token for each pair of a head, [head_dim / 2] fp32 on CPU: theta^(-2i / head_dim), scaled as `rope` says."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim)
    interpolated = plain / rope.factor
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return interpolated
        case "proportional":
            return interpolated * (torch.arange(head_dim // 2, device="cpu") < int(rope.portion * head_dim // 2))
        case "longrope":
            return plain / torch.tensor(rope.factors[rope.long], dtype=torch.float32, device="cpu")
        case "llama3":
            # Between the two: linear in the number of rotations over the original context (Llama 3.1's reference implementation).
            rounds = rope.original_max_positions * plain / (2 * math.pi)
            span = max(rope.high_freq_factor - rope.low_freq_factor, 1e-30)  # Llama-4 Scout has none: a step
            keep = ((rounds - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        case "yarn":
            low, high = _yarn_range(rope, head_dim)
            keep = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0.0, 1.0)
        case other:
            raise ValueError(f"rope kind {other!r} is not built")
    return interpolated * (1.0 - keep) + plain * keep


def _yarn_range(rope: Rope, head_dim: int) -> tuple[float, float]:
    """The pairs between which YaRN (arXiv 2309.00071, section 3.2) goes from keeping a frequency to interpolating it."""

    def pair_of(rounds: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (rounds * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    return low, high if high != low else high + 0.001
