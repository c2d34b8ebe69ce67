# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights on each rank, from the declared tensors alone. The engine balances its stages with these, and the planner and
the doctor promise with them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from phalanx.config.dtypes import DTYPES
from phalanx.config.model import ModelShape
from phalanx.config.quantization import Quantization, loaded_as, on_load
from phalanx.layout.families import WeightTensor, layer_tensors, outer_tensors
from phalanx.layout.layout import Layout, stages
from phalanx.layout.quantized_bytes import quantized_bytes

IN_4_BITS = ("INT4", "MXFP4", "NVFP4")
WIDENED_BYTES = 4
"""Bytes of a weight for each byte of it in 4 bits, where this counts: it is multiplied in 16 bit."""


def itemsize(dtype: str) -> int:
    """Bytes of a value that is not in FP8 or less: with "fp8" and "int4" that is one in 16 bit."""
    return DTYPES["bf16" if on_load(dtype) else dtype].itemsize


def tensor_bytes(shape: ModelShape, tensor: WeightTensor, dtype: str, layout: Layout) -> int:
    """Bytes of a declared tensor on one rank, its scales among them.

    dtype: "fp32", "fp16", "bf16", or "fp8" or "int4" for GEMMs in these; GEMMs that the checkpoint quantizes stay so with each.
    An expert's weights are split `tp` ways under ep; under moe_ep a rank holds 1/moe_ep of the experts, each split tp/moe_ep ways.
    """
    local, count = local_shape(tensor, layout), local_experts(tensor, layout)
    elements = math.prod(local)
    size, scheme = itemsize(dtype), scheme_of(shape, tensor, dtype)
    if tensor.kept == "fp32":
        return count * elements * 4
    if scheme is None:
        return count * elements * size
    if tensor.part == "head":  # without the padding of the vocabulary
        local = min(local[0], shape.vocab_size), local[1]
    return count * quantized_bytes(scheme, *local, in_pairs=size == 2)


def scheme_of(shape: ModelShape, tensor: WeightTensor, dtype: str) -> Quantization | None:
    """How the weights of a GEMM are quantized; None: they are not."""
    quantization = loaded_as(shape.quantization, on_load(dtype))
    plain = not tensor.gemm or tensor.part == "router" or tensor.kept != "quantized"
    if plain or quantization is None:
        return None
    return quantization.head if tensor.part == "head" else quantization.of(tensor.name.removesuffix(".weight"))


def stored_in(shape: ModelShape, tensor: WeightTensor, dtype: str) -> str:
    """What holds the weights of a tensor: as `Quantization.stored` says, or "16 bit", which stands for fp32, too."""
    scheme = scheme_of(shape, tensor, dtype)
    return "16 bit" if scheme is None else scheme.stored


def local_shape(tensor: WeightTensor, layout: Layout) -> tuple[int, ...]:
    return tensor.local(layout.tp // layout.moe_ep if tensor.part == "experts" else layout.tp)


def local_experts(tensor: WeightTensor, layout: Layout) -> int:
    """How many experts' tensors a rank holds, copies among them, the most where they differ; 1 for a tensor that is none of an
    expert."""
    return -(-(tensor.experts + layout.redundant) // (layout.dp * layout.moe_ep)) if tensor.experts else 1


@cache
def kind_of(shape: ModelShape) -> tuple[int, ...]:
    """Each layer -> the first layer that is like it: with equal tensors in equal dtypes, and the same window."""
    first: dict[object, int] = {}
    kinds = []
    for layer in range(shape.num_layers):
        tensors = tuple((_unnamed(tensor), scheme_of(shape, tensor, "fp8")) for tensor in layer_tensors(shape, layer))
        kinds.append(first.setdefault((tensors, shape.windows[layer]), layer))
    return tuple(kinds)


def _unnamed(tensor: WeightTensor) -> WeightTensor:
    """Without the names of one layer."""
    return replace(tensor, name="", fused=None if tensor.fused is None else tensor.fused._replace(name=""))


@cache
def layer_bytes(shape: ModelShape, layer: int, dtype: str, layout: Layout) -> int:
    """Bytes of one layer's weights on one rank."""
    return sum(tensor_bytes(shape, tensor, dtype, layout) for tensor in layer_tensors(shape, layer))


@cache
def active_layer_bytes(shape: ModelShape, layer: int, dtype: str, layout: Layout) -> float:
    """Of one layer's bytes on one rank, those that one token of each group is multiplied with; in 16 bit where they are in 4."""
    total, experts = 0.0, shape.experts
    for tensor in layer_tensors(shape, layer):
        reached = 1.0
        if tensor.experts and experts is not None:
            reached = experts.per_token / experts.count * layout.dp
        if stored_in(shape, tensor, dtype) in IN_4_BITS:
            reached *= WIDENED_BYTES
        total += tensor_bytes(shape, tensor, dtype, layout) * reached
    return total


def expert_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of the routed experts of all layers; 0 for a dense model."""
    return sum(
        tensor_bytes(shape, tensor, dtype, Layout())
        for layer in range(shape.num_layers) for tensor in layer_tensors(shape, layer) if tensor.experts
    )  # fmt: skip


@cache
def stage_layers(shape: ModelShape, dtype: str, pp: int) -> tuple[range, ...]:
    """The layers of each pipeline stage: the largest stage has as few bytes as possible. A tied head counts on the last stage, too,
    as a stage without the embedding holds a copy. Layers that share what one of them chose, or its keys and values, are on one
    stage."""
    layers = range(shape.num_layers)
    begins = [layer for layer in layers if shape.may_begin_stage(layer)]
    runs = [range(begin, end) for begin, end in zip(begins, [*begins[1:], layers.stop], strict=True)]
    kinds = kind_of(shape)
    sizes = [sum(layer_bytes(shape, kinds[layer], dtype, Layout()) for layer in run) for run in runs]
    vocabulary, norm = (count * shape.hidden_size * itemsize(dtype) for count in (shape.vocab_size, 1))
    first = vocabulary + layer_input_bytes(shape, dtype, Layout())
    last = tensor_bytes(shape, head(shape), dtype, Layout()) + norm
    divided = stages(sizes, pp, first_bytes=first, last_bytes=last)
    return tuple(range(runs[part.start].start, runs[part.stop - 1].stop) for part in divided)


def head(shape: ModelShape) -> WeightTensor:
    """The output head; a tied one is the embedding."""
    outer = {tensor.part: tensor for tensor in outer_tensors(shape)}
    return outer.get("head", outer["embedding"])


def embedding_bytes(shape: ModelShape, dtype: str, layout: Layout) -> int:
    """Bytes of the embedding on one rank of a stage that has it."""
    [tensor] = (tensor for tensor in outer_tensors(shape) if tensor.part == "embedding")
    return math.prod(tensor.local(layout.tp)) * itemsize(dtype)


def layer_input_bytes(shape: ModelShape, dtype: str, layout: Layout) -> int:
    """Bytes of what makes the embeddings by layer, on one rank of the first stage; 0 without any."""
    return sum(tensor_bytes(shape, each, dtype, layout) for each in outer_tensors(shape) if each.part == "layer_inputs")


@cache
def weight_bytes(shape: ModelShape, dtype: str, layout: Layout) -> tuple[int, ...]:
    """Bytes of weights of one rank of each stage, as `RankFacts.bytes["weights"]` counts them."""
    kinds = kind_of(shape)
    outer = {tensor.part: tensor for tensor in outer_tensors(shape)}
    vocabulary = embedding_bytes(shape, dtype, layout)
    stage_bytes = []
    ranges = stage_layers(shape, dtype, layout.pp)
    for layers in ranges:
        total = sum(layer_bytes(shape, kinds[layer], dtype, layout) for layer in layers)
        total += sum(4 * (rotary.rotated // 2) for rotary in {shape.rotary_in(layer) for layer in layers})
        first, last = layers.start == 0, layers.stop == shape.num_layers
        total += vocabulary + layer_input_bytes(shape, dtype, layout) if first else 0
        if last:
            shared = first and shape.tie_word_embeddings
            total += tensor_bytes(shape, outer["norm"], dtype, layout)
            total += 0 if shared else tensor_bytes(shape, head(shape), dtype, layout)
        stage_bytes.append(total)
    return tuple(stage_bytes)
