# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights in NVFP4, for `int4_checkpoints.rewrite`: packed by compressed-tensors itself, or as ModelOpt's
specification says, value by value and without the reader's code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.int4_checkpoints import IGNORED, Encoded, Form

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = torch.float8_e4m3fn


def modelopt_nvfp4(form: Form, weight: Tensor, name: str) -> Encoded:
    """Each layer with a global scale of its own, q, k and v among them (T11)."""
    factor = weight.abs().amax() / 2688
    groups = weight.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / factor).to(FP8)
    unit = (scale.float() * factor).unsqueeze(-1)
    code = ((groups / unit).abs().unsqueeze(-1) - VALUES).abs().argmin(-1)
    meant = torch.where(groups < 0, -VALUES[code], VALUES[code]) * unit
    nibbles = (code + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    tensors = {
        "weight": nibbles[:, 0::2] + 16 * nibbles[:, 1::2], "weight_scale": scale, "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }  # fmt: skip
    return tensors, meant.flatten(1)


def modelopt_fp8(form: Form, weight: Tensor, name: str) -> Encoded:
    scale = weight.abs().amax() / 448
    stored = (weight / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, stored.float() * scale


def mixed(form: Form, weight: Tensor, name: str) -> Encoded:
    return (modelopt_fp8 if "self_attn" in name else modelopt_nvfp4)(form, weight, name)


def compressed_nvfp4(form: Form, weight: Tensor, name: str) -> Encoded:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**form.config["config_groups"]["group_0"])
    factor = 2688 / weight.abs().amax().reshape(1)
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 6 * factor).to(FP8).float()
    stored = NVFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": factor}, scheme)
    values = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)  # the tool dequantizes in bf16
    return stored, (values.unflatten(1, (-1, 16)) * (scale / factor).unsqueeze(-1)).flatten(1)


def compressed_mxfp4(form: Form, weight: Tensor, name: str) -> Encoded:
    """By the tool: e8m0 of the largest magnitude of 32 values. One group of each layer is zero, whatever its power."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**form.config["config_groups"]["group_0"])
    weight[0, :32] = 0
    top = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    scale = torch.where(top == 0, 2.0**-100, torch.exp2(torch.floor(torch.log2(top)) - 2))
    stored = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert stored["weight_scale"].dtype == torch.uint8
    values = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
    powers = torch.exp2(stored["weight_scale"].float() - 127)
    return stored, (values.unflatten(1, (-1, 32)) * powers.unsqueeze(-1)).flatten(1)


def compressed(**activations: Any) -> dict[str, Any]:
    args = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False,
        "actorder": None, "observer": "minmax", "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    inputs = {**args, **activations} if activations else None
    scheme = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head", IGNORED],
        "config_groups": {"group_0": scheme}, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def compressed_in_powers() -> dict[str, Any]:
    config = compressed()
    weights = {**config["config_groups"]["group_0"]["weights"], "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {**weights, "dynamic": True}}
    return {**config, "format": "mxfp4-pack-quantized", "config_groups": {"group_0": group}}


MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", IGNORED],
    "kv_cache_quant_algo": None,
}  # fmt: skip
FORMS = {
    "compressed-tensors": Form(compressed(), compressed_nvfp4, 16),
    "compressed-tensors with activations in 4 bits": Form(compressed(dynamic="local"), compressed_nvfp4, 16),
    "modelopt": Form(MODELOPT, modelopt_nvfp4, 16),
    "mxfp4": Form(compressed_in_powers(), compressed_mxfp4, 32),
}


def mixed_config(layers: list[str]) -> dict[str, Any]:
    """ModelOpt's MIXED_PRECISION over layers of these names."""
    kinds = {name: {"quant_algo": "FP8"} if "self_attn" in name else {"quant_algo": "NVFP4", "group_size": 16} for name in layers}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": kinds, "exclude_modules": ["lm_head"]}
