# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H (arXiv 2504.03624): each layer has one block, Mamba-2, attention, an MLP or experts, and the norm before it."""

from __future__ import annotations

from torch import Tensor

from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import Decoder, DecoderLayer
from phalanx.models.layers.activation import NormOutput
from phalanx.models.layers.grouped_query_attention import GroupedQueryAttention
from phalanx.models.layers.mamba2 import MambaMixer
from phalanx.models.layers.mlp import Mlp, mlp_of
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin


class BlockLayer(DecoderLayer):
    """residual + mixer(norm(residual))."""

    def __init__(self, name: str, mixer: GroupedQueryAttention | MambaMixer | Mlp | SparseMoe, model: Decoder) -> None:
        super().__init__()
        self.norm, self.mixer = model.hidden_norm(f"{name}.norm"), mixer
        mixer.set_input_norm(self.norm)

    @property
    def input_norm(self) -> RmsNorm:
        return self.norm

    def forward(
        self, x: NormOutput, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, next_norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:
        output: tuple[NormOutput, Tensor]
        if isinstance(self.mixer, Mlp | SparseMoe):
            output = self.mixer(x, residual, next_norm, batch)
        else:
            output = self.mixer(x, cos_sin, batch, cache, residual, next_norm)
        return output


class NemotronH(Decoder):
    """Layers of one block each."""

    def layer(self, index: int) -> BlockLayer:
        prefix = f"model.layers.{index}"
        return BlockLayer(prefix, self._mixer(prefix, index), self)

    def _mixer(self, prefix: str, layer: int) -> GroupedQueryAttention | MambaMixer | Mlp | SparseMoe:
        shape, name, block = self.shape, f"{prefix}.mixer", self.shape.blocks[layer]
        if block == "mamba":
            return MambaMixer(name, shape, context=self.context)
        if block == "attention":
            return GroupedQueryAttention(name, shape, layer, context=self.context)
        experts = shape.experts_in(layer)
        if experts is None:
            return mlp_of(shape.activation, name, context=self.context)
        return SparseMoe(prefix, experts, layer, context=self.context)
