# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention with biases, sinks and alternating windows; experts fused in one tensor each, in MXFP4 as released."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import phalanx.plan.families.dense as dense
from phalanx.plan.families.declare import MXFP4_BLOCK, Tensor
from phalanx.plan.shape import Shape


def layer(shape: Shape, index: int) -> Iterator[Tensor]:
    """The tensors of one decoder layer as GEMMs see them. On disk the experts of a layer are one tensor each for gate and up
    (interleaved) and for down: [experts, inputs, outputs] in 16 bit, or in MXFP4, whose blocks of 32 columns stay together."""
    experts = shape.experts
    assert experts is not None
    prefix, hidden = f"model.layers.{index}", shape.hidden_size
    yield from dense.attention(shape, prefix)
    yield Tensor(f"{prefix}.self_attn.sinks", (shape.num_heads,), "heads", "attention", heads=shape.num_heads)
    yield Tensor(f"{prefix}.mlp.router.weight", (experts.count, hidden), "replicated", "router", "router")
    yield Tensor(f"{prefix}.mlp.router.bias", (experts.count,), "replicated", "router")
    name, inner, count = f"{prefix}.mlp.experts", experts.intermediate, experts.count
    unit = MXFP4_BLOCK if experts.mxfp4 else 0
    form: Literal["mxfp4", "transposed"] = "mxfp4" if experts.mxfp4 else "transposed"
    gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    yield Tensor(gate_up, (2 * inner, hidden), "column", "experts", "experts_gate_up", count, unit=2 * unit, form=form)
    yield Tensor(f"{gate_up}_bias", (2 * inner,), "column", "experts", experts=count, unit=2 * unit)
    yield Tensor(down, (hidden, inner), "row", "experts", "experts_down", count, unit=unit, form=form)
    yield Tensor(f"{down}_bias", (hidden,), "replicated", "experts", experts=count)
