# SPDX-License-Identifier: Apache-2.0
"""The model of `layout_mosaic`, and its linear method."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import DecoderLayer
from phalanx.models.layers.grouped_query_attention import GroupedQueryAttention
from phalanx.models.layers.linear_methods.method import GroupedWeight, LinearMethod, weight_slice
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.llama import Llama
from phalanx.models.registry import MODELS
from phalanx.models.slices import Scale
from tests.support.layout_mosaic import MOSAIC, POST_NORM, STATE

DECAY = 0.9


class LinearAttention(GroupedQueryAttention):
    """Linear attention (arXiv 2006.16236) with a decay, and the weights of grouped-query attention. A state is what remains of all
    keys and values of a request: S = decay * S + key^T value, and a query reads query S."""

    def forward(self, x, cos_sin, batch, cache, residual, norm):
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        return self.o_proj(mixed(heads, self.q_heads, batch, cache).reshape(x.shape[0], -1), residual, norm)


def mixed(heads: Tensor, q_heads: int, batch: Batch, cache: LayerCache) -> Tensor:
    """heads [T, q_heads + 2 * kv_heads, dim] -> [T, q_heads, dim]; each row goes on from the state at its slot."""
    kv_heads = (heads.shape[1] - q_heads) // 2
    query, key, value = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    query = query.unflatten(1, (kv_heads, -1))
    outputs = torch.zeros_like(query)
    for row, slot in enumerate(batch.table_rows.tolist()):
        begin, end = batch.query_starts_cpu[row : row + 2]
        state = cache["state"][slot]
        if batch.kv_lengths_cpu[row] == end - begin:
            state.zero_()
        for token in range(begin, end):
            state.copy_(DECAY * state + key[token, :, :, None] * value[token, :, None, :])
            outputs[token] = query[token] @ state / heads.shape[2]
    return outputs.flatten(1, 2)


class Int8Weight(LinearMethod):
    """weight [out, in] int8, weight_scale [out] fp32. No fusion is offered."""

    def __init__(self, parts, context):
        super().__init__(parts, context)
        self.weight = context.weight(self.out_features, self.in_features, dtype=torch.int8)
        self.weight_scale = context.weight(self.out_features, dtype=torch.float32)

    def multiply(self, x, bias=None):
        return F.linear(x, self.dequantized(), bias)

    plain_multiply = multiply

    def dequantized(self):
        return (self.weight.float() * self.weight_scale[:, None]).to(self.dtype)

    def reorder_rows(self, rows):
        self.weight.copy_(self.weight[rows])
        self.weight_scale.copy_(self.weight_scale[rows])

    def grouped(self):
        return GroupedWeight(self.dequantized())

    def slices(self):
        for part, here in self._placed():
            yield replace(weight_slice(part, self.weight[here]), dtypes=("I8",))

    def scales(self):
        for part, here in self._placed():

            def store(scale, part=part, here=here):
                self.weight_scale[here].copy_(scale[part.rows.start : part.rows.stop])

            yield Scale(f"{part.name}.weight_scale", ((part.shape[0],),), store, inputs=part.shape[1], largest=127.0)


class PostNormLayer(DecoderLayer):
    """residual + norm(attention(residual)), and the same of the feed-forward block, as OLMo 2 (arXiv 2501.00656)."""

    def __init__(self, name, attention, feed_forward, model):
        super().__init__()
        self.self_attn, self.mlp = attention, feed_forward
        hidden, eps, context = model.shape.hidden_size, model.shape.rms_norm_eps, model.context
        self.post_attention_layernorm = RmsNorm(f"{name}.post_attention_layernorm", hidden, eps, context=context)
        self.post_feedforward_layernorm = RmsNorm(f"{name}.post_feedforward_layernorm", hidden, eps, context=context)

    @property
    def input_norm(self):
        return None

    def forward(self, x, cos_sin, batch, cache, residual, next_norm):
        output, _ = self.self_attn(residual, cos_sin, batch, cache, torch.zeros_like(residual), None)
        residual = residual + self.post_attention_layernorm(output)
        output, _ = self.mlp(residual, torch.zeros_like(residual), None, batch)
        residual = residual + self.post_feedforward_layernorm(output)
        return (residual if next_norm is None else next_norm(residual)), residual


class Mosaic(Llama):
    """A layer of each kind."""

    def layer(self, index):
        if index != POST_NORM:
            return super().layer(index)
        name = f"model.layers.{index}"
        return PostNormLayer(name, self.attention(f"{name}.self_attn", index), self.feed_forward(name, index), self)

    def attention(self, name, layer):
        return (LinearAttention if layer == STATE else GroupedQueryAttention)(name, self.shape, layer, context=self.context)


MODELS[MOSAIC] = Mosaic
