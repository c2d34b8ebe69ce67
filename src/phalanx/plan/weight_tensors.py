# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint and their bytes, from config.json alone. Stages are balanced by them, and a load checks them."""

from __future__ import annotations

import math
from typing import NamedTuple

from phalanx.config.dtypes import DTYPES
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.plan import families, graphs
from phalanx.plan.families.declare import BLOCKS, SCALES
from phalanx.plan.shape import Shape

HEAD = "lm_head.weight"

Tensors = dict[str, tuple[int, ...]]
"""Name of a checkpoint tensor -> its complete shape."""


class WeightBytes(NamedTuple):
    """Bytes of the parts of a model, all ranks of a tensor-parallel group together.

    layers: one per layer. embedding: on the first stage. head: final norm and output head, on the last stage. A tied head counts
    here, too, as a stage without the embedding holds a copy.
    """

    layers: list[int]
    embedding: int
    head: int


def layer_bytes(shape: ModelShape, dtype: str) -> WeightBytes:
    """For `plan.layout.stages(layers, pp, first_bytes=embedding, last_bytes=head)`. dtype: "fp32", "fp16", "bf16", or "fp8" for
    linear layers in FP8 with their scales, and 2 bytes elsewhere. Layers that the checkpoint has in FP8 stay in FP8 with each
    dtype.

    A rank with a slice of a weight's columns has scales of its own for it; they are counted once here. Static scales of
    activations, 4 bytes each, are not counted.
    """
    size = _itemsize(dtype)
    vocabulary = shape.vocab_size * shape.hidden_size * size
    layers = [
        sum(_bytes(shape, tensor, name, dims, dtype) for tensor in _declared(shape, i) for name, dims in tensor.on_disk())
        for i in _kinds(shape)
    ]
    per_layer = layers if len(layers) > 1 else layers * shape.num_layers
    return WeightBytes(per_layer, vocabulary, vocabulary + shape.hidden_size * size)


def active_layer_bytes(shape: ModelShape, dtype: str) -> float:
    """Of the first layer's bytes, those that one token is multiplied with: of routed experts the ones that it reaches, in 16 bit
    where they are in MXFP4."""
    total = float(layer_bytes(shape, dtype).layers[0])
    experts = shape.experts_in(0)
    if experts is None:
        return total
    of_experts = (tensor for tensor in _declared(shape, 0) if tensor.experts)
    routed = sum(_bytes(shape, tensor, name, dims, dtype) for tensor in of_experts for name, dims in tensor.on_disk())
    reached = routed * experts.per_token / experts.count
    return total - routed + reached * (graphs.MXFP4_BYTES if experts.mxfp4 else 1)


def expert_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of the routed experts of all layers, which are among those of `layer_bytes`; 0 for a dense model."""
    total = 0
    for layer in range(shape.num_layers):
        if shape.experts_in(layer) is not None:
            of_experts = (tensor for tensor in _declared(shape, layer) if tensor.experts)
            total += sum(_bytes(shape, tensor, name, dims, dtype) for tensor in of_experts for name, dims in tensor.on_disk())
    return total


def _itemsize(dtype: str) -> int:
    """Bytes of one value that is not an FP8 weight. With "fp8", these values have 16 bits."""
    return 2 if dtype == "fp8" else DTYPES[dtype].itemsize


def _kinds(shape: ModelShape) -> range:
    """The layers that may differ in bytes: all, with a quantization that ignores some, or experts in some; else the first stands
    for all."""
    ignores = shape.quantization is not None and (shape.quantization.ignore or shape.quantization.targets)
    mixed = shape.experts is not None and shape.experts.dense_layers
    return range(shape.num_layers if ignores or mixed else 1)


def _declared(shape: ModelShape, layer: int) -> tuple[families.Tensor, ...]:
    return families.layer_tensors(Shape.of(shape), layer)


def _bytes(shape: ModelShape, tensor: families.Tensor, name: str, dims: tuple[int, ...], dtype: str) -> int:
    """Of the checkpoint's tensor `name`, of shape `dims`, which is `tensor` or a part of it."""
    if shape.experts is not None and shape.experts.mxfp4 and name.endswith((BLOCKS, SCALES)):
        return math.prod(dims)
    quantization = shape.quantization or (ON_LOAD if dtype == "fp8" else None)
    if tensor.kept == "fp32":
        return math.prod(dims) * 4
    plain = len(dims) == 1 or is_router(name) or tensor.kept == "16 bit"
    if quantization is None or plain or not quantization.covers(name.removesuffix(".weight")):
        return math.prod(dims) * _itemsize(dtype)
    by_row = 1 if quantization.block is None else -(-dims[1] // quantization.block[1])
    return math.prod(dims) + 4 * dims[0] * by_row


def tensors(shape: ModelShape) -> Tensors:
    """Every tensor of a checkpoint. A tied head has none of its own."""
    shapes: Tensors = {tensor.name: tensor.shape for tensor in families.outer_tensors(Shape.of(shape))}
    for layer in range(shape.num_layers):
        shapes |= layer_tensors(shape, layer)
    return shapes


def scales(shape: ModelShape) -> set[str]:
    """The names that the scales of a checkpoint may have."""
    names: set[str] = set()
    quantization = shape.quantization
    for layer in range(shape.num_layers):
        for name, dims in layer_tensors(shape, layer).items():
            layer_name = name.removesuffix(".weight")
            if len(dims) == 2 and not is_router(name) and quantization is not None and quantization.covers(layer_name):
                names |= {f"{layer_name}.{quantization.scale_name}", f"{layer_name}.input_scale"}
        names.update(*kv_scales(layer).values())
    return names


def is_router(name: str) -> bool:
    """Whether it is a router's weight, which is never quantized."""
    return name.endswith((".gate.weight", ".router.weight"))


def kv_scales(layer: int) -> dict[str, tuple[str, ...]]:
    """The names that tools give to the scales of one layer's keys ("k") and values ("v") in a cache: the first by llm-compressor
    and AutoFP8, the second by ModelOpt, the third by Quark and older tools (a scale of the layer's output). The last is the oldest:
    one scale for both."""
    attention = f"model.layers.{layer}.self_attn"
    return {
        kind: tuple(
            f"{attention}.{end}" for end in (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"{kind}_proj.output_scale", "kv_scale")
        )
        for kind in "kv"
    }


def layer_tensors(shape: ModelShape, layer: int) -> Tensors:
    """The tensors of one decoder layer."""
    return {name: dims for tensor in _declared(shape, layer) for name, dims in tensor.on_disk()}


def fused_experts(shape: ModelShape, layer: int) -> Tensors:
    """The names that transformers 5 gives to the experts' tensors where it writes them as it holds them: each layer's in one, gate
    rows before up rows. A checkpoint has these or those of `layer_tensors`."""
    experts, prefix = shape.experts_in(layer), f"model.layers.{layer}.mlp"
    if experts is None or experts.biases:  # with biases, all checkpoints have each layer's experts in one
        return {}
    return {
        f"{prefix}.experts.gate_up_proj": (experts.count, 2 * experts.intermediate, shape.hidden_size),
        f"{prefix}.experts.down_proj": (experts.count, shape.hidden_size, experts.intermediate),
        f"{prefix}.gate.weight": (experts.count, shape.hidden_size),
    }
