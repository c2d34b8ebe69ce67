# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): multi-head latent attention, routed and shared experts after dense layers.
Multi-token prediction layers are not loaded, and not counted."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.plan.families.dense as dense
from phalanx.plan.families.declare import Tensor
from phalanx.plan.shape import Shape


def layer(shape: Shape, index: int) -> Iterator[Tensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    prefix = f"model.layers.{index}"
    yield from _attention(shape, f"{prefix}.self_attn")
    yield from dense.norms(prefix, shape.hidden_size)
    experts = shape.experts_in(index)
    if experts is None:
        yield from dense.gated_mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, "mlp")
        return
    yield Tensor(f"{prefix}.mlp.gate.weight", (experts.count, shape.hidden_size), "replicated", "router", "router")
    if experts.scoring_bias:
        yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", (experts.count,), "replicated", "router", kept="fp32")
    yield from dense.gated_mlp(f"{prefix}.mlp.experts", shape.hidden_size, experts.intermediate, "experts", experts=experts.count)
    if experts.shared:
        yield from dense.gated_mlp(f"{prefix}.mlp.shared_experts", shape.hidden_size, experts.shared, "shared")


def _attention(shape: Shape, name: str) -> Iterator[Tensor]:
    """Down-projections are replicated over tensor-parallel ranks, up-projections are split by heads. What reads the layer's input
    is one GEMM. kv_b_proj is multiplied by parts of each head, and so it is dequantized."""
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_heads
    assert latent is not None
    query = heads * (latent.nope + latent.rope)
    if latent.q_rank is None:
        yield Tensor(f"{name}.q_proj.weight", (query, hidden), "heads", "attention", "qkv_a", heads=heads)
    else:
        yield Tensor(f"{name}.q_a_proj.weight", (latent.q_rank, hidden), "replicated", "attention", "qkv_a")
        yield Tensor(f"{name}.q_a_layernorm.weight", (latent.q_rank,), "replicated", "norm")
        yield Tensor(f"{name}.q_b_proj.weight", (query, latent.q_rank), "heads", "attention", "q_b", heads=heads)
    compressed = latent.kv_rank + latent.rope
    yield Tensor(f"{name}.kv_a_proj_with_mqa.weight", (compressed, hidden), "replicated", "attention", "qkv_a")
    yield Tensor(f"{name}.kv_a_layernorm.weight", (latent.kv_rank,), "replicated", "norm")
    up = heads * (latent.nope + latent.v)
    yield Tensor(f"{name}.kv_b_proj.weight", (up, latent.kv_rank), "heads", "attention", "kv_b", heads=heads, kept="16 bit")
    yield Tensor(f"{name}.o_proj.weight", (hidden, heads * latent.v), "row", "attention", "o")
