# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints in every form that is read, made by hand from a plain one, each beside the plain checkpoint that it stands for.

    stored, meant = rewrite(plain, tmp_path, "modelopt")

`meant` holds the dequantized weights in fp32: what a GEMM with 16-bit activations must give.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
BLOCK = (24, 20)  # divides nothing: slices of ranks begin and end within blocks
IGNORED = "model.layers.1.mlp.down_proj"

Encoded = tuple[Tensor, dict[str, Tensor], Tensor]
"""e4m3 weight, its scales by the end of their names, and what both mean in fp32."""


def per_tensor(weight: Tensor) -> Encoded:
    scale = weight.abs().amax() / 448
    stored = (weight / scale).to(FP8)
    return stored, {"weight_scale": scale}, stored.float() * scale


def per_channel(weight: Tensor) -> Encoded:
    scale = weight.abs().amax(-1, keepdim=True) / 448
    stored = (weight / scale).to(FP8)
    return stored, {"weight_scale": scale.bfloat16().float()}, stored.float() * scale.bfloat16().float()


def flat_channels(weight: Tensor) -> Encoded:
    stored, scales, meant = per_channel(weight)
    return stored, {"weight_scale": scales["weight_scale"].squeeze(-1)}, meant


def per_block(weight: Tensor, name: str = "weight_scale_inv") -> Encoded:
    rows, columns = BLOCK
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    stored, meant = torch.empty(weight.shape, dtype=FP8), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[here].abs().amax() / 448
            stored[here] = (weight[here] / scale[i, j]).to(FP8)
            meant[here] = stored[here].float() * scale[i, j]
    return stored, {name: scale}, meant


def with_input_scale(encode: Callable[[Tensor], Encoded], shape: tuple[int, ...] = ()) -> Callable[[Tensor], Encoded]:
    def act(weight: Tensor) -> Encoded:
        stored, scales, meant = encode(weight)
        # Layers on one input differ in it, as calibrators that look at each alone leave them.
        shaped = {name: scale.reshape(shape) if scale.numel() == 1 else scale for name, scale in scales.items()}
        return stored, {**shaped, "input_scale": (0.02 + weight.abs().mean() / 100).reshape(shape)}, meant

    return act


def in_names_of_transformers(encode: Callable[[Tensor], Encoded]) -> Callable[[Tensor], Encoded]:
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}

    def act(weight: Tensor) -> Encoded:
        stored, scales, meant = encode(weight)
        return stored, {names[end]: scale for end, scale in scales.items()}, meant

    return act


def _group(strategy: str, *, dynamic: bool | None, **more: Any) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    activations = None if dynamic is None else {**number, "dynamic": dynamic, "strategy": "token" if dynamic else "tensor"}
    return {
        "targets": ["Linear"],
        "weights": {**number, "dynamic": False, "strategy": strategy, **more},
        "input_activations": activations,
    }


def _compressed(*, kv: bool = False, **group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", IGNORED],
        "config_groups": {"group_0": _group(**group)},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False} if kv else None,
    }  # fmt: skip


_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.1.mlp.down_proj*"]}
_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
    "modules_to_not_convert": [IGNORED],
}  # fmt: skip

FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded], str]] = {
    # form -> its configuration, how it stores a linear layer, and what stands before k_scale and v_scale ("-": there are none)
    "modelopt": (_MODELOPT, with_input_scale(per_tensor), "proj"),
    "modelopt in config.json": ({"quant_method": "modelopt", **_MODELOPT}, with_input_scale(per_tensor), "proj"),
    "modelopt per channel": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head", IGNORED]}, flat_channels, "-",
    ),
    "compressed static": (_compressed(strategy="tensor", dynamic=False, kv=True), with_input_scale(per_tensor, (1,)), ""),
    "compressed dynamic": (_compressed(strategy="channel", dynamic=True), per_channel, "-"),
    "compressed weights only": (_compressed(strategy="channel", dynamic=None), per_channel, "-"),
    "compressed blocks": (
        _compressed(strategy="block", dynamic=True, block_structure=list(BLOCK)),
        lambda weight: per_block(weight, "weight_scale"), "-",
    ),
    "blocks": (_BLOCKS, per_block, "-"),
    "one scale, transformers": (
        {
            "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
            "modules_to_not_convert": [IGNORED],
        },
        in_names_of_transformers(with_input_scale(per_tensor)), "-",
    ),
    "one scale": ({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": [IGNORED]}, per_tensor, "-"),
}  # fmt: skip

QUANTIZED = ("_proj", "_with_mqa", "_qkvz", "shared_mlp.input_linear", "shared_mlp.output_linear", "indexer.wq_b", "indexer.wk")
"""How the names of linear layers end that tools quantize."""
KV_SCALES = (0.05, 0.02)


def rewrite(plain: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Write the checkpoint `plain` in a form of FORMS, and the plain one that it stands for; returns both folders."""
    declared, encode, scales_at = FORMS[form]
    stored, meant = Path(shutil.copytree(plain, folder / "stored")), Path(shutil.copytree(plain, folder / "meant"))
    quantized, widened = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        quantized[name], widened[name] = tensor, tensor.float()
        if layer.endswith(QUANTIZED) and layer != IGNORED and not layer.endswith("indexer.weights_proj"):
            quantized[name], scales, widened[name] = encode(tensor.float())
            quantized |= {f"{layer}.{end}": scale for end, scale in scales.items()}
        if layer.endswith("self_attn.k_proj") and scales_at != "-":
            attention = layer.removesuffix(".k_proj")
            for kind, scale in zip("kv", KV_SCALES, strict=True):
                inner = f"{kind}_proj." if scales_at == "proj" else ""
                quantized[f"{attention}.{inner}{kind}_scale"] = torch.tensor(scale).reshape(() if scales_at else (1,))
    save_file({name: tensor.contiguous() for name, tensor in quantized.items()}, stored / "model.safetensors", {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in widened.items()}, meant / "model.safetensors", {"format": "pt"})
    if form == "modelopt":
        content = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": declared}
        (stored / "hf_quant_config.json").write_text(json.dumps(content), encoding="utf-8")
    else:
        declare(stored, declared)
    return stored, meant


def rewrite_by_128(plain: Path, folder: Path, *ignored: str) -> tuple[Path, Path]:
    """`rewrite` in blocks of 128 x 128, as the released DeepSeek-V3 has them. ignored: further modules that are not quantized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "BLOCK", (128, 128))
        patch.setitem(FORMS["blocks"][0], "weight_block_size", [128, 128])
        patch.setitem(FORMS["blocks"][0], "modules_to_not_convert", [IGNORED, *ignored])
        return rewrite(plain, folder, "blocks")


def declare(folder: Path, declared: dict[str, Any]) -> None:
    """Put a quantization_config into config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "quantization_config": declared}), encoding="utf-8")
