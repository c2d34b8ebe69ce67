# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense (arXiv 2505.09388): Qwen2 without its biases, and with each head's query and key normalized before rope."""

from __future__ import annotations

from phalanx.config.model import ModelShape
from phalanx.kernels.reference import HeadNorm
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.llama import Attention, Llama
from phalanx.models.slices import LayerContext


class NormedAttention(Attention):
    """Attention whose queries and keys are RMS-normed per head, so that the scores cannot grow without bound."""

    def __init__(self, name: str, shape: ModelShape, *, window: int | None, context: LayerContext) -> None:
        super().__init__(name, shape, window=window, context=context)
        self.q_norm = RmsNorm(f"{name}.q_norm", shape.head_dim, shape.rms_norm_eps, context=context)
        self.k_norm = RmsNorm(f"{name}.k_norm", shape.head_dim, shape.rms_norm_eps, context=context)

    @property
    def head_norm(self) -> HeadNorm:
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class Qwen3(Llama):
    """Qwen2's choice of windows, with normed heads."""

    def attention(self, name: str, layer: int) -> Attention:
        return NormedAttention(name, self.shape, window=self.shape.windows[layer], context=self.context)
