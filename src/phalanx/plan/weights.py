# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint and their bytes, from config.json alone: what stages are balanced by, and what a load expects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.config.model import ModelShape

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Tensors = dict[str, tuple[int, ...]]
"""Name of a checkpoint tensor -> its whole shape."""


class WeightBytes(NamedTuple):
    """Bytes of the whole model's parts, all ranks of a tensor-parallel group together.

    layers: one per layer. embedding: on the first stage. head: final norm and output head on the last stage; a tied head counts
    here too, as a stage without the embedding holds a copy.
    """

    layers: list[int]
    embedding: int
    head: int


def layer_bytes(shape: ModelShape, dtype: str) -> WeightBytes:
    """For `plan.layout.stages(layers, pp, first_bytes=embedding, last_bytes=head)`. dtype: "fp32", "fp16" or "bf16"."""
    size = ITEMSIZE[dtype]
    vocabulary = shape.vocab_size * shape.hidden_size * size
    one = size * sum(math.prod(dims) for dims in layer_tensors(shape, 0).values())
    return WeightBytes([one] * shape.num_layers, vocabulary, vocabulary + shape.hidden_size * size)


def tensors(shape: ModelShape) -> Tensors:
    """Every tensor of a checkpoint; a tied head has none of its own."""
    found: Tensors = {EMBEDDING: (shape.vocab_size, shape.hidden_size), FINAL_NORM: (shape.hidden_size,)}
    if not shape.tie_word_embeddings:
        found[HEAD] = (shape.vocab_size, shape.hidden_size)
    for layer in range(shape.num_layers):
        found |= layer_tensors(shape, layer)
    return found


def layer_tensors(shape: ModelShape, layer: int) -> Tensors:
    """Those of one decoder layer."""
    return {f"model.layers.{layer}.{name}": dims for name, dims in _layer(shape)}


def _layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = [
        ("self_attn.q_proj", query, hidden, shape.qkv_bias),
        ("self_attn.k_proj", key, hidden, shape.qkv_bias),
        ("self_attn.v_proj", key, hidden, shape.qkv_bias),
        ("self_attn.o_proj", hidden, query, shape.output_bias),
        ("mlp.gate_proj", inner, hidden, shape.mlp_bias),
        ("mlp.up_proj", inner, hidden, shape.mlp_bias),
        ("mlp.down_proj", hidden, inner, shape.mlp_bias),
    ]
    for name, out, into, bias in products:
        yield f"{name}.weight", (out, into)
        if bias:
            yield f"{name}.bias", (out,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
