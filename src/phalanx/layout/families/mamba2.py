# SPDX-License-Identifier: Apache-2.0
"""Families with layers of Mamba-2 (arXiv 2405.21060): Granite 4 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import phalanx.layout.families.dense as dense
from phalanx.config.mamba import Mamba2
from phalanx.config.model import ModelShape
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families.declare import Fused, Part, WeightTensor


def granite_hybrid(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """Granite 4: on disk, the experts of a layer are in two tensors, and so is the MLP that all tokens reach."""
    prefix = f"model.layers.{index}"
    if shape.mamba is not None and index in shape.mamba.layers:
        yield from mixer(shape.mamba, f"{prefix}.mamba", shape.hidden_size)
        yield from dense.norms(shape, prefix)
    else:
        yield from dense.attention(shape, prefix)
    experts = shape.experts_in(index)
    if experts is None:
        yield from _shared_mlp(prefix, shape.hidden_size, shape.intermediate_size, "mlp")
        return
    yield from _experts(shape, prefix)
    yield from _shared_mlp(prefix, shape.hidden_size, experts.shared, "shared")


def nemotron_h(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """Nemotron-H: one block and its norm."""
    prefix, block, experts = f"model.layers.{index}", shape.blocks[index], shape.experts_in(index)
    name = f"{prefix}.mixer"
    if block == "attention":
        for tensor in dense.attention(shape, prefix):
            yield replace(tensor, name=tensor.name.replace(f"{prefix}.self_attn.", f"{name}."))
        return
    if shape.mamba is not None and block == "mamba":
        yield from mixer(shape.mamba, name, shape.hidden_size)
    elif experts is None:
        yield from dense.plain_mlp(name, shape.hidden_size, shape.intermediate_size, "mlp")
    else:
        for tensor in dense.sparse_moe(shape, prefix, "mixer"):
            if ".gate_proj." not in tensor.name:
                fused = Fused(f"{name}.experts.{tensor.name.split('.')[-2]}", tensor.shape[0]) if tensor.experts else None
                yield replace(tensor, fused=fused)
        yield from dense.plain_mlp(f"{name}.shared_experts", shape.hidden_size, experts.shared, "shared")
    yield from dense.norms(shape, prefix)


NEMOTRON_SPELLINGS = {
    "backbone.embeddings.": "model.embed_tokens.", "model.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm.",
    "model.norm_f.": "model.norm.", "backbone.": "model.",
}  # fmt: skip
"""Of released checkpoints and of transformers."""


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """Of Mamba-2: the inputs that the convolution still covers, x by heads, and B and C by groups; and a matrix for each head.
    Where rows verify drafts also what takes in the tokens behind the state: see `Mamba2.conv_rows`, and of each head their time
    steps, and the position of the state. Of attention: keys and values."""
    mamba = shape.mamba
    if shape.blocks and shape.blocks[index] not in ("mamba", "attention"):
        return
    if mamba is None or index not in mamba.layers:
        yield from dense.cache(shape, index, dtype)
        return
    before, heads = mamba.conv_rows, mamba.heads
    sizes: dict[str, tuple[int, ...]] = {
        "conv": (heads, before * mamba.head_dim), "group_conv": (mamba.groups, before * 2 * mamba.state_dim),
        "state": (heads, mamba.state_dim, mamba.head_dim), **({"pending": (heads, mamba.kept + 1)} if mamba.kept else {}),
    }  # fmt: skip
    for name, size in sizes.items():
        yield CacheTensor(name, size, "fp32", "request", heads=heads, revocable=mamba.kept > 0)


def mixer(mamba: Mamba2, name: str, hidden: int) -> Iterator[WeightTensor]:
    """in_proj gives gates z, x, B, C and time steps. B and C are split as KV heads are."""
    inner, of_b, of_c = mamba.sections
    sections, heads, groups = (inner, inner, of_b, of_c, mamba.heads), mamba.heads, mamba.groups
    yield WeightTensor(
        f"{name}.in_proj.weight", (sum(sections), hidden), "heads", "attention", "in_proj", heads=heads, kv_heads=groups,
        sections=sections, kv_sections=(2, 3),
    )  # fmt: skip
    conv = WeightTensor(
        f"{name}.conv1d.weight", (sum(mamba.sections), 1, mamba.conv), "heads", "attention", heads=heads, kv_heads=groups,
        sections=mamba.sections, kv_sections=(1, 2),
    )  # fmt: skip
    yield conv
    yield replace(conv, name=f"{name}.conv1d.bias", shape=conv.shape[:1])
    for end in ("A_log", "D", "dt_bias"):
        yield WeightTensor(f"{name}.{end}", (heads,), "heads", "attention", heads=heads, kept="fp32")
    yield WeightTensor(f"{name}.norm.weight", (inner,), "heads", "attention", heads=heads)
    yield WeightTensor(f"{name}.out_proj.weight", (hidden, inner), "row", "attention", "o")


_RELEASED = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
GRANITE_SPELLINGS = {
    **{f".block_sparse_moe.experts.{theirs}": f".block_sparse_moe.{ours}" for theirs, ours in _RELEASED.items()},
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
}  # fmt: skip
"""Of transformers 5, where it writes tensors as it holds them -> of released checkpoints; and what those name otherwise than an MLP
does, whose scales go by its name."""


def _experts(shape: ModelShape, prefix: str) -> Iterator[WeightTensor]:
    """By names that the experts would have one by one; `fused` says where they are."""
    block = f"{prefix}.block_sparse_moe"
    for tensor in dense.sparse_moe(shape, prefix, "block_sparse_moe"):
        if tensor.fused is not None and tensor.experts:
            name = f"{block}.{_RELEASED[tensor.fused.name.rpartition('.')[2]]}"
            yield replace(tensor, fused=tensor.fused._replace(name=name))
        else:
            yield replace(tensor, name=f"{block}.router.layer.weight", fused=None)


def _shared_mlp(prefix: str, hidden: int, inner: int, part: Part) -> Iterator[WeightTensor]:
    places = {
        "gate_proj": ("input_linear", 2 * inner, 0), "up_proj": ("input_linear", 2 * inner, inner),
        "down_proj": ("output_linear", hidden, 0),
    }  # fmt: skip
    for tensor in dense.gated_mlp(f"{prefix}.shared_mlp", hidden, inner, part):
        end, rows, row = places[tensor.name.split(".")[-2]]
        yield replace(tensor, fused=Fused(f"{prefix}.shared_mlp.{end}.weight", rows, row))
