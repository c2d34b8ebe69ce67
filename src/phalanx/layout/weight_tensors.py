# SPDX-License-Identifier: Apache-2.0
"""The names of a checkpoint's tensors, from config.json alone: a load checks them."""

from __future__ import annotations

from phalanx.config.model import ModelShape
from phalanx.config.quantization import GROUP_UNIT
from phalanx.layout import families

Tensors = dict[str, tuple[int, ...]]
"""Name of a checkpoint tensor -> its complete shape."""

BLOCKS, SCALES = "_blocks", "_scales"
"""What is appended to the name of a tensor of all experts in MXFP4: of its values, uint8 [..., blocks, 16], two in a byte; and of
the scales of blocks, [..., blocks]."""


def tensors(shape: ModelShape) -> Tensors:
    """Every tensor of a checkpoint. A tied head has none of its own."""
    shapes: Tensors = {tensor.name: tensor.shape for tensor in families.outer_tensors(shape)}
    for layer in range(shape.num_layers):
        shapes |= layer_tensors(shape, layer)
    return shapes


def scales(shape: ModelShape) -> set[str]:
    """The names that the scales of a checkpoint may have."""
    names, quantization = set[str](), shape.quantization
    if quantization is not None and quantization.head is not None and not shape.tie_word_embeddings:
        names.update(f"lm_head.{end}" for end in quantization.head.beside_weight)
    for layer in range(shape.num_layers):
        names.update(*kv_scales(layer).values())
        for tensor in families.layer_tensors(shape, layer):
            if quantization is None or tensor.part == "router" or len(tensor.shape) != 2:
                continue
            stored = [*tensor.expand(), *([tensor.fused.name] if tensor.fused is not None and not tensor.experts else [])]
            for layer_name in (name.removesuffix(".weight") for name in stored):
                scheme = quantization.of(layer_name)
                names.update(f"{layer_name}.{end}" for end in (() if scheme is None else scheme.beside_weight))
    return names


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
    tensors: Tensors = {}
    for tensor in families.layer_tensors(shape, layer):
        scheme = None if shape.quantization is None or not tensor.gemm else shape.quantization.of(tensor.name)
        if scheme is not None and scheme.weights == "mxfp4":
            (out, inputs), unit = tensor.shape, GROUP_UNIT
            tensors[f"{tensor.name}{BLOCKS}"] = (tensor.experts, out, -(-inputs // unit), unit // 2)
            tensors[f"{tensor.name}{SCALES}"] = (tensor.experts, out, -(-inputs // unit))
        else:
            tensors |= dict(tensor.on_disk())
    return tensors


def fused_experts(shape: ModelShape, layer: int) -> Tensors:
    """The names that transformers 5 gives to the experts' tensors where it writes them as it holds them: each layer's in one, gate
    rows before up rows. A checkpoint has these or those of `layer_tensors`."""
    tensors = families.layer_tensors(shape, layer)
    return {tensor.fused.name: tensor.fused_shape for tensor in tensors if tensor.fused is not None}
