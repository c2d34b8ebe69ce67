# SPDX-License-Identifier: Apache-2.0
"""Llama, Mistral, Qwen2 and Qwen3: grouped-query attention and a gated MLP. The parts that the other families share."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.plan.families.declare import Part, Split, Tensor
from phalanx.plan.shape import Shape


def layer(shape: Shape, index: int) -> Iterator[Tensor]:
    """The tensors of one decoder layer."""
    prefix = f"model.layers.{index}"
    yield from attention(shape, prefix)
    yield from gated_mlp(f"{prefix}.mlp", shape.hidden_size, shape.intermediate_size, "mlp", bias=shape.mlp_bias)


def attention(shape: Shape, prefix: str) -> Iterator[Tensor]:
    """Grouped-query attention, and the two norms of a layer."""
    hidden, heads, kv_heads, dim = shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    name = f"{prefix}.self_attn"
    projections: list[tuple[str, int, bool]] = [("q_proj", heads, False), ("k_proj", kv_heads, True), ("v_proj", kv_heads, True)]
    for projection, count, keys in projections:
        split: Split = "kv_heads" if keys else "heads"
        yield Tensor(
            f"{name}.{projection}.weight", (count * dim, hidden), split, "attention", "qkv", heads=heads, kv_heads=kv_heads
        )
        if shape.qkv_bias:
            yield Tensor(f"{name}.{projection}.bias", (count * dim,), split, "attention", heads=heads, kv_heads=kv_heads)
    yield Tensor(f"{name}.o_proj.weight", (hidden, heads * dim), "row", "attention", "o")
    if shape.output_bias:
        yield Tensor(f"{name}.o_proj.bias", (hidden,), "replicated", "attention")
    if shape.qk_norm:
        yield Tensor(f"{name}.q_norm.weight", (dim,), "replicated", "norm")
        yield Tensor(f"{name}.k_norm.weight", (dim,), "replicated", "norm")
    yield from norms(prefix, hidden)


def norms(prefix: str, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.input_layernorm.weight", (hidden,), "replicated", "norm")
    yield Tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,), "replicated", "norm")


def gated_mlp(
    name: str, hidden: int, inner: int, part: Part, *, bias: bool = False, experts: int = 0,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Tensor]:  # fmt: skip
    """gate and up [inner, hidden], down [hidden, inner], of one MLP or of each expert. names: those of gate, up and down."""
    each = ".{expert}" if experts else ""
    gate, up, down = names
    for projection in (gate, up):
        yield Tensor(f"{name}{each}.{projection}.weight", (inner, hidden), "column", part, f"{part}_gate_up", experts)
        if bias:
            yield Tensor(f"{name}{each}.{projection}.bias", (inner,), "column", part, experts=experts)
    yield Tensor(f"{name}{each}.{down}.weight", (hidden, inner), "row", part, f"{part}_down", experts)
    if bias:
        yield Tensor(f"{name}{each}.{down}.bias", (hidden,), "replicated", part, experts=experts)


def outer(shape: Shape) -> Iterator[Tensor]:
    """Embedding, final norm and head; a tied head has no tensor of its own."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    yield Tensor("model.embed_tokens.weight", vocabulary, "vocabulary", "embedding")
    yield Tensor("model.norm.weight", (shape.hidden_size,), "replicated", "norm")
    if not shape.tie_word_embeddings:
        yield Tensor("lm_head.weight", vocabulary, "vocabulary", "head", "head")
