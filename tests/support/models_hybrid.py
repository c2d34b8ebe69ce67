# SPDX-License-Identifier: Apache-2.0
"""The model of `layout_hybrid`: its odd layers are linear attention (arXiv 2006.16236) with a decay. A state is what remains of all
keys and values of a request: S = decay * S + key^T value, and a query reads query S."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.grouped_query_attention import GroupedQueryAttention
from phalanx.models.llama import Llama
from phalanx.models.registry import MODELS
from tests.support.layout_hybrid import HYBRID

DECAY = 0.9


class LinearAttention(GroupedQueryAttention):
    """With the weights of grouped-query attention."""

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


class Hybrid(Llama):
    """Grouped-query attention in even layers, linear attention in odd ones."""

    def attention(self, name, layer):
        return (LinearAttention if layer % 2 else GroupedQueryAttention)(name, self.shape, layer, context=self.context)


MODELS[HYBRID] = Hybrid
