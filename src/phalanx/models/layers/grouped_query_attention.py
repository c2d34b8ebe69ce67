# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention (arXiv 2305.13245) with rotary positions, over a paged cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import kernels
from phalanx.config.model import ModelShape
from phalanx.kernels.gated_delta.dispatch import sigmoid_mul
from phalanx.kernels.reference import HeadNorm
from phalanx.layout import shard
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.activation import Activation, NormOutput
from phalanx.models.layers.kv_store import KvStore
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.layers.rope import CosSin, rotary_order
from phalanx.models.slices import LayerContext, Slice, Sliced, TensorPart

_COLUMNS = 8
"""Of a message with two sums for each token, so that every all-reduce strategy takes it."""


class QkNorm(Sliced):
    """A norm of queries and one of keys with a weight for each element of each head, before RoPE.

    weight [q_heads + kv_heads of this rank, head_dim]. The checkpoint has [heads * head_dim], or [heads, head_dim], of each.
    """

    def __init__(self, name: str, shape: ModelShape, order: list[int], *, context: LayerContext) -> None:
        super().__init__()
        self.eps, self.order, dim = shape.rms_norm_eps, order, shape.head_dim
        self.tensors = [context.declared[f"{name}.{norm}.weight"] for norm in ("q_norm", "k_norm")]
        parts = [tensor.parts(context.group.size, context.group.rank) for tensor in self.tensors]
        self.runs = [[part[0] for part in each] for each in parts]
        self.q_heads, kv_heads = (sum(math.prod(map(len, part)) for part in each) // dim for each in parts)
        self.weight = context.weight(self.q_heads + kv_heads, dim)

    def loaded(self) -> None:
        if self.order:
            self.weight.copy_(self.weight[:, self.order])

    def slices(self) -> Iterator[Slice]:
        flat, at = self.weight.view(-1), 0
        for tensor, runs in zip(self.tensors, self.runs, strict=True):
            row = math.prod(tensor.shape[1:])
            for run in runs:
                count = len(run) * row
                yield Slice(tensor.name, tensor.shape, flat[at : at + count].view(-1, *tensor.shape[1:]), run.start)
                at += count


class QkLayerNorm(QkNorm):
    """LayerNorm of each head alone, without a bias (Command-R+)."""

    def forward(self, heads: Tensor) -> Tensor:
        """heads [T, q_heads + 2 * kv_heads, head_dim]: queries and keys are normed, in place."""
        normed = heads[:, : len(self.weight)]
        normed.copy_(F.layer_norm(normed.float(), normed.shape[-1:], None, None, self.eps) * self.weight.float())
        return heads


class WholeQkNorm(QkNorm):
    """An RMS norm of the queries of all heads as one vector, and one of the keys (OLMo-2, MiniMax-M2). The heads are split over the
    ranks, and so the sums of squares are all-reduced. Of a KV head that several ranks have, the first one counts the squares."""

    def __init__(self, name: str, shape: ModelShape, order: list[int], *, context: LayerContext) -> None:
        super().__init__(name, shape, order, context=context)
        self.group, tp, rank, dim = context.group, context.group.size, context.group.rank, shape.head_dim
        own = [shard.heads(shape.num_heads, shape.num_kv_heads, tp, index).kv for index in range(rank + 1)]
        before = {head for heads in own[:-1] for head in heads}
        counted = [head not in before and head not in own[-1][:at] for at, head in enumerate(own[-1])]
        self.register_buffer("counted", torch.tensor(counted, dtype=torch.float32, device=context.device), persistent=False)
        sizes = [shape.num_heads * dim, shape.num_kv_heads * dim]
        self.register_buffer("sizes", torch.tensor(sizes, dtype=torch.float32, device=context.device), persistent=False)

    counted: Tensor
    sizes: Tensor

    def forward(self, heads: Tensor) -> Tensor:
        """heads [T, q_heads + 2 * kv_heads, head_dim]: queries and keys are normed, in place."""
        normed = heads[:, : len(self.weight)]
        values = normed.float()
        squares = values.square().sum(-1)
        sums = torch.zeros(len(heads), _COLUMNS, dtype=torch.float32, device=heads.device)
        torch.sum(squares[:, : self.q_heads], 1, out=sums[:, 0])
        torch.sum(squares[:, self.q_heads :] * self.counted, 1, out=sums[:, 1])
        inverse = torch.rsqrt(self.group.all_reduce(sums)[:, :2] / self.sizes + self.eps)
        values[:, : self.q_heads] *= inverse[:, :1, None]
        values[:, self.q_heads :] *= inverse[:, 1:, None]
        normed.copy_(values.to(heads.dtype) * self.weight)
        return heads


class GroupedQueryAttention(nn.Module):
    """The attention of layer `layer`; the heads are split over the ranks. The shape says which traits it has:

    windows, chunks: of this layer, how many tokens a query sees, or of which runs of tokens it sees its own alone.
    qk_norm: queries and keys are normalized before rope, so that scores cannot grow without bound: each head, or all heads at once
    (qk_norm_whole); with layer_norm by LayerNorm, with weights for each head; with qk_norm_plain without
    weights, where heads are rotated: the norm of a head is the same before and behind that.
    sinks: heads may attend to nothing: each has one more logit, [q_heads of this rank], without a value (gpt-oss).
    rope_in: RoPE may rotate a part of each head, or none of it; it may have a temperature of the queries.
    multipliers: of the scores, and of what the block adds to the residual stream; and the scores' soft cap.
    heads_in: sizes of this layer; its values may be the keys before their norm and rope (keys_are_values), or it has none of
    either, and attends to those of an earlier layer, whose cache it has (shared).
    v_norm: values are normed, each head alone, without weights.
    gated_delta: the output of each head is multiplied by the sigmoid of a gate, which q_proj gives beside its query.
    """

    def __init__(self, name: str, shape: ModelShape, layer: int, *, context: LayerContext) -> None:
        super().__init__()
        _, head_dim, self.keys_are_values, self.shares = shape.heads_in(layer)
        query = context.parts(f"{name}.q_proj")
        key = [] if self.shares else context.parts(f"{name}.k_proj")
        value = [] if self.shares or self.keys_are_values else context.parts(f"{name}.v_proj")
        gates = [] if shape.gated_delta is None else query[len(query) // 2 :]
        parts, bias = [*query[: len(query) - len(gates)], *key, *value, *gates], f"{name}.q_proj.bias" in context.declared
        self.qkv_proj = ColumnParallelLinear(parts, bias=bias, context=context)
        rows, kv_rows = (sum(len(part.rows) for part in each) for each in (query, key))
        self.q_heads, self.kv_heads = rows // head_dim // (2 if gates else 1), kv_rows // head_dim
        self.head_dim, self.has_gates = head_dim, bool(gates)
        self.window, self.scale = shape.windows[layer] if shape.windows else None, shape.multipliers.attention or head_dim**-0.5
        chunk = shape.chunks[layer] if shape.chunks else None
        self.chunked = {} if chunk is None else {"chunk": chunk}
        self.cap, (rope, rotated, _) = shape.multipliers.attention_cap, shape.rotary_in(layer)
        order = rotary_order(head_dim, rotated, interleaved=rope.interleaved)
        order = order if order != sorted(order) else []
        if order:
            ordered, rows = self.q_heads + self.kv_heads, self.qkv_proj.method.out_features
            self.qkv_proj.row_order = [head * head_dim + element for head in range(ordered) for element in order]
            self.qkv_proj.row_order += range(ordered * head_dim, rows)
        self.q_norm = self.k_norm = self.qk_norm = None
        self.head_norm: HeadNorm | None = None
        if shape.qk_norm_whole or (shape.qk_norm and shape.layer_norm):
            self.qk_norm = (WholeQkNorm if shape.qk_norm_whole else QkLayerNorm)(name, shape, order, context=context)
        elif shape.qk_norm_plain:
            if shape.qk_norm and rope.portion:
                ones = torch.ones(head_dim, dtype=context.dtype, device=context.device)
                self.register_buffer("ones", ones, persistent=False)
                self.head_norm = HeadNorm(ones, ones, shape.rms_norm_eps)
        elif shape.qk_norm:
            norms = [
                RmsNorm(f"{name}.{each}", head_dim, shape.rms_norm_eps, order=order, offset=shape.norm_offset, context=context)
                for each in ("q_norm", "k_norm")[: 1 if self.shares else 2]
            ]
            self.q_norm, self.k_norm = norms[0], norms[1] if len(norms) > 1 else None
        self.value_eps = shape.rms_norm_eps if shape.v_norm else None
        self.sinks = TensorPart(f"{name}.sinks", context=context) if shape.sinks else None
        self.kv_store = KvStore(name, context=context)
        self.o_proj = RowParallelLinear.of(f"{name}.o_proj", context, multiplier=shape.multipliers.residual)

    def forward(
        self, x: Activation, cos_sin: CosSin, batch: Batch, cache: LayerCache, residual: Tensor, norm: RmsNorm | None
    ) -> tuple[NormOutput, Tensor]:
        """x and residual [T, hidden] -> (norm(residual + attention(x)), residual + attention(x))."""
        output: tuple[NormOutput, Tensor] = self.o_proj(self._heads(x, cos_sin, batch, cache), residual, norm)
        return output

    def partial_sum(self, x: Activation, cos_sin: CosSin, batch: Batch, cache: LayerCache) -> Tensor:
        """x [T, hidden] -> what this rank's heads add to attention(x), [T, hidden]."""
        return self.o_proj.partial_sum(self._heads(x, cos_sin, batch, cache))

    def _heads(self, x: Activation, cos_sin: CosSin, batch: Batch, cache: LayerCache) -> Tensor:
        """x [T, hidden] -> the outputs of this rank's heads [T, q_heads * head_dim]."""
        query, gates = self._rotated_query(x, cos_sin, batch, cache)
        if cos_sin.temperature is not None:
            query = query.mul_(cos_sin.temperature)
        context: Tensor = batch.attention.forward(
            query, cache, window=self.window, scale=self.scale, kv_scales=self.kv_store.read_scales,
            sinks=None if self.sinks is None else self.sinks.weight, cap=self.cap, **self.chunked,
        )  # fmt: skip
        context = context.reshape(x.shape[0], -1)
        return context if gates is None else sigmoid_mul(context, gates)

    def set_input_norm(self, norm: RmsNorm) -> None:
        """The norm before the block: it quantizes for the block's first layer."""
        norm.set_quantizer(self.qkv_proj.method.input_quantizer)

    def _rotated_query(self, x: Activation, cos_sin: CosSin, batch: Batch, cache: LayerCache) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] -> the rotated queries [T, q_heads, head_dim], and the gates of their outputs [T, q_heads * head_dim] where
        there are any; keys and values are stored in the cache."""
        if self.shares:
            query = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
            return kernels.rope(query if self.q_norm is None else self.q_norm(query), *cos_sin[:2]), None
        kv_slots = batch.of_group(cache.group).kv_slots
        if self.qk_norm is not None:
            heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
            return self.kv_store(self.qk_norm(heads), cos_sin, self.q_heads, cache, kv_slots), None
        head_norm = self.head_norm
        if self.q_norm is not None and self.k_norm is not None:
            head_norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        if head_norm is None and self.value_eps is None:
            query = self.kv_store.fused_with_gemv(x, self.qkv_proj, self.q_heads, cos_sin, cache, kv_slots)
            if query is not None:
                return query, None
        heads, gates = self.qkv_proj(x, may_stay_unscaled=not self.has_gates and self.value_eps is None), None
        if self.has_gates:
            heads, gates = heads.split([(self.q_heads + 2 * self.kv_heads) * self.head_dim, self.q_heads * self.head_dim], dim=1)
        heads = heads.view(x.shape[0], -1, self.head_dim)
        if self.keys_are_values:
            heads = torch.cat([heads, heads[:, self.q_heads :]], dim=1)
        if self.value_eps is not None:
            values = heads[:, self.q_heads + self.kv_heads :]
            values.copy_(F.rms_norm(values.float(), values.shape[-1:], eps=self.value_eps))
        return self.kv_store(heads, cos_sin, self.q_heads, cache, kv_slots, head_norm), gates
