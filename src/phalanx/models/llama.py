# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3 and 3.1 (arXiv 2302.13971, 2407.21783), and the families that differ from it in traits of their shape: multi-head
latent attention (DeepSeek-V2, arXiv 2405.04434), layers of the gated delta rule (Qwen3-Next, arXiv 2412.06464) and of Mamba-2
(Granite 4, arXiv 2405.21060), experts."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from phalanx.layout.families.dense import NORMS
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import Decoder, DecoderLayer
from phalanx.models.layers.activation import NormAndQuantized, NormOutput
from phalanx.models.layers.gated_delta_net import GatedDeltaNet
from phalanx.models.layers.grouped_query_attention import GroupedQueryAttention
from phalanx.models.layers.latent_attention import LatentAttention
from phalanx.models.layers.mamba2 import MambaMixer
from phalanx.models.layers.mlp import Mlp, mlp_of
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.layers.norm import RmsNorm, all_reduce_norm
from phalanx.models.layers.rope import CosSin

Attention = GroupedQueryAttention | LatentAttention | GatedDeltaNet | MambaMixer


class LayerNorms(NamedTuple):
    """The norms of a layer, before and behind its blocks, as `NormNames` names them."""

    before_attention: RmsNorm | None
    behind_attention: RmsNorm | None
    before_mlp: RmsNorm | None
    behind_mlp: RmsNorm | None


class LlamaLayer(DecoderLayer):
    """Attention, then the feed-forward block, each with its residual around it and its norms where `ModelShape.norms` says; or both
    of one norm, and one residual ("parallel")."""

    def __init__(
        self, name: str, attention: Attention, feed_forward: Mlp | SparseMoe, model: Decoder
    ) -> None:  # fmt: skip
        super().__init__()
        names = NORMS[model.shape.norms]
        for each in filter(None, names):
            self.add_module(each, model.hidden_norm(f"{name}.{each}"))
        self.self_attn, self.mlp = attention, feed_forward
        self._parallel = model.context.group if model.shape.norms == "parallel" else None
        self._norms = LayerNorms(*(None if each is None else cast(RmsNorm, self.get_submodule(each)) for each in names))
        if self._norms.before_attention is not None and self._parallel is None:  # else both blocks read it
            attention.set_input_norm(self._norms.before_attention)
        if self._norms.before_mlp is not None:
            feed_forward.set_input_norm(self._norms.before_mlp)
        attention.o_proj.output_norm = self._norms.behind_attention
        if self._norms.behind_mlp is not None:
            assert isinstance(feed_forward, Mlp)
            feed_forward.down_proj.output_norm = self._norms.behind_mlp

    @property
    def input_norm(self) -> RmsNorm | None:
        return self._norms.before_attention

    def forward(
        self, x: NormOutput, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, next_norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:
        if self._parallel is not None:
            assert isinstance(self.self_attn, GroupedQueryAttention)
            assert isinstance(self.mlp, Mlp)
            assert not isinstance(x, NormAndQuantized)
            total = self.self_attn.partial_sum(x, cos_sin, batch, cache) + self.mlp.partial_sum(x)
            return all_reduce_norm(total, residual, next_norm, self._parallel)
        x, residual = self.self_attn(x, cos_sin, batch, cache, residual, self._norms.before_mlp)
        output: tuple[NormOutput, Tensor] = self.mlp(x, residual, next_norm, batch)
        return output


class Llama(Decoder):
    """Layers of attention and a feed-forward block."""

    def layer(self, index: int) -> LlamaLayer:
        name = f"model.layers.{index}"
        return LlamaLayer(name, self.attention(f"{name}.self_attn", index), self.feed_forward(name, index), self)

    def attention(self, name: str, layer: int) -> Attention:
        """The attention of layer `layer`, or what it has in that place."""
        shape = self.shape
        if shape.gated_delta is not None and layer in shape.gated_delta.layers:
            return GatedDeltaNet(f"{name.removesuffix('self_attn')}linear_attn", shape, context=self.context)
        if shape.mamba is not None and layer in shape.mamba.layers:
            return MambaMixer(f"{name.removesuffix('self_attn')}mamba", shape, context=self.context)
        if shape.latent is not None:
            return LatentAttention(name, shape, shape.latent, layer, context=self.context)
        return GroupedQueryAttention(name, shape, layer, context=self.context)

    def feed_forward(self, prefix: str, layer: int) -> Mlp | SparseMoe:
        """The feed-forward block of layer `layer`: experts where the shape has them."""
        experts = self.shape.experts_in(layer)
        if experts is not None:
            return SparseMoe(prefix, experts, layer, multiplier=self.shape.multipliers.residual, context=self.context)
        return self.mlp(prefix)

    def mlp(self, prefix: str) -> Mlp:
        """The MLP of the layer with this name."""
        name = self.context.of_gemm(prefix, "mlp_gate_up")[0].name.rsplit(".", 2)[0]
        return mlp_of(self.shape.activation, name, multiplier=self.shape.multipliers.residual, context=self.context)
