# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense (arXiv 2505.09388): Qwen2 without its biases, and with each head's query and key normed before they are turned."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx import kernels
from phalanx.config.model import ModelShape
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.llama import Attention, Llama, Turns
from phalanx.models.slices import Seat


class NormedAttention(Attention):
    """Attention whose queries and keys are RMS-normed per head, so that their product cannot grow without bound."""

    def __init__(self, name: str, shape: ModelShape, *, window: int | None, seat: Seat) -> None:
        super().__init__(name, shape, window=window, seat=seat)
        self.q_norm = RmsNorm(f"{name}.q_norm", shape.head_dim, shape.rms_norm_eps, seat=seat)
        self.k_norm = RmsNorm(f"{name}.k_norm", shape.head_dim, shape.rms_norm_eps, seat=seat)

    def turn(self, query_and_key: Tensor, turns: Turns) -> Tensor:
        query, key = torch.split(query_and_key, [self.q_heads, self.kv_heads], dim=1)
        return kernels.rope(torch.cat((self.q_norm(query), self.k_norm(key)), dim=1), *turns)


class Qwen3(Llama):
    """Qwen2's choice of windows, with normed heads."""

    def attention(self, name: str, layer: int) -> Attention:
        return NormedAttention(name, self.shape, window=self.shape.windows[layer], seat=self.seat)
