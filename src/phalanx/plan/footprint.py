# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank by kind, from shapes alone: weights to the byte, activations and graphs as no start has exceeded them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from phalanx.config.dtypes import DTYPES
from phalanx.config.quantization import ON_LOAD
from phalanx.plan.coefficients import document
from phalanx.plan.families import Tensor, layer_tensors, outer_tensors
from phalanx.plan.graphs import graph_sizes
from phalanx.plan.layout import stages
from phalanx.plan.memory import GRAPH_BYTES
from phalanx.plan.shape import Shape

MXFP4_BITS = 4 + 8 / 32
"""A 4-bit value, and its part of the 8-bit scale that 32 of them share (OCP Microscaling formats 1.0)."""


@dataclass(frozen=True)
class Split:
    """How one copy of a model stands on its ranks. ep: groups over which experts and requests are split, world = pp x ep x tp;
    moe_ep: experts split inside the tensor-parallel group."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    moe_ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ep


def itemsize(dtype: str) -> int:
    """Bytes of a value that is not in FP8 or less: with "fp8" that is one in 16 bit."""
    return DTYPES["bf16" if dtype == "fp8" else dtype].itemsize


def tensor_bytes(shape: Shape, tensor: Tensor, dtype: str, split: Split) -> int:
    """Bytes of a declared tensor on one rank, its scales among them.

    dtype: "fp32", "fp16", "bf16", or "fp8" for GEMMs in FP8; GEMMs that the checkpoint stores in FP8 or MXFP4 stay so with each.
    An expert's weights are split `tp` ways under ep; under moe_ep a rank holds 1/moe_ep of the experts, each split tp/moe_ep ways.
    """
    local, count = local_shape(tensor, split), local_experts(tensor, split)
    elements = math.prod(local)
    if shape.experts is not None and shape.experts.mxfp4 and tensor.part == "experts" and tensor.gemm:
        return count * math.ceil(elements * MXFP4_BITS / 8)
    size, quantization = itemsize(dtype), shape.quantization or (ON_LOAD if dtype == "fp8" else None)
    covered = quantization is not None and quantization.covers(tensor.name.removesuffix(".weight"))
    if not covered or not tensor.gemm or tensor.part in ("router", "head") or quantization is None:
        return count * elements * size
    by_row = 1 if quantization.block is None else -(-local[1] // quantization.block[1])
    return count * (elements + 4 * local[0] * by_row)


def in_fp8(shape: Shape, tensor: Tensor, dtype: str) -> bool:
    """Whether the weights of a GEMM are in FP8."""
    quantization = shape.quantization or (ON_LOAD if dtype == "fp8" else None)
    plain = not tensor.gemm or tensor.part in ("router", "head")
    return not plain and quantization is not None and quantization.covers(tensor.name.removesuffix(".weight"))


def local_shape(tensor: Tensor, split: Split) -> tuple[int, ...]:
    return tensor.local(split.tp // split.moe_ep if tensor.part == "experts" else split.tp)


def local_experts(tensor: Tensor, split: Split) -> int:
    """How many experts' tensors a rank holds, the most where they differ; 1 for a tensor that is none of an expert."""
    return -(-tensor.experts // (split.ep * split.moe_ep)) if tensor.experts else 1


@cache
def kinds(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(a layer, how many are like it): layers whose tensors have equal shapes and dtypes."""
    quantization = shape.quantization
    if quantization is not None and (quantization.targets or quantization.ignore):
        by_size: dict[object, list[int]] = {}
        for layer in range(shape.num_layers):
            sizes = tuple(tensor_bytes(shape, tensor, "bf16", Split()) for tensor in layer_tensors(shape, layer))
            by_size.setdefault((sizes, shape.windows[layer]), []).append(layer)
        return tuple((layers[0], len(layers)) for layers in by_size.values())
    groups: dict[object, list[int]] = {}
    for layer in range(shape.num_layers):
        groups.setdefault((shape.experts_in(layer) is not None, shape.windows[layer]), []).append(layer)
    return tuple((layers[0], len(layers)) for layers in groups.values())


@cache
def layer_weight_bytes(shape: Shape, layer: int, dtype: str, split: Split) -> int:
    """Bytes of one layer's weights on one rank."""
    return sum(tensor_bytes(shape, tensor, dtype, split) for tensor in layer_tensors(shape, layer))


@cache
def stage_layers(shape: Shape, dtype: str, pp: int) -> tuple[range, ...]:
    """The layers of each pipeline stage, balanced as the engine balances them."""
    one = Split()
    kind_of = _kind_of(shape)
    sizes = [layer_weight_bytes(shape, kind_of[layer], dtype, one) for layer in range(shape.num_layers)]
    vocabulary = shape.vocab_size * shape.hidden_size * itemsize(dtype)
    return tuple(stages(sizes, pp, first_bytes=vocabulary, last_bytes=vocabulary + shape.hidden_size * itemsize(dtype)))


def _kind_of(shape: Shape) -> dict[int, int]:
    """Each layer -> the first layer that is like it."""
    quantization = shape.quantization
    if quantization is not None and (quantization.targets or quantization.ignore):
        return {layer: layer for layer in range(shape.num_layers)}
    first: dict[object, int] = {}
    return {
        layer: first.setdefault((shape.experts_in(layer) is not None, shape.windows[layer]), layer)
        for layer in range(shape.num_layers)
    }


@cache
def weight_bytes(shape: Shape, dtype: str, split: Split) -> tuple[int, ...]:
    """Bytes of weights of one rank of each stage, as `RankFacts.bytes["weights"]` counts them."""
    kind_of, size = _kind_of(shape), itemsize(dtype)
    outer = {tensor.part: tensor for tensor in outer_tensors(shape)}
    vocabulary = math.prod(outer["embedding"].local(split.tp)) * size
    rotary = 4 * (shape.latent.rope if shape.latent else shape.head_dim) // 2
    stage_bytes = []
    ranges = stage_layers(shape, dtype, split.pp)
    for layers in ranges:
        total = sum(layer_weight_bytes(shape, kind_of[layer], dtype, split) for layer in layers) + rotary
        first, last = layers.start == 0, layers.stop == shape.num_layers
        total += vocabulary if first else 0
        total += (0 if first and shape.tie_word_embeddings else vocabulary) + shape.hidden_size * size if last else 0
        stage_bytes.append(total)
    return tuple(stage_bytes)


def kv_token_bytes(shape: Shape, kv_itemsize: int, dtype: str, split: Split) -> tuple[int, ...]:
    """Bytes of one token's KV cache on one rank of each stage."""
    per_layer = shape.kv_elements(0, split.tp) * kv_itemsize
    return tuple(len(layers) * per_layer for layers in stage_layers(shape, dtype, split.pp))


OVERHEADS = ("constant", "ranks", "stages", "per_hidden_byte", "per_inner_byte")
"""Coefficients of what is neither weights nor KV cache nor graphs, in GB but for the last two; `data/coefficients.json`,
"memory"."""


def overhead_features(shape: Shape, split: Split, max_num_tokens: int) -> list[float]:
    """What `OVERHEADS` multiply, in order: 1, other ranks, other stages (1e9 each), and bytes of a full step's hidden and inner
    states.

    The constant holds the CUDA context, workspaces of libraries and what grows with a step's tokens alike in all models, so that it
    grows from a step of 8,192 tokens on.
    """
    tokens = -(-max_num_tokens // split.ep)
    width = shape.intermediate_size if shape.experts is None else max(
        shape.experts.intermediate * shape.experts.per_token + shape.experts.shared, shape.intermediate_size
    )  # fmt: skip
    grown = max(max_num_tokens / 8192, 1.0)
    return [
        1e9 * grown, 1e9 * float(split.world > 1), 1e9 * float(split.pp > 1), 2.0 * tokens * shape.hidden_size,
        2.0 * tokens * width / split.tp,
    ]  # fmt: skip


def graph_bytes(max_batch_size: int, max_num_tokens: int, pp: int) -> int:
    """Set aside for CUDA graphs, as the engine does: so much for each."""
    rows = -(-max_batch_size // pp)
    return GRAPH_BYTES * sum(map(len, graph_sizes(rows, max_num_tokens)))


def overhead_bytes(shape: Shape, split: Split, max_batch_size: int, max_num_tokens: int) -> int:
    """What one rank takes beside weights and KV cache, never less than a committed start took: activations of the largest step,
    CUDA context, buffers of collectives, graphs."""
    memory = document()["memory"]
    features = overhead_features(shape, split, max_num_tokens)
    rest = sum(memory[name] * feature for name, feature in zip(OVERHEADS, features, strict=True))
    return int(rest) + graph_bytes(max_batch_size, max_num_tokens, split.pp)
