# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: experts beside a layer's MLP, embeddings by layer, and a factor of the residual stream behind each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.layout.families.gemma4 import BESIDE_EXPERTS
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import Activation, NormAndQuantized, NormOutput
from phalanx.models.layers.layer_inputs import LayerInputBlock, LayerInputEmbedding
from phalanx.models.layers.mlp import Mlp
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin
from phalanx.models.llama import Llama, LlamaLayer
from phalanx.models.slices import LayerContext, TensorPart


class ExpertsBesideMlp(nn.Module):
    """norm_1(mlp(x)) + norm_2(experts(stream)), each of its complete sum over the ranks. The experts read the stream by their own
    norm, and their router reads it normed without weights."""

    def __init__(self, name: str, mlp: Mlp, moe: SparseMoe, model: Gemma4) -> None:
        super().__init__()
        behind_mlp, _, behind_experts = BESIDE_EXPERTS
        self.mlp, self.moe, self.group, self.eps = mlp, moe, model.context.group, model.shape.rms_norm_eps
        self.behind_mlp, self.behind_experts = (
            model.hidden_norm(f"{name}.{behind_mlp}"),
            model.hidden_norm(f"{name}.{behind_experts}"),
        )

    def forward(self, x: Activation, stream: Tensor, batch: Batch) -> Tensor:
        """x: the stream [T, hidden] as the MLP reads it. Returns [T, hidden]."""
        dense = self.behind_mlp(self.group.all_reduce(self.mlp.partial_sum(x)))
        normed = F.rms_norm(stream.float(), stream.shape[-1:], eps=self.eps).to(stream.dtype)
        routed = self.behind_experts(self.group.all_reduce(self.moe.rank_sum(normed, batch)))
        assert isinstance(dense, Tensor)
        assert isinstance(routed, Tensor)
        return dense + routed


class Gemma4Layer(LlamaLayer):
    """Attention and MLP with norms around them, then what the layer makes of its inputs, and the factor. index: of the layer among
    those of its stage."""

    def __init__(self, name: str, layer: int, model: Gemma4) -> None:
        super().__init__(name, model.attention(f"{name}.self_attn", layer), model.mlp(name), model)
        shape, context = model.shape, model.context
        self.layer_scalar = TensorPart(f"{name}.layer_scalar", context=context)
        self.index = layer - model.layer_range.start
        experts = shape.experts_in(layer)
        self.beside: ExpertsBesideMlp | None = None
        if experts is not None:
            assert isinstance(self.mlp, Mlp)
            self.beside = ExpertsBesideMlp(name, self.mlp, SparseMoe(name, experts, layer, context=context), model)
        self.layer_input: LayerInputBlock | None = None
        if shape.layer_inputs is not None:
            norm = model.hidden_norm(f"{name}.post_per_layer_input_norm")
            self.layer_input = LayerInputBlock(name, norm, context=context)

    def forward(
        self, x: NormOutput, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, next_norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:
        x, residual = self.self_attn(x, cos_sin, batch, cache, residual, self._norms.before_mlp)
        if self.beside is None:
            _, residual = self.mlp(x, residual, None, batch)
        else:
            assert self._norms.behind_mlp is not None
            assert not isinstance(x, NormAndQuantized)
            residual = residual + self._norms.behind_mlp(self.beside(x, residual, batch))
        if self.layer_input is not None:
            assert batch.layer_inputs is not None
            residual = self.layer_input(residual, batch.layer_inputs[:, self.index])
        residual = residual * self.layer_scalar.weight
        return residual if next_norm is None else next_norm(residual), residual


class Gemma4(Llama):
    """The first stage makes the inputs of all layers; each stage gives those of the layers behind it to the next one, beside the
    residual stream."""

    def __init__(self, shape: ModelShape, layers: range, context: LayerContext) -> None:
        super().__init__(shape, layers, context)
        inputs, self.behind = shape.layer_inputs, shape.num_layers - layers.stop
        self.width = 0 if inputs is None else inputs.width
        self.layer_inputs: LayerInputEmbedding | None = None
        if inputs is not None and layers.start == 0:
            self.layer_inputs = LayerInputEmbedding(shape, context=self.context)

    def layer(self, index: int) -> Gemma4Layer:
        return Gemma4Layer(f"model.layers.{index}", index, self)

    @property
    def stream_width(self) -> int:
        return self.shape.hidden_size + (len(self.layer_range) + self.behind) * self.width

    @property
    def output_width(self) -> int:
        return self.shape.hidden_size + self.behind * self.width

    def embedded(self, batch: Batch, vectors: Tensor) -> None:
        if self.layer_inputs is not None:
            batch.layer_inputs = self.layer_inputs(batch.token_ids, vectors, batch.last)

    def hidden_states(self, batch: Batch, caches: Sequence[LayerCache], hidden: Tensor | None = None) -> Tensor:
        """As `Decoder`; hidden, and what goes to the next stage: the residual stream, and behind it the inputs of the layers that
        are left."""
        if hidden is not None and self.width:
            inputs = hidden[:, self.shape.hidden_size :]
            batch.layer_inputs = inputs.reshape(len(hidden), inputs.shape[1] // self.width, self.width)
            hidden = hidden[:, : self.shape.hidden_size].contiguous()
        states = super().hidden_states(batch, caches, hidden)
        if not self.behind or batch.layer_inputs is None:
            return states
        left = batch.layer_inputs[:, len(self.layer_range) :]
        return torch.cat([states, left.flatten(1)], dim=1)
