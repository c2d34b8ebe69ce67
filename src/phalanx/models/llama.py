# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3 and 3.1 (arXiv 2302.13971, 2407.21783): the decoder that the other families vary.

A model holds one pipeline stage of one tensor-parallel rank. It works on the residual stream: each block hands on
(normed, residual), because the norm that follows a block is fused to the all-reduce that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.model import ModelShape
from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.embedding import ParallelHead, VocabParallelEmbedding
from phalanx.models.layers.fp8 import Activation
from phalanx.models.layers.kv_store import KvStore
from phalanx.models.layers.linear import QkvParallelLinear, RowParallelLinear
from phalanx.models.layers.mlp import GatedMlp
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import Rotary
from phalanx.models.slices import Seat
from phalanx.plan.memory import KvSpec

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of the batch's positions, [T, head_dim / 2] fp32 each."""


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions over a paged cache; the heads are split over the ranks."""

    def __init__(self, name: str, shape: ModelShape, *, window: int | None, seat: Seat) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.qkv = QkvParallelLinear(name, shape.hidden_size, heads, kv_heads, head_dim, bias=shape.qkv_bias, seat=seat)
        self.q_heads, self.kv_heads, self.head_dim = len(self.qkv.heads.q), len(self.qkv.heads.kv), head_dim
        self.window, self.scale = window, head_dim**-0.5
        self.store = KvStore(name, seat=seat)
        self.prepares = type(self).prepare is not Attention.prepare
        mine = range(self.qkv.heads.q.start * head_dim, self.qkv.heads.q.stop * head_dim)
        self.out = RowParallelLinear(
            f"{name}.o_proj", heads * head_dim, shape.hidden_size, local=mine, bias=shape.output_bias, seat=seat
        )

    def forward(
        self, x: Activation, turns: Turns, batch: Batch, cache: KvCache, residual: Tensor, norm: RmsNorm
    ) -> tuple[Activation, Tensor]:
        """x and residual [T, hidden] -> (norm(residual + attention(x)), residual + attention(x))."""
        query = self._queries(x, turns, batch, cache)
        scales = self.store.read_scales
        seen = batch.attention.forward(query, cache, window=self.window, scale=self.scale, kv_scales=scales)
        done: tuple[Activation, Tensor] = self.out(seen.reshape(x.shape[0], -1), residual, norm)
        return done

    def _queries(self, x: Activation, turns: Turns, batch: Batch, cache: KvCache) -> Tensor:
        """Of x [T, hidden], turned, [T, q_heads, head_dim]; keys and values go into the cache."""
        if not self.prepares:
            query = self.store.of_one_token(x, self.qkv, turns, cache, batch.kv_slots)
            if query is not None:
                return query
        heads = self.qkv(x, may_stay_unscaled=not self.prepares).view(x.shape[0], -1, self.head_dim)
        out: Tensor = self.store(self.prepare(heads) if self.prepares else heads, turns, self.q_heads, cache, batch.kv_slots)
        return out

    def prepare(self, heads: Tensor) -> Tensor:
        """What families do to heads [T, q_heads + 2 * kv_heads, head_dim] before queries and keys are turned by their positions."""
        return heads


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each with its norm before it and its residual around it."""

    def __init__(self, name: str, shape: ModelShape, attention: Attention, *, seat: Seat) -> None:
        super().__init__()
        self.norm = RmsNorm(f"{name}.input_layernorm", shape.hidden_size, shape.rms_norm_eps, seat=seat)
        self.attention = attention
        self.mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", shape.hidden_size, shape.rms_norm_eps, seat=seat)
        self.mlp = GatedMlp(f"{name}.mlp", shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias, seat=seat)
        self.norm.feed(self.attention.qkv.fp8)
        self.mlp_norm.feed(self.mlp.gate_up.fp8)

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of one kind ask for the same kernels."""
        held = [*self.named_parameters(), *self.named_buffers()]
        return type(self.attention), self.attention.window, *((name, each.dtype, each.shape) for name, each in held)

    def forward(
        self, x: Activation, turns: Turns, batch: Batch, cache: KvCache, residual: Tensor, next_norm: RmsNorm | None
    ) -> tuple[Activation, Tensor]:
        """x: norm(residual) [T, hidden]. Returns (next_norm(new residual), new residual); without next_norm the latter twice."""
        x, residual = self.attention(x, turns, batch, cache, residual, self.mlp_norm)
        done: tuple[Activation, Tensor] = self.mlp(x, residual, next_norm)
        return done


class Llama(nn.Module):
    """The stage that holds `layers` of a model: with the embedding if it is the first, with the head if it is the last."""

    def __init__(self, shape: ModelShape, *, layers: range, seat: Seat) -> None:
        super().__init__()
        self.shape, self.held, self.seat = shape, layers, seat
        vocabulary = (shape.vocab_size, shape.hidden_size)
        first, last = layers.start == 0, layers.stop == shape.num_layers
        self.embedding = VocabParallelEmbedding("model.embed_tokens", *vocabulary, seat=seat) if first else None
        self.layers = [
            DecoderLayer(f"model.layers.{i}", shape, self.attention(f"model.layers.{i}.self_attn", i), seat=seat) for i in layers
        ]
        self.registered = nn.ModuleList(self.layers)  # torch finds weights in a ModuleList, mypy finds types in a list
        self.norm = RmsNorm("model.norm", shape.hidden_size, shape.rms_norm_eps, seat=seat) if last else None
        name = "model.embed_tokens" if shape.tie_word_embeddings else "lm_head"
        shared = self.embedding if shape.tie_word_embeddings else None
        self.head = ParallelHead(name, *vocabulary, tied=shared, seat=seat) if last else None
        self.rotary = Rotary(shape.rope, shape.head_dim, seat.device)

    def attention(self, name: str, layer: int) -> Attention:
        """The attention of layer `layer`: what families vary."""
        return Attention(name, self.shape, window=None, seat=self.seat)

    def forward(self, batch: Batch, caches: Sequence[KvCache], hidden: Tensor | None = None) -> Tensor:
        """As `stream`, and on the last stage the logits [S, vocab_size] fp32 of batch.logit_rows, on each of its ranks."""
        x = self.stream(batch, caches, hidden)
        out: Tensor = x if self.head is None else self.head(x, batch.logit_rows)
        return out

    def stream(self, batch: Batch, caches: Sequence[KvCache], hidden: Tensor | None = None) -> Tensor:
        """batch: T tokens with `batch.attention` planned; caches: one per held layer; hidden: the residual stream [T, hidden_size]
        from the stage before, None on the first.

        Returns the residual stream [T, hidden_size], on the last stage normed, for its head.
        """
        norms = [layer.norm for layer in self.layers]
        if self.embedding is not None:
            x, residual = self.embedding(batch.token_ids, norms[0], batch.last)
        else:
            x, residual = norms[0](hidden), hidden
        turns = self.rotary(batch.positions)
        for layer, cache, next_norm in zip(self.layers, caches, [*norms[1:], self.norm], strict=True):
            x, residual = layer(x, turns, batch, cache, residual, next_norm)
        out: Tensor = x
        return out

    @contextmanager
    def distinct_layers(self) -> Iterator[list[int]]:
        """Inside, the stage has no layers but the first of each kind and its last, which hands on to no other. Gives their indices
        among those held."""
        whole, first = self.layers, dict[Any, int]()
        for index, layer in enumerate(whole):
            first.setdefault(layer.kind, index)
        kept = sorted({*first.values(), len(whole) - 1})
        self.layers = [whole[index] for index in kept]
        try:
            yield kept
        finally:
            self.layers = whole

    def kv_specs(self) -> list[KvSpec]:
        """What each held layer keeps per token on this rank."""
        size = torch.empty((), dtype=self.seat.cache_dtype, device="cpu").element_size()
        attentions = [layer.attention for layer in self.layers]
        return [KvSpec(each.kv_heads, each.head_dim, size, each.window) for each in attentions]
