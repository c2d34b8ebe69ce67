# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention with biases, sinks and alternating windows; experts fused in one tensor each, in MXFP4 as released."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.config.json_fields import Fields
from phalanx.plan.families import dense
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Experts, Shape


def read(shape: Shape, fields: Fields) -> Shape:
    """Experts and windows of config.json: without layer_types every second layer has the window, from the first on."""
    quantization = fields.optional_mapping("quantization_config") or {}
    experts = Experts(
        fields.count("num_local_experts", 128), fields.count("num_experts_per_tok", 4), shape.intermediate_size, biases=True,
        mxfp4=quantization.get("quant_method") == "mxfp4",
    )  # fmt: skip
    size = fields.count("sliding_window", 128)
    kinds = fields.optional_texts("layer_types")
    slides = [kind == "sliding_attention" for kind in kinds] if kinds else [index % 2 == 0 for index in range(shape.num_layers)]
    windows = tuple(size if each else None for each in slides)
    return replace(shape, experts=experts, windows=windows, qkv_bias=True, output_bias=True, sinks=True)


def layer(shape: Shape, index: int) -> Iterator[Tensor]:
    """The tensors of one decoder layer as GEMMs see them. On disk the experts of a layer are one tensor each for gate and up
    (interleaved) and for down, named `gate_up_proj` and `down_proj`, in MXFP4 with `_blocks` and `_scales`."""
    experts = shape.experts
    assert experts is not None
    prefix, hidden = f"model.layers.{index}", shape.hidden_size
    yield from dense.attention(shape, prefix)
    yield Tensor(f"{prefix}.self_attn.sinks", (shape.num_heads,), "heads", "attention", heads=shape.num_heads)
    yield Tensor(f"{prefix}.mlp.router.weight", (experts.count, hidden), "replicated", "router", "router")
    yield Tensor(f"{prefix}.mlp.router.bias", (experts.count,), "replicated", "router")
    name, inner, count = f"{prefix}.mlp.experts", experts.intermediate, experts.count
    yield Tensor(f"{name}.gate_up_proj", (2 * inner, hidden), "column", "experts", "experts_gate_up", count)
    yield Tensor(f"{name}.gate_up_proj_bias", (2 * inner,), "column", "experts", experts=count)
    yield Tensor(f"{name}.down_proj", (hidden, inner), "row", "experts", "experts_down", count)
    yield Tensor(f"{name}.down_proj_bias", (hidden,), "replicated", "experts", experts=count)
