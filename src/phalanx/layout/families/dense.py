# SPDX-License-Identifier: Apache-2.0
"""Llama, Mistral, Qwen2 and Qwen3: grouped-query attention and a gated MLP. The parts that the other families share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.config.families import Norms
from phalanx.config.gemma4 import HeadSizes
from phalanx.config.model import ModelShape
from phalanx.config.text_tower import WRAPPERS
from phalanx.layout.cache import CacheTensor
from phalanx.layout.families.declare import Fused, Part, Split, WeightTensor


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer."""
    prefix = f"model.layers.{index}"
    yield from attention(shape, prefix, shape.heads_in(index))
    if shape.experts_in(index) is None:
        mlp = plain_mlp if shape.activation == "relu2" else gated_mlp
        yield from mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, "mlp", bias=shape.mlp_bias)
    else:
        yield from sparse_moe(shape, prefix)


def fused_layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """As `layer`; on disk the projections of one input are one tensor, one below the other: qkv_proj and gate_up_proj (Phi-3)."""
    tensors, at = list(layer(shape, index)), dict[str, int]()
    rows = {gemm: sum(tensor.shape[0] for tensor in tensors if tensor.gemm == gemm) for gemm in ("qkv", "mlp_gate_up")}
    for tensor in tensors:
        if tensor.gemm in rows:
            block = tensor.name.rsplit(".", 2)[0]
            name = f"{block}.{tensor.gemm.removeprefix('mlp_')}_proj.weight"
            row = at.get(name, 0)
            at[name] = row + tensor.shape[0]
            tensor = replace(tensor, fused=Fused(name, rows[tensor.gemm], row))
        yield tensor


def attention(shape: ModelShape, prefix: str, sizes: HeadSizes | None = None) -> Iterator[WeightTensor]:
    """Grouped-query attention, and the two norms of a layer. sizes: of the layer, where layers differ in them."""
    hidden, heads, (kv_heads, dim, keys_are_values, shared) = shape.hidden_size, shape.num_heads, sizes or shape.heads_in(0)
    name = f"{prefix}.self_attn"
    projections: list[tuple[str, int, bool]] = [("q_proj", heads, False)]
    if not shared:
        projections += [(projection, kv_heads, True) for projection in ("k_proj", "v_proj")[: 1 if keys_are_values else 2]]
    for projection, count, keys in projections:
        split: Split = "kv_heads" if keys else "heads"
        yield WeightTensor(
            f"{name}.{projection}.weight", (count * dim, hidden), split, "attention", "qkv", heads=heads, kv_heads=kv_heads
        )
        if shape.qkv_bias:
            yield WeightTensor(f"{name}.{projection}.bias", (count * dim,), split, "attention", heads=heads, kv_heads=kv_heads)
    yield WeightTensor(f"{name}.o_proj.weight", (hidden, heads * dim), "row", "attention", "o")
    if shape.output_bias:
        yield WeightTensor(f"{name}.o_proj.bias", (hidden,), "replicated", "attention")
    if shape.qk_norm_whole:
        yield WeightTensor(f"{name}.q_norm.weight", (heads * dim,), "heads", "norm", heads=heads)
        yield WeightTensor(f"{name}.k_norm.weight", (kv_heads * dim,), "kv_heads", "norm", heads=heads, kv_heads=kv_heads)
    elif shape.qk_norm and shape.layer_norm:
        yield WeightTensor(f"{name}.q_norm.weight", (heads, dim), "heads", "norm", heads=heads)
        yield WeightTensor(f"{name}.k_norm.weight", (kv_heads, dim), "kv_heads", "norm", heads=heads, kv_heads=kv_heads)
    elif shape.qk_norm and not shape.qk_norm_plain:
        yield from (norm(shape, f"{name}.{each}", dim) for each in ("q_norm", "k_norm")[: 1 if shared else 2])
    yield from norms(shape, prefix)


def cache(shape: ModelShape, index: int, dtype: str) -> Iterator[CacheTensor]:
    """The keys and values of one decoder layer. In int8 each of them has a scale, and those of a block and a head lie side by side,
    so that attention reads those of 16 tokens in 64 bytes."""
    window, heads, (kv_heads, head_dim, *_) = shape.windows[index], shape.num_heads, shape.heads_in(index)
    owner = shape.kv_layer(index)
    shared = any(shape.kv_layer(each) == owner != each for each in range(shape.num_layers))
    common: dict[str, Any] = {"window": window, "heads": heads, "shared": f"layer {owner}" if shared else ""}
    for name in ("key", "value"):
        yield CacheTensor(name, (kv_heads, head_dim), dtype, **common)
    if dtype == "int8":
        yield CacheTensor("token_scales", (kv_heads, 2), "bf16", token_dim=1, **common)


class NormNames(NamedTuple):
    """The checkpoint's names of the norms of a layer, before and behind its blocks; None: there is none."""

    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None


NORMS: dict[Norms, NormNames] = {
    "before": NormNames("input_layernorm", None, "post_attention_layernorm", None),
    "behind": NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "parallel": NormNames("input_layernorm", None, None, None),
    "single": NormNames("norm", None, None, None),
    "around": NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def norms(shape: ModelShape, prefix: str) -> Iterator[WeightTensor]:
    """Those of a layer, by where it has them."""
    for name in filter(None, NORMS[shape.norms]):
        yield norm(shape, f"{prefix}.{name}", shape.hidden_size)


def norm(shape: ModelShape, name: str, size: int) -> WeightTensor:
    """The weight of one norm."""
    return WeightTensor(f"{name}.weight", (size,), "replicated", "norm", kept="fp32" if shape.norm_offset else "quantized")


def gated_mlp(name: str, hidden: int, inner: int, part: Part, *, bias: bool = False) -> Iterator[WeightTensor]:
    """gate and up [inner, hidden], down [hidden, inner], of one MLP."""
    for projection in ("gate_proj", "up_proj"):
        yield WeightTensor(f"{name}.{projection}.weight", (inner, hidden), "column", part, f"{part}_gate_up")
        if bias:
            yield WeightTensor(f"{name}.{projection}.bias", (inner,), "column", part)
    yield WeightTensor(f"{name}.down_proj.weight", (hidden, inner), "row", part, f"{part}_down")
    if bias:
        yield WeightTensor(f"{name}.down_proj.bias", (hidden,), "replicated", part)


def plain_mlp(name: str, hidden: int, inner: int, part: Part, *, bias: bool = False) -> Iterator[WeightTensor]:
    """up [inner, hidden] and down [hidden, inner], of an MLP without a gate."""
    return (tensor for tensor in gated_mlp(name, hidden, inner, part, bias=bias) if ".gate_proj." not in tensor.name)


def sparse_moe(
    shape: ModelShape, prefix: str, block: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: str = "gate.e_score_correction_bias",
) -> Iterator[WeightTensor]:  # fmt: skip
    """A router and experts. block: the checkpoint's name of them. names: those of an expert's gate, up and down. bias: that of the
    router's bias, in families that have one."""
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    name, inner = f"{prefix}.{block}", experts.intermediate
    router, fused = (experts.count, hidden), f"{prefix}.mlp.experts"
    transposed = shape.wrapper is not None and WRAPPERS[shape.wrapper].experts_transposed
    yield WeightTensor(
        f"{name}.gate.weight", router, "replicated", "router", "router", fused=Fused(f"{prefix}.mlp.gate.weight", experts.count)
    )
    if experts.scoring_bias:
        own = Fused(f"{prefix}.mlp.{bias}", experts.count)
        yield WeightTensor(f"{name}.{bias}", (experts.count,), "replicated", "router", kept="fp32", fused=own)
    for number, projection in enumerate(names[:2]):
        yield WeightTensor(
            f"{name}.experts.{{expert}}.{projection}.weight", (inner, hidden), "column", "experts", "experts_gate_up",
            experts.count, fused=Fused(f"{fused}.gate_up_proj", 2 * inner, number * inner, transposed),
        )  # fmt: skip
    yield WeightTensor(
        f"{name}.experts.{{expert}}.{names[2]}.weight", (hidden, inner), "row", "experts", "experts_down", experts.count,
        fused=Fused(f"{fused}.down_proj", hidden, transposed=transposed),
    )  # fmt: skip


def outer(shape: ModelShape) -> Iterator[WeightTensor]:
    """Embedding, final norm and head; a tied head has no tensor of its own."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    yield WeightTensor("model.embed_tokens.weight", vocabulary, "vocabulary", "embedding")
    yield norm(shape, "model.norm", shape.hidden_size)
    if not shape.tie_word_embeddings:
        yield WeightTensor("lm_head.weight", vocabulary, "vocabulary", "head", "head")
