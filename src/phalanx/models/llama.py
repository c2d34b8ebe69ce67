# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3 and 3.1 (arXiv 2302.13971, 2407.21783): the decoder that the other families vary.

A model holds one pipeline stage of one tensor-parallel rank. Each block takes and returns (x, residual), where x is the normalized
residual stream: the norm that follows a block is fused to the all-reduce that ends the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.kernels.reference import HeadNorm
from phalanx.models.batch import Batch, DpTokens, KvCache
from phalanx.models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.kv_store import KvStore
from phalanx.models.layers.linear import QkvParallelLinear, RowParallelLinear
from phalanx.models.layers.mlp import GatedMlp
from phalanx.models.layers.moe import ExpertNames, SparseMoe
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import Rotary
from phalanx.models.slices import LayerContext
from phalanx.plan.memory import KvFormat, KvSpec

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of the batch's positions, [T, rotary_dim / 2] fp32 each."""


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions over a paged cache; the heads are split over the ranks."""

    def __init__(self, name: str, shape: ModelShape, *, window: int | None, context: LayerContext) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.qkv_proj = QkvParallelLinear(
            name, shape.hidden_size, heads, kv_heads, head_dim, bias=shape.qkv_bias, context=context
        )  # fmt: skip
        self.q_heads, self.kv_heads, self.head_dim = len(self.qkv_proj.heads.q), len(self.qkv_proj.heads.kv), head_dim
        self.window, self.scale = window, head_dim**-0.5
        self.kv_store = KvStore(name, context=context)
        local = range(self.qkv_proj.heads.q.start * head_dim, self.qkv_proj.heads.q.stop * head_dim)
        self.o_proj = RowParallelLinear(
            f"{name}.o_proj", heads * head_dim, shape.hidden_size, local=local, bias=shape.output_bias, context=context
        )

    def forward(
        self, x: Activation, cos_sin: CosSin, batch: Batch, cache: KvCache, residual: Tensor, norm: RmsNorm
    ) -> tuple[Activation, Tensor]:
        """x and residual [T, hidden] -> (norm(residual + attention(x)), residual + attention(x))."""
        query = self._rotated_query(x, cos_sin, batch, cache)
        scales = self.kv_store.read_scales
        context = batch.attention.forward(
            query, cache, window=self.window, scale=self.scale, kv_scales=scales, sinks=self.head_sinks()
        )
        output: tuple[Activation, Tensor] = self.o_proj(context.reshape(x.shape[0], -1), residual, norm)
        return output

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_consumer(self.qkv_proj.fp8)

    def kv_spec(self, kv: KvFormat) -> KvSpec:
        """What the layer stores per token on this rank."""
        return KvSpec(self.kv_heads, self.head_dim, kv.itemsize, self.window, scale_bytes=kv.scale_bytes)

    def head_sinks(self) -> Tensor | None:
        """The sinks of this rank's heads [q_heads], in families that have them."""
        return None

    def _rotated_query(self, x: Activation, cos_sin: CosSin, batch: Batch, cache: KvCache) -> Tensor:
        """x [T, hidden] -> the rotated queries [T, q_heads, head_dim]; keys and values are stored in the cache."""
        head_norm = self.head_norm
        if head_norm is None:
            query = self.kv_store.fused_with_gemv(x, self.qkv_proj, cos_sin, cache, batch.kv_slots)
            if query is not None:
                return query
        heads = self.qkv_proj(x, may_stay_unscaled=True).view(x.shape[0], -1, self.head_dim)
        rotated: Tensor = self.kv_store(heads, cos_sin, self.q_heads, cache, batch.kv_slots, head_norm)
        return rotated

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of queries and keys before rope, in families that have one."""
        return None


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each with its norm before it and its residual around it."""

    def __init__(
        self, name: str, shape: ModelShape, attention: Attention, feed_forward: GatedMlp | SparseMoe, *, context: LayerContext
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RmsNorm(f"{name}.input_layernorm", hidden, eps, context=context)
        self.self_attn = attention
        self.post_attention_layernorm = RmsNorm(f"{name}.post_attention_layernorm", hidden, eps, context=context)
        self.mlp = feed_forward
        self.self_attn.set_input_norm(self.input_layernorm)
        self.mlp.set_input_norm(self.post_attention_layernorm)

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind run the same kernels."""
        tensors = [*self.named_parameters(), *self.named_buffers()]
        kinds = type(self.self_attn), self.self_attn.window, type(self.mlp)
        return *kinds, *((name, each.dtype, each.shape) for name, each in tensors)

    def forward(
        self, x: Activation, cos_sin: CosSin, batch: Batch, cache: KvCache, residual: Tensor, next_norm: RmsNorm | None
    ) -> tuple[Activation, Tensor]:
        """x: norm(residual) [T, hidden]. Returns (next_norm(new residual), new residual); without next_norm the latter twice."""
        x, residual = self.self_attn(x, cos_sin, batch, cache, residual, self.post_attention_layernorm)
        output: tuple[Activation, Tensor]
        if isinstance(self.mlp, SparseMoe):
            output = self.mlp(x, residual, next_norm, batch.kv_slots, batch.dp_tokens)
        else:
            output = self.mlp(x, residual, next_norm)
        return output


class Llama(nn.Module):
    """The stage that holds `layers` of a model: with the embedding if it is the first, with the LM head if it is the last."""

    expert_names = ExpertNames("mlp")
    """How checkpoints of a family with experts name them."""

    def __init__(self, shape: ModelShape, *, layers: range, context: LayerContext) -> None:
        super().__init__()
        self.shape, self.layer_range, self.context = shape, layers, context
        vocabulary = (shape.vocab_size, shape.hidden_size)
        first, last = layers.start == 0, layers.stop == shape.num_layers
        self.embed_tokens = VocabParallelEmbedding("model.embed_tokens", *vocabulary, context=context) if first else None
        self.layers = [
            DecoderLayer(
                f"model.layers.{i}",
                shape,
                self.attention(f"model.layers.{i}.self_attn", i),
                self.feed_forward(f"model.layers.{i}", i),
                context=context,
            )
            for i in layers
        ]
        self.registered = nn.ModuleList(self.layers)  # torch finds weights in a ModuleList, mypy finds types in a list
        self.norm = RmsNorm("model.norm", shape.hidden_size, shape.rms_norm_eps, context=context) if last else None
        name = "model.embed_tokens" if shape.tie_word_embeddings else "lm_head"
        tied = self.embed_tokens if shape.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(name, *vocabulary, tied=tied, context=context) if last else None
        self.rotary_emb = Rotary(shape.rope, shape.rotary_dim, context.device)

    def attention(self, name: str, layer: int) -> Attention:
        """The attention of layer `layer`, which families vary."""
        return Attention(name, self.shape, window=None, context=self.context)

    def feed_forward(self, prefix: str, layer: int) -> GatedMlp | SparseMoe:
        """The feed-forward block of layer `layer`: experts where the shape has them."""
        shape, experts = self.shape, self.shape.experts_in(layer)
        if experts is not None:
            return SparseMoe(prefix, self.expert_names, shape.hidden_size, experts, layer, context=self.context)
        return GatedMlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias, context=self.context)

    @property
    def moe_layers(self) -> dict[int, SparseMoe]:
        """The blocks with experts of this stage, by the numbers of their layers in the model."""
        blocks = zip(self.layer_range, self.layers, strict=True)
        return {number: layer.mlp for number, layer in blocks if isinstance(layer.mlp, SparseMoe)}

    def forward(self, batch: Batch, caches: Sequence[KvCache], hidden: Tensor | None = None) -> Tensor:
        """As `hidden_states`, and on the last stage the logits [S, vocab_size] fp32 of batch.logit_rows, on each of its ranks."""
        x = self.hidden_states(batch, caches, hidden)
        output: Tensor = x if self.lm_head is None else self.lm_head(x, batch.logit_rows)
        return output

    def hidden_states(self, batch: Batch, caches: Sequence[KvCache], hidden: Tensor | None = None) -> Tensor:
        """batch: T tokens with `batch.attention` planned; caches: one per layer of this stage; hidden: the residual stream
        [T, hidden_size] from the stage before, None on the first.

        Returns the residual stream [T, hidden_size], on the last stage normalized for the LM head.
        """
        norms = [layer.input_layernorm for layer in self.layers]
        if self.embed_tokens is not None:
            x, residual = self.embed_tokens(batch.token_ids, norms[0], batch.last)
        else:
            x, residual = norms[0](hidden), hidden
        cos_sin = self.rotary_emb(batch.positions)
        for layer, cache, next_norm in zip(self.layers, caches, [*norms[1:], self.norm], strict=True):
            x, residual = layer(x, cos_sin, batch, cache, residual, next_norm)
        output: Tensor = x
        return output

    def serve_experts(self, dp_tokens: DpTokens) -> None:
        """A step that has tokens on other dp indices only: their experts on this rank are computed, and nothing else."""
        nothing = torch.empty((0, self.shape.hidden_size), dtype=self.context.dtype, device=self.context.device)
        for layer in self.layers:
            if isinstance(layer.mlp, SparseMoe):
                layer.mlp.exchanged(nothing, dp_tokens)

    @contextmanager
    def distinct_layers(self) -> Iterator[list[int]]:
        """Inside, the stage has only the first of its layers of each kind and its last, which is not followed by a layer. Yields
        their indices among the stage's layers."""
        layers, first = self.layers, dict[Any, int]()
        for index, layer in enumerate(layers):
            first.setdefault(layer.kind, index)
        kept = sorted({*first.values(), len(layers) - 1})
        self.layers = [layers[index] for index in kept]
        try:
            yield kept
        finally:
            self.layers = layers

    def kv_specs(self) -> list[KvSpec]:
        """What each layer of this stage stores per token on this rank."""
        return [layer.self_attn.kv_spec(self.context.kv_format) for layer in self.layers]
