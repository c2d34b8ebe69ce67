# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention with biases, sinks and alternating windows; experts fused in one tensor each, in MXFP4 as released."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.layout.families.dense as dense
from phalanx.config.model import ModelShape
from phalanx.layout.families.declare import WeightTensor


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer as GEMMs see them. On disk the experts of a layer are one tensor each for gate and up
    (interleaved) and for down: [experts, inputs, outputs] in 16 bit, or in MXFP4."""
    experts = shape.experts
    assert experts is not None
    prefix, hidden = f"model.layers.{index}", shape.hidden_size
    yield from dense.attention(shape, prefix)
    yield WeightTensor(f"{prefix}.self_attn.sinks", (shape.num_heads,), "heads", "attention", heads=shape.num_heads)
    yield WeightTensor(f"{prefix}.mlp.router.weight", (experts.count, hidden), "replicated", "router", "router")
    yield WeightTensor(f"{prefix}.mlp.router.bias", (experts.count,), "replicated", "router")
    name, inner, count = f"{prefix}.mlp.experts", experts.intermediate, experts.count
    gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    yield WeightTensor(gate_up, (2 * inner, hidden), "column", "experts", "experts_gate_up", count, transposed=True)
    yield WeightTensor(f"{gate_up}_bias", (2 * inner,), "column", "experts", experts=count)
    yield WeightTensor(down, (hidden, inner), "row", "experts", "experts_down", count, transposed=True)
    yield WeightTensor(f"{down}_bias", (hidden,), "replicated", "experts", experts=count)
