# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: layers of the gated delta rule (arXiv 2412.06464), and of attention with a gate of its output. Norms
multiply by 1 + weight, but for the gated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import phalanx.layout.families.dense as dense
from phalanx.config.gated_delta import GatedDelta
from phalanx.config.model import ModelShape
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families.declare import WeightTensor

Projections = Callable[[GatedDelta, str, int], Iterator[WeightTensor]]


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """Qwen3-Next: one tensor for queries, keys, values and gates of a layer, in the order of its key heads."""
    yield from _layer(shape, index, _fused_projections)


def qwen3_5(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """Qwen3.5: queries, keys and values in one tensor, one behind the other; the others each in its own."""
    yield from _layer(shape, index, _flat_projections)


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """Of the gated delta rule: the inputs that the convolution still covers, by key heads with their value heads, and a matrix for
    each value head. Where rows verify drafts also what takes in the tokens behind the state: see `GatedDelta.conv_rows`, and of
    each value head b and a of these tokens, and the position of the state."""
    gated = shape.gated_delta
    assert gated is not None
    if index not in gated.layers:
        yield from dense.cache(shape, index, dtype)
        return
    width, kept = sum(gated.sections) // gated.key_heads, gated.kept
    sizes = {"conv": (gated.key_heads, gated.conv_rows * width), "state": (gated.value_heads, gated.key_dim, gated.value_dim)}
    if kept:
        sizes["pending"] = gated.value_heads, 2 * kept + 1
    for name, size in sizes.items():
        yield CacheTensor(name, size, "fp32", "request", heads=size[0], revocable=kept > 0)


def _layer(shape: ModelShape, index: int, projections: Projections) -> Iterator[WeightTensor]:
    gated, prefix = shape.gated_delta, f"model.layers.{index}"
    assert gated is not None
    if index in gated.layers:
        name = f"{prefix}.linear_attn"
        yield from (replace(tensor, heads=gated.key_heads) for tensor in projections(gated, name, shape.hidden_size))
        yield from _gated_delta(gated, name, shape.hidden_size)
        yield from dense.norms(shape, prefix)
    else:
        yield from _attention(shape, prefix)
    experts = shape.experts_in(index)
    if experts is None:
        yield from dense.gated_mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, "mlp")
        return
    yield from dense.sparse_moe(shape, prefix)
    yield from dense.gated_mlp(f"{prefix}.mlp.shared_expert", shape.hidden_size, experts.shared, "shared")
    yield WeightTensor(f"{prefix}.mlp.shared_expert_gate.weight", (1, shape.hidden_size), "replicated", "router")


def _attention(shape: ModelShape, prefix: str) -> Iterator[WeightTensor]:
    """q_proj has a head's query, then its gate."""
    for tensor in dense.attention(shape, prefix):
        if ".q_proj." in tensor.name:
            rows = (2 * tensor.shape[0], *tensor.shape[1:])
            yield replace(tensor, shape=rows, sections=(shape.head_dim, shape.head_dim), by_head=True)
        else:
            yield tensor


def _fused_projections(gated: GatedDelta, name: str, hidden: int) -> Iterator[WeightTensor]:
    values = gated.ratio * gated.value_dim
    sections, ratios = (gated.key_dim, gated.key_dim, values, values), (gated.ratio, gated.ratio)
    for end, gemm, parts in (("qkvz", "qkvz", sections), ("ba", "ba", ratios)):
        rows = gated.key_heads * sum(parts)
        yield WeightTensor(f"{name}.in_proj_{end}.weight", (rows, hidden), "heads", "attention", gemm, sections=parts, by_head=True)


def _flat_projections(gated: GatedDelta, name: str, hidden: int) -> Iterator[WeightTensor]:
    sections = gated.sections
    yield WeightTensor(f"{name}.in_proj_qkv.weight", (sum(sections), hidden), "heads", "attention", "qkvz", sections=sections)
    yield WeightTensor(f"{name}.in_proj_z.weight", (sections[2], hidden), "heads", "attention", "qkvz")
    for end in "ba":
        yield WeightTensor(f"{name}.in_proj_{end}.weight", (gated.value_heads, hidden), "heads", "attention", "ba")


def _gated_delta(gated: GatedDelta, name: str, hidden: int) -> Iterator[WeightTensor]:
    heads, sections = gated.key_heads, gated.sections
    yield WeightTensor(
        f"{name}.conv1d.weight", (sum(sections), 1, gated.conv), "heads", "attention", heads=heads, sections=sections
    )
    for end in ("A_log", "dt_bias"):
        yield WeightTensor(f"{name}.{end}", (gated.value_heads,), "heads", "attention", heads=heads, kept="fp32")
    yield WeightTensor(f"{name}.norm.weight", (gated.value_dim,), "replicated", "attention")
    yield WeightTensor(f"{name}.out_proj.weight", (hidden, sections[2]), "row", "attention", "o")
