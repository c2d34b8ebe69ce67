# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: the attention of Qwen3, and experts in all layers but those that config.json names dense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.config.json_fields import Fields
from phalanx.plan.families import dense
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Experts, Shape


def read(shape: Shape, fields: Fields) -> Shape:
    """The experts of config.json; a layer is dense if mlp_only_layers names it or decoder_sparse_step passes over it."""
    step = fields.count("decoder_sparse_step", 1)
    named = set(fields.values.get("mlp_only_layers") or ())
    passed = tuple(layer for layer in range(shape.num_layers) if layer in named or (layer + 1) % step)
    experts = Experts(
        fields.count("num_experts", 128), fields.count("num_experts_per_tok", 8), fields.count("moe_intermediate_size", 768),
        dense_layers=passed,
    )  # fmt: skip
    return replace(shape, experts=experts, qk_norm=True)


def layer(shape: Shape, index: int) -> Iterator[Tensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    experts = shape.experts_in(index)
    if experts is None:
        yield from dense.layer(shape, index)
        return
    name = f"model.layers.{index}.mlp"
    yield from dense.attention(shape, f"model.layers.{index}")
    yield Tensor(f"{name}.gate.weight", (experts.count, shape.hidden_size), "replicated", "router", "router")
    yield from dense.gated_mlp(f"{name}.experts", shape.hidden_size, experts.intermediate, "experts", experts=experts.count)
