# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on query, key and value, and a sliding window in some layers.

The biases come with the shape (`ModelShape.qkv_bias`): the family always has them.
"""

from __future__ import annotations

from phalanx.models.llama import Attention, Llama


class Qwen2(Llama):
    """Full attention in the lower layers, a window in those that config.json chooses."""

    def attention(self, name: str, layer: int) -> Attention:
        return Attention(name, self.shape, window=self.shape.windows[layer], context=self.context)
