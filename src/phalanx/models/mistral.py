# SPDX-License-Identifier: Apache-2.0
"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from phalanx.models.llama import Attention, Llama


class Mistral(Llama):
    """A query sees the last `sliding_window` keys; what it knows of earlier ones went through the layers below."""

    def attention(self, name: str, layer: int) -> Attention:
        return Attention(name, self.shape, window=self.shape.windows[layer], context=self.context)
