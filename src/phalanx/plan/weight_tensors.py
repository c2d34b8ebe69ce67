# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint and their bytes, from config.json alone. Stages are balanced by them, and a load checks them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from phalanx.config.dtypes import DTYPES
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Tensors = dict[str, tuple[int, ...]]
"""Name of a checkpoint tensor -> its complete shape."""


class WeightBytes(NamedTuple):
    """Bytes of the parts of a model, all ranks of a tensor-parallel group together.

    layers: one per layer. embedding: on the first stage. head: final norm and output head, on the last stage. A tied head counts
    here, too, as a stage without the embedding holds a copy.
    """

    layers: list[int]
    embedding: int
    head: int


def layer_bytes(shape: ModelShape, dtype: str) -> WeightBytes:
    """For `plan.layout.stages(layers, pp, first_bytes=embedding, last_bytes=head)`. dtype: "fp32", "fp16", "bf16", or "fp8" for
    linear layers in FP8 with their scales, and 2 bytes elsewhere. Layers that the checkpoint has in FP8 stay in FP8 with each
    dtype.

    A rank with a slice of a weight's columns has scales of its own for it; they are counted once here. Static scales of
    activations, 4 bytes each, are not counted.
    """
    size = _itemsize(dtype)
    vocabulary = shape.vocab_size * shape.hidden_size * size
    layers = [sum(_bytes(shape, name, dims, dtype) for name, dims in layer_tensors(shape, i).items()) for i in _kinds(shape)]
    per_layer = layers if len(layers) > 1 else layers * shape.num_layers
    return WeightBytes(per_layer, vocabulary, vocabulary + shape.hidden_size * size)


def _itemsize(dtype: str) -> int:
    """Bytes of one value that is not an FP8 weight. With "fp8", these values have 16 bits."""
    return 2 if dtype == "fp8" else DTYPES[dtype].itemsize


def _kinds(shape: ModelShape) -> range:
    """The layers that may differ in bytes: all, with a quantization that ignores some layers; else the first stands for all."""
    ignores = shape.quantization is not None and (shape.quantization.ignore or shape.quantization.targets)
    return range(shape.num_layers if ignores else 1)


def _bytes(shape: ModelShape, name: str, dims: tuple[int, ...], dtype: str) -> int:
    quantization = shape.quantization or (ON_LOAD if dtype == "fp8" else None)
    if quantization is None or len(dims) == 1 or not quantization.covers(name.removesuffix(".weight")):
        return math.prod(dims) * _itemsize(dtype)
    by_row = 1 if quantization.block is None else -(-dims[1] // quantization.block[1])
    return math.prod(dims) + 4 * dims[0] * by_row


def tensors(shape: ModelShape) -> Tensors:
    """Every tensor of a checkpoint. A tied head has none of its own."""
    shapes: Tensors = {EMBEDDING: (shape.vocab_size, shape.hidden_size), FINAL_NORM: (shape.hidden_size,)}
    if not shape.tie_word_embeddings:
        shapes[HEAD] = (shape.vocab_size, shape.hidden_size)
    for layer in range(shape.num_layers):
        shapes |= layer_tensors(shape, layer)
    return shapes


def scales(shape: ModelShape) -> set[str]:
    """The names that the scales of a checkpoint may have."""
    names: set[str] = set()
    quantization = shape.quantization
    for layer in range(shape.num_layers):
        for name in layer_tensors(shape, layer):
            layer_name = name.removesuffix(".weight")
            if name.endswith("_proj.weight") and quantization is not None and quantization.covers(layer_name):
                names |= {f"{layer_name}.{quantization.scale_name}", f"{layer_name}.input_scale"}
        names.update(*kv_scales(layer).values())
    return names


def kv_scales(layer: int) -> dict[str, tuple[str, ...]]:
    """The names that tools give to the scales of one layer's keys ("k") and values ("v") in a cache: the first by llm-compressor
    and AutoFP8, the second by ModelOpt, the third by Quark and older tools (a scale of the layer's output). The last is the oldest:
    one scale for both."""
    attention = f"model.layers.{layer}.self_attn"
    return {
        kind: tuple(
            f"{attention}.{end}" for end in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale", "kv_scale")
        )
        for kind in "kv"
    }


def layer_tensors(shape: ModelShape, layer: int) -> Tensors:
    """The tensors of one decoder layer."""
    return {f"model.layers.{layer}.{name}": dims for name, dims in _layer(shape)}


def _layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linears = [
        ("self_attn.q_proj", query, hidden, shape.qkv_bias),
        ("self_attn.k_proj", key, hidden, shape.qkv_bias),
        ("self_attn.v_proj", key, hidden, shape.qkv_bias),
        ("self_attn.o_proj", hidden, query, shape.output_bias),
        ("mlp.gate_proj", inner, hidden, shape.mlp_bias),
        ("mlp.up_proj", inner, hidden, shape.mlp_bias),
        ("mlp.down_proj", hidden, inner, shape.mlp_bias),
    ]
    for name, out, into, bias in linears:
        yield f"{name}.weight", (out, into)
        if bias:
            yield f"{name}.bias", (out,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
