# SPDX-License-Identifier: Apache-2.0
"""Mixtral (arXiv 2401.04088): the attention of Llama, and in each layer a router over experts w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.plan.families.dense as dense
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Shape


def layer(shape: Shape, index: int) -> Iterator[Tensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    assert shape.experts is not None
    name, experts = f"model.layers.{index}.block_sparse_moe", shape.experts
    yield from dense.attention(shape, f"model.layers.{index}")
    yield Tensor(f"{name}.gate.weight", (experts.count, shape.hidden_size), "replicated", "router", "router")
    yield from dense.gated_mlp(
        f"{name}.experts", shape.hidden_size, experts.intermediate, "experts", experts=experts.count, names=("w1", "w3", "w2")
    )
