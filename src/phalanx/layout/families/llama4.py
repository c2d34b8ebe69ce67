# SPDX-License-Identifier: Apache-2.0
"""Llama-4: attention, and in some layers a router over experts beside a shared one. A layer's experts are one tensor each for gate
and up (gate before up) and for down, [experts, inputs, outputs]; quantized checkpoints have them apart."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.layout.families.dense as dense
from phalanx.config.model import ModelShape
from phalanx.layout.families.declare import Fused, WeightTensor


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    prefix, hidden, experts = f"model.layers.{index}", shape.hidden_size, shape.experts_in(index)
    yield from dense.attention(shape, prefix)
    name = f"{prefix}.feed_forward"
    if experts is None:
        yield from dense.gated_mlp(name, hidden, shape.intermediate_size, "mlp")
        return
    count, inner, fused = experts.count, experts.intermediate, f"{name}.experts"
    yield WeightTensor(f"{name}.router.weight", (count, hidden), "replicated", "router", "router")
    for number, projection in enumerate(("gate_proj", "up_proj")):
        yield WeightTensor(
            f"{fused}.{{expert}}.{projection}.weight", (inner, hidden), "column", "experts", "experts_gate_up", count,
            fused=Fused(f"{fused}.gate_up_proj", 2 * inner, number * inner, transposed=True),
        )  # fmt: skip
    yield WeightTensor(
        f"{fused}.{{expert}}.down_proj.weight", (hidden, inner), "row", "experts", "experts_down", count,
        fused=Fused(f"{fused}.down_proj", hidden, transposed=True),
    )  # fmt: skip
    yield from dense.gated_mlp(f"{name}.shared_expert", hidden, experts.shared, "shared")
