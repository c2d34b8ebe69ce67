# SPDX-License-Identifier: Apache-2.0
"""Embeddings by layer (Gemma 4): what each layer gets of a token beside its residual stream, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.models.layers.embedding import VocabParallelEmbedding
from phalanx.models.layers.linear import ColumnParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext


class LayerInputEmbedding(nn.Module):
    """(norm(projection of the embedding) + a vector of a second table) / sqrt(2), for each layer.

    The table's rows are split over the ranks, as the embedding's; each rank has all of the projection.
    """

    def __init__(self, shape: ModelShape, *, context: LayerContext) -> None:
        super().__init__()
        assert shape.layer_inputs is not None
        (self.width, vocab_size), self.scale = shape.layer_inputs, shape.hidden_size**-0.5
        columns = shape.num_layers * self.width
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            "model.embed_tokens_per_layer", vocab_size, columns, multiplier=self.width**0.5, context=context
        )  # fmt: skip
        plain = replace(context, adapters=None)  # which have factors for modules of layers alone
        self.per_layer_model_projection = ColumnParallelLinear.of("model.per_layer_model_projection", context=plain)
        self.per_layer_projection_norm = RmsNorm(
            "model.per_layer_projection_norm", self.width, shape.rms_norm_eps, context=context
        )  # fmt: skip

    def forward(self, token_ids: Tensor, embedded: Tensor, last: tuple[Tensor, Tensor] | None) -> Tensor:
        """token_ids [T] int64, embedded [T, hidden] of the same; last: see `Batch.last`. Returns [T, layers, width]. Collective."""
        _, vectors = self.embed_tokens_per_layer(token_ids, None, last)
        projected: Tensor = self.per_layer_model_projection(embedded).mul_(self.scale).view(len(token_ids), -1, self.width)
        normed = self.per_layer_projection_norm(projected)
        assert isinstance(normed, Tensor)
        return normed.add_(vectors.view_as(projected)).mul_(0.5**0.5)  # in place, as these are the widest tensors of a step


class LayerInputBlock(nn.Module):
    """stream + norm(projection(gelu(gate(stream)) * input)); complete on each rank, as it is narrow."""

    def __init__(self, name: str, norm: RmsNorm, *, context: LayerContext) -> None:
        """name: the checkpoint's of the layer. norm: post_per_layer_input_norm."""
        super().__init__()
        self.per_layer_input_gate = ColumnParallelLinear.of(f"{name}.per_layer_input_gate", context=context)
        self.per_layer_projection = ColumnParallelLinear.of(f"{name}.per_layer_projection", context=context)
        self.norm = norm

    def forward(self, stream: Tensor, layer_input: Tensor) -> Tensor:
        """stream [T, hidden], layer_input [T, width] -> [T, hidden]."""
        gated = F.gelu(self.per_layer_input_gate(stream), approximate="tanh") * layer_input
        added = self.norm(self.per_layer_projection(gated))
        assert isinstance(added, Tensor)
        return stream + added
