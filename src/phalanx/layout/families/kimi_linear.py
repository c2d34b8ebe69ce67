# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear (arXiv 2510.26692): layers of Kimi Delta Attention, and of latent attention without positions; experts as those of
DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.layout.families.deepseek as deepseek
import phalanx.layout.families.dense as dense
import phalanx.layout.families.qwen3_next as qwen3_next
from phalanx.config.gated_delta import GatedDelta
from phalanx.config.model import ModelShape
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families.declare import Fused, WeightTensor

_BLOCK = "block_sparse_moe"
SPELLINGS = {
    ".self_attn.forget_gate.": ".self_attn.", ".mlp.shared_experts.": f".{_BLOCK}.shared_experts.",
    **{f".{_BLOCK}.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
}  # fmt: skip
"""Of transformers 5, where it writes tensors as it holds them; and of the dense MLP where it names it as the experts."""


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer, by the names of the released checkpoint."""
    gated, prefix = shape.gated_delta, f"model.layers.{index}"
    assert gated is not None
    if index in gated.layers:
        yield from _delta(gated, f"{prefix}.self_attn", shape.hidden_size)
    else:
        yield from deepseek.attention(shape, f"{prefix}.self_attn", index)
    yield from dense.norms(shape, prefix)
    experts = shape.experts_in(index)
    if experts is None:
        yield from dense.gated_mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, "mlp")
        return
    yield from dense.sparse_moe(shape, prefix, _BLOCK, ("w1", "w3", "w2"))
    if experts.shared:
        yield from dense.gated_mlp(f"{prefix}.{_BLOCK}.shared_experts", shape.hidden_size, experts.shared, "shared")


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """A state of each request, or a latent of each token."""
    assert shape.gated_delta is not None
    if index in shape.gated_delta.layers:
        yield from qwen3_next.states(shape.gated_delta)
    else:
        yield from deepseek.cache(shape, index, dtype)


def _delta(gated: GatedDelta, name: str, hidden: int) -> Iterator[WeightTensor]:
    """The decays and the gates of the output come through a projection to key_dim and one from it: the first is replicated."""
    heads, dim = gated.key_heads, gated.key_dim
    width = heads * dim
    for number, part in enumerate("qkv"):
        yield WeightTensor(f"{name}.{part}_proj.weight", (width, hidden), "heads", "attention", "qkv", heads=heads)
        yield WeightTensor(
            f"{name}.{part}_conv1d.weight", (width, 1, gated.conv), "heads", "attention", heads=heads,
            fused=Fused(f"{name}.conv1d.weight", 3 * width, number * width),
        )  # fmt: skip
    yield WeightTensor(f"{name}.b_proj.weight", (heads, hidden), "heads", "attention", "gates_a", heads=heads)
    for gate in "fg":
        yield WeightTensor(f"{name}.{gate}_a_proj.weight", (dim, hidden), "replicated", "attention", "gates_a")
        yield WeightTensor(f"{name}.{gate}_b_proj.weight", (width, dim), "heads", "attention", f"{gate}_b", heads=heads)
    yield WeightTensor(f"{name}.A_log", (1, 1, heads, 1), "heads", "attention", heads=heads, kept="fp32")
    yield WeightTensor(f"{name}.dt_bias", (width,), "heads", "attention", heads=heads, kept="fp32")
    yield WeightTensor(f"{name}.o_norm.weight", (dim,), "replicated", "attention")
    yield WeightTensor(f"{name}.o_proj.weight", (hidden, width), "row", "attention", "o")
