# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: the attention of Qwen3, and experts in all layers but those that config.json names dense."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.plan.families.dense as dense
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Shape


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
