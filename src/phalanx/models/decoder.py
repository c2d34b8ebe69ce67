# SPDX-License-Identifier: Apache-2.0
"""`Decoder`: one pipeline stage of one tensor-parallel rank of a model, which is what runners, loaders and caches know of a family.

The residual stream runs through the layers: each takes and returns (x, residual), where x is what the layer's `input_norm` makes of
the residual stream. That norm is computed by the layer before, which fuses it to the all-reduce that ends its block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.model import LayerRotary, ModelShape
from phalanx.layout.cache import Cache, group_windows
from phalanx.layout.families import layer_cache, layer_tensors, model_cache, outer_tensors
from phalanx.layout.rank_progress import BEHIND_LAYERS, RankProgress
from phalanx.models.batch import Batch, DpTokens, InnerStates
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import NormOutput
from phalanx.models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.layers.norm import LayerNorm, RmsNorm
from phalanx.models.layers.rope import CosSin, Rotary
from phalanx.models.slices import LayerContext


class DecoderLayer(nn.Module, ABC):
    """One layer: a family chooses its blocks, its norms and their order. rotary: of its attention, which the decoder sets."""

    rotary: LayerRotary

    @property
    @abstractmethod
    def input_norm(self) -> RmsNorm | None:
        """What x is of the residual stream; None: the stream itself."""

    @abstractmethod
    def forward(
        self, x: NormOutput, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, next_norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:
        """x: input_norm(residual) [T, hidden]. Returns (next_norm(new residual), new residual); without next_norm the latter twice.

        The residual is a tensor, or a `ShardedResidual`, which `comm.sequence_parallel.unshard` completes."""

    @cached_property
    def moe(self) -> SparseMoe | None:
        """The layer's block with experts, if it has one."""
        return next((module for module in self.modules() if isinstance(module, SparseMoe)), None)

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind that keep the same between steps run the same kernels."""
        types, tensors = (type(module) for module in self.modules()), [*self.named_parameters(), *self.named_buffers()]
        return *types, *((name, each.dtype, each.shape) for name, each in tensors)


class Decoder(nn.Module, ABC):
    """The stage that holds `layers` of a model: with the embedding if it is the first, with the LM head if it is the last. The last
    one may have the embedding, too (`LayerContext.last_embeds`).

    layer_range: the numbers of its layers in the model.
    """

    def __init__(self, shape: ModelShape, layers: range, context: LayerContext) -> None:
        super().__init__()
        tensors = chain(outer_tensors(shape), *(layer_tensors(shape, layer) for layer in layers))
        context = replace(context, declared={tensor.name: tensor for tensor in tensors})
        self.shape, self.layer_range, self.context = shape, layers, context
        self.progress = RankProgress()
        """Is told the layer."""
        vocabulary = (shape.vocab_size, shape.hidden_size)
        first, last = layers.start == 0, layers.stop == shape.num_layers
        factors = shape.multipliers
        self.embed_tokens = None
        if first or (last and context.last_embeds):
            self.embed_tokens = VocabParallelEmbedding(
                "model.embed_tokens", *vocabulary, multiplier=factors.embedding, context=context
            )  # fmt: skip
        self.layers = [self.layer(index) for index in layers]
        for index, layer in zip(layers, self.layers, strict=True):
            layer.rotary = shape.rotary_in(index)
        self.rotary_embs = {
            rotary: Rotary(*rotary, context.device) for rotary in dict.fromkeys(layer.rotary for layer in self.layers)
        }  # fmt: skip
        # torch finds weights in a ModuleList, mypy finds types in a list
        self.registered = nn.ModuleList([*self.layers, *self.rotary_embs.values()])
        self.norm = self.hidden_norm("model.norm") if last else None
        name = "model.embed_tokens" if shape.tie_word_embeddings else "lm_head"
        tied = self.embed_tokens if shape.tie_word_embeddings else None
        self.lm_head = None
        if last:
            quantized = name == "lm_head" and context.quantization is not None and context.quantization.head is not None
            self.lm_head = ParallelLMHead(
                name, *vocabulary, tied=tied, multiplier=factors.logits, cap=factors.logits_cap, quantized=quantized,
                context=context,
            )  # fmt: skip

    def hidden_norm(self, name: str) -> RmsNorm:
        """The norm of this name, of hidden states."""
        shape = self.shape
        kind = LayerNorm if shape.layer_norm else RmsNorm
        return kind(name, shape.hidden_size, shape.rms_norm_eps, offset=shape.norm_offset, context=self.context)

    @abstractmethod
    def layer(self, index: int) -> DecoderLayer:
        """Layer `index` of the model, of `self.shape`, for `self.context`."""

    @property
    def stream_width(self) -> int:
        """Columns of what the stage before gives to this one: those of the residual stream, and of what a family has beside it."""
        return self.shape.hidden_size

    @property
    def output_width(self) -> int:
        """Columns of what `hidden_states` gives: on all stages but the last, those of the next one's `stream_width`."""
        return self.shape.hidden_size

    def embedded(self, batch: Batch, vectors: Tensor) -> None:
        """What a family makes of the embedded tokens [T, hidden_size], on the first stage before its layers."""

    @property
    def moe_layers(self) -> dict[int, SparseMoe]:
        """The blocks with experts of this stage, by the numbers of their layers in the model."""
        return {number: layer.moe for number, layer in zip(self.layer_range, self.layers, strict=True) if layer.moe is not None}

    def forward(self, batch: Batch, caches: Sequence[LayerCache], hidden: Tensor | None = None) -> Tensor:
        """As `hidden_states`, and on the last stage the logits [S, vocab_size] fp32 of batch.logit_rows, on each of its ranks."""
        x = self.hidden_states(batch, caches, hidden)
        output: Tensor = x if self.lm_head is None else self.lm_head(x, batch.logit_rows)
        return output

    def hidden_states(self, batch: Batch, caches: Sequence[LayerCache], hidden: Tensor | None = None) -> Tensor:
        """batch: T tokens with `batch.attention` planned; caches: one per layer of this stage; hidden: the residual stream
        [T, hidden_size] from the stage before, None on the first.

        Returns the residual stream [T, hidden_size], on the last stage normalized for the LM head. It is also left in `batch.inner`
        before the layers that are wanted there.
        """
        norms = [layer.input_norm for layer in self.layers]
        if hidden is None:
            assert self.embed_tokens is not None, "the first stage has the embedding"
            x, residual = self.embed_tokens(batch.token_ids, norms[0], batch.last)
            self.embedded(batch, residual)
        else:
            x, residual = hidden if norms[0] is None else norms[0](hidden), hidden
        cos_sin = {rotary: module(batch.positions) for rotary, module in self.rotary_embs.items()}
        for number, (layer, cache, next_norm) in enumerate(
            zip(self.layers, caches, [*norms[1:], self.norm], strict=True), start=self.layer_range.start
        ):  # fmt: skip
            self.progress.enter_layer(number)
            if batch.inner is not None:
                self._keep(batch.inner, number, residual)
            x, residual = layer(x, cos_sin[layer.rotary], batch, cache, residual, next_norm)
        if batch.inner is not None:
            self._keep(batch.inner, self.layer_range.stop, residual)
        self.progress.layer = BEHIND_LAYERS
        output: Tensor = x
        return output

    def _keep(self, inner: InnerStates, layer: int, residual: Tensor) -> None:
        """Leave the residual stream before a layer where it is wanted. Collective where it is sharded."""
        from phalanx.comm.sequence_parallel import unshard

        if layer in inner.layers:
            inner.of(layer).copy_(unshard(residual, self.context.group))

    def serve_experts(self, dp_tokens: DpTokens) -> None:
        """A step that has tokens on other dp indices only: their experts on this rank are computed, and nothing else."""
        nothing = torch.empty((0, self.shape.hidden_size), dtype=self.context.dtype, device=self.context.device)
        for number, layer in enumerate(self.layers, start=self.layer_range.start):
            self.progress.enter_layer(number)
            if layer.moe is not None:
                layer.moe.exchanged(nothing, dp_tokens)

    @contextmanager
    def distinct_layers(self) -> Iterator[list[int]]:
        """Inside, the stage has only the first of its layers of each kind and its last, which is not followed by a layer. Yields
        their indices among the stage's layers."""
        layers, first = self.layers, dict[Any, int]()
        for index, (layer, cache) in enumerate(zip(layers, self.declared_caches(), strict=True)):
            first.setdefault((layer.kind, cache), index)
        kept = sorted({*first.values(), len(layers) - 1})
        self.layers = [layers[index] for index in kept]
        try:
            yield kept
        finally:
            self.layers = layers

    @property
    def cache_groups(self) -> int:
        """Of the whole model: a stage may lack layers of some."""
        return len(group_windows(model_cache(self.shape)))

    def declared_caches(self) -> list[Cache]:
        """What each layer of this stage keeps between steps, on this rank."""
        context = self.context
        sizes = context.group.size, context.dcp.size
        return [layer_cache(self.shape, layer, context.kv_dtype, *sizes) for layer in self.layer_range]
