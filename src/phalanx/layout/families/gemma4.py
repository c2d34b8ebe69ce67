# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: a dense layer, or one with experts beside its MLP, and embeddings by layer; the last layers may have no keys and
values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import phalanx.layout.families.dense as dense
from phalanx.config.model import ModelShape
from phalanx.layout.families.declare import Fused, WeightTensor

BESIDE_EXPERTS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""The norms behind the MLP, and before and behind the experts that stand beside it."""


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    prefix, hidden, experts = f"model.layers.{index}", shape.hidden_size, shape.experts_in(index)
    yield from dense.attention(shape, prefix, shape.heads_in(index))
    yield WeightTensor(f"{prefix}.layer_scalar", (1,), "replicated", "norm")
    yield from dense.gated_mlp(f"{prefix}.mlp", hidden, shape.intermediate_in(index), "mlp")
    if shape.layer_inputs is not None:
        width = shape.layer_inputs.width
        yield WeightTensor(f"{prefix}.per_layer_input_gate.weight", (width, hidden), "replicated", "mlp", "layer_input_gate")
        yield WeightTensor(f"{prefix}.per_layer_projection.weight", (hidden, width), "replicated", "mlp", "layer_projection")
        yield dense.norm(shape, f"{prefix}.post_per_layer_input_norm", hidden)
    if experts is None:
        return
    yield from (dense.norm(shape, f"{prefix}.{name}", hidden) for name in BESIDE_EXPERTS)
    yield WeightTensor(f"{prefix}.router.proj.weight", (experts.count, hidden), "replicated", "router", "router")
    yield WeightTensor(f"{prefix}.router.scale", (hidden,), "replicated", "router")
    yield WeightTensor(f"{prefix}.router.per_expert_scale", (experts.count,), "replicated", "router", kept="fp32")
    fused = f"{prefix}.experts"
    for tensor in dense.sparse_moe(shape, prefix):
        if tensor.experts and tensor.fused is not None:  # one tensor for all experts, or, quantized by tools, one for each
            own = Fused(tensor.fused.name.replace(f"{prefix}.mlp.experts", fused), *tensor.fused[1:])
            yield replace(tensor, name=tensor.name.replace(f"{prefix}.mlp.experts", fused), fused=own)


def unread(shape: ModelShape, index: int) -> tuple[str, ...]:
    """The beginnings of the names of keys and values of a layer that shares those of another: checkpoints have them all the
    same."""
    name = f"model.layers.{index}.self_attn"
    return tuple(f"{name}.{each}" for each in ("k_", "v_")) if shape.heads_in(index).shared else ()


def outer(shape: ModelShape) -> Iterator[WeightTensor]:
    """Those of `dense`, and what makes the embeddings by layer: a table, and a projection of the embedding with its norm."""
    yield from dense.outer(shape)
    if shape.layer_inputs is not None:
        (width, vocabulary), name = shape.layer_inputs, "model.per_layer"
        columns = shape.num_layers * width
        yield WeightTensor("model.embed_tokens_per_layer.weight", (vocabulary, columns), "vocabulary", "layer_inputs")
        yield WeightTensor(
            f"{name}_model_projection.weight", (columns, shape.hidden_size), "replicated", "layer_inputs", "layer_inputs"
        )  # fmt: skip
        yield replace(dense.norm(shape, f"{name}_projection_norm", width), part="layer_inputs")
