# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): multi-head latent attention, routed and shared experts after dense layers;
and V3.2 (arXiv 2512.02556), which chooses keys by an indexer.
Multi-token prediction layers are not part of them: see `layout.mtp`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import phalanx.layout.families.dense as dense
from phalanx.config.latent import Indexer
from phalanx.config.model import ModelShape
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families.declare import Fused, WeightTensor


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    prefix = f"model.layers.{index}"
    yield from _attention(shape, f"{prefix}.self_attn", index)
    yield from dense.norms(shape, prefix)
    yield from feed_forward(shape, prefix, index)


def glm4_moe(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """GLM-4.5: grouped-query attention, and the experts of DeepSeek-V3."""
    prefix = f"model.layers.{index}"
    yield from dense.attention(shape, prefix)
    yield from feed_forward(shape, prefix, index)


_HY_V3 = {".gate.weight": ".router.gate.weight", ".e_score_correction_bias": ".expert_bias", ".shared_experts.": ".shared_mlp."}
"""Parts of the names in transformers -> in released checkpoints."""


def hy_v3(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """Hy3: the tensors of GLM-4.5, of which released checkpoints name the router's and the shared experts' otherwise."""
    prefix = f"model.layers.{index}"
    yield from dense.attention(shape, prefix)
    for tensor in feed_forward(shape, prefix, index, "e_score_correction_bias"):
        own = next((own for own in _HY_V3 if own in tensor.name), "")
        released, rows = tensor.name.replace(own, _HY_V3.get(own, "")) if own else "", tensor.shape[0]
        if released and tensor.gemm:  # tools quantize what is released
            yield replace(tensor, name=released, fused=Fused(tensor.name, rows))
        else:
            yield replace(tensor, fused=Fused(released, rows)) if released else tensor


def ernie_moe(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """Ernie 4.5: the tensors of GLM-4.5; checkpoints have the router in fp32, and its bias as a row beside it. Those of Ernie 4.5
    VL as released have the router's weight transposed, and the bias of the experts of images in a second row; transformers has
    text's under text_moe."""
    prefix, mixed = f"model.layers.{index}", shape.wrapper is not None
    released, own = f"{prefix}.mlp", f"{prefix}.mlp.{'text_moe.' if mixed else ''}"
    yield from dense.attention(shape, prefix)
    for tensor in feed_forward(shape, prefix, index, "moe_statics.e_score_correction_bias"):
        if tensor.name.endswith("e_score_correction_bias"):
            names = f"{released}.moe_statics.e_score_correction_bias", f"{own}gate.moe_statics.e_score_correction_bias"
            name, other = reversed(names) if mixed else names
            yield replace(tensor, name=name, shape=(1, *tensor.shape), fused=Fused(other, 2 if mixed else 1))
        elif tensor.gemm == "router":
            weight = f"{released}.gate.weight"
            fused = Fused(weight, tensor.shape[0], transposed=True) if mixed else tensor.fused
            yield replace(tensor, kept="fp32", name=f"{own}gate.weight", fused=fused)
        elif mixed and tensor.experts and tensor.fused is not None:
            yield replace(tensor, fused=tensor.fused._replace(name=tensor.fused.name.replace(f"{released}.", own)))
        else:
            yield tensor


def of_images(shape: ModelShape, index: int) -> tuple[str, ...]:
    """The beginnings of the names of the experts of images in a layer of Ernie 4.5 VL, and of their router's."""
    experts, name = shape.experts_in(index), f"model.layers.{index}.mlp"
    if shape.wrapper is None or experts is None:
        return ()
    released = (f"{name}.experts.{number}." for number in range(experts.count, 2 * experts.count))
    return f"{name}.vision_moe.", f"{name}.gate.weight_1", *released


def feed_forward(
    shape: ModelShape, prefix: str, index: int, bias: str = "gate.e_score_correction_bias"
) -> Iterator[WeightTensor]:  # fmt: skip
    """Routed and shared experts, or the MLP of a dense layer. bias: the name of the router's."""
    experts = shape.experts_in(index)
    if experts is None:
        yield from dense.gated_mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, "mlp")
        return
    yield from dense.sparse_moe(shape, prefix, bias=bias)
    if experts.shared:
        yield from dense.gated_mlp(f"{prefix}.mlp.shared_experts", shape.hidden_size, experts.shared, "shared")


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """A token's normed latent, then the rotated key that all heads share. A rank that has the token holds all of it; and its key of
    the indexer, in FP8 with a scale."""
    assert shape.latent is not None
    indexer = shape.latent.indexer
    yield CacheTensor("latent", (1, shape.latent.cached), dtype, window=shape.windows[index], divided=True)
    if indexer is None or not indexer.computes[index]:
        return
    yield CacheTensor("index_key", (1, indexer.head_dim), dtype)
    if dtype == "fp8":
        yield CacheTensor("index_scale", (1, 1), "fp32")


def _attention(shape: ModelShape, name: str, index: int) -> Iterator[WeightTensor]:
    """Down-projections are replicated over tensor-parallel ranks, up-projections are split by heads. What reads the layer's input
    is one GEMM. kv_b_proj is multiplied by parts of each head, and so it is dequantized. The indexer is replicated: split by heads,
    its scores of all tokens before a query would have to be summed over ranks."""
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_heads
    assert latent is not None
    query = heads * (latent.nope + latent.rope)
    if latent.q_rank is None:
        yield WeightTensor(f"{name}.q_proj.weight", (query, hidden), "heads", "attention", "qkv_a", heads=heads)
    else:
        yield WeightTensor(f"{name}.q_a_proj.weight", (latent.q_rank, hidden), "replicated", "attention", "qkv_a")
        yield WeightTensor(f"{name}.q_a_layernorm.weight", (latent.q_rank,), "replicated", "norm")
        yield WeightTensor(f"{name}.q_b_proj.weight", (query, latent.q_rank), "heads", "attention", "q_b", heads=heads)
    if latent.indexer is not None and latent.indexer.computes[index]:
        assert latent.q_rank is not None
        yield from _indexer(latent.indexer, f"{name}.indexer", hidden, latent.q_rank)
    compressed = latent.kv_rank + latent.rope
    yield WeightTensor(f"{name}.kv_a_proj_with_mqa.weight", (compressed, hidden), "replicated", "attention", "qkv_a")
    yield WeightTensor(f"{name}.kv_a_layernorm.weight", (latent.kv_rank,), "replicated", "norm")
    up = heads * (latent.nope + latent.v)
    yield WeightTensor(f"{name}.kv_b_proj.weight", (up, latent.kv_rank), "heads", "attention", "kv_b", heads=heads, kept="16 bit")
    yield WeightTensor(f"{name}.o_proj.weight", (hidden, heads * latent.v), "row", "attention", "o")


def _indexer(indexer: Indexer, name: str, hidden: int, q_rank: int) -> Iterator[WeightTensor]:
    """Its queries and its key are in the GEMMs of those that they share an input with."""
    yield WeightTensor(f"{name}.wq_b.weight", (indexer.heads * indexer.head_dim, q_rank), "replicated", "attention", "q_b")
    yield WeightTensor(f"{name}.wk.weight", (indexer.head_dim, hidden), "replicated", "attention", "qkv_a")
    for part in ("weight", "bias"):
        yield WeightTensor(f"{name}.k_norm.{part}", (indexer.head_dim,), "replicated", "norm")
    yield WeightTensor(
        f"{name}.weights_proj.weight", (indexer.heads, hidden), "replicated", "attention", "index_weights", kept="fp32"
    )
