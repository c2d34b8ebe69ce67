# SPDX-License-Identifier: Apache-2.0
"""What checkpoints say about their FP8 weights: read as meant, or refused with what is read."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from phalanx.config.json_fields import JsonFields
from phalanx.config.model import ModelShape, load_config
from phalanx.config.quantization import Quantization, read_quantization, require_uniform
from phalanx.errors import ModelError

NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*layers\\.0\\.self_attn"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**NUMBER, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBER, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip


def read(declared: Any) -> Quantization | None:
    return read_quantization(JsonFields({"quantization_config": declared}, "config.json"))


def changed(path: str, value: Any) -> dict[str, Any]:
    declared = copy.deepcopy(COMPRESSED)
    *way, last = path.split("/")
    inner = declared
    for step in way:
        inner = inner[step]
    inner[last] = value
    return declared


IN_BLOCKS = changed("config_groups/group_0/weights", {**NUMBER, "strategy": "block", "block_structure": [128, 128]})


def test_a_plain_checkpoint() -> None:
    assert read(None) is None


@pytest.mark.parametrize(
    ("declared", "weights", "activations", "scale_name", "kv"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor", "static", "weight_scale", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "tensor", "static", "weight_scale", True),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "channel", "token", "weight_scale", False),
        (COMPRESSED, "channel", "token", "weight_scale", False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "block", "token", "weight_scale_inv", False),
        (IN_BLOCKS, "block", "token", "weight_scale", False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor", "static", "weight_scale", False),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "tensor", "token", "weight_scale", True),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "kv_cache_scheme": "static"},
            "block",
            "token",
            "weight_scale_inv",
            True,
        ),
        (changed("kv_cache_scheme", {**NUMBER, "strategy": "tensor", "dynamic": False}), "channel", "token", "weight_scale", True),
    ],
)
def test_what_is_read(declared: dict[str, Any], weights: str, activations: str, scale_name: str, kv: bool) -> None:
    quantization = read(declared)
    assert quantization is not None
    assert (quantization.weights, quantization.activations, quantization.scale_name, quantization.kv) == (
        weights,
        activations,
        scale_name,
        kv,
    )
    assert quantization.block == ((128, 128) if weights == "block" else None)


@pytest.mark.parametrize(
    ("declared", "covered", "plain"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.0.*"]}, "1.mlp", "0.mlp"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.1.mlp.up_proj"]}, "11.mlp", "1.mlp"),
        (COMPRESSED, "0.mlp", "0.self_attn"),
        (changed("ignore", ["model.layers.1.mlp.up_proj"]), "11.mlp", "1.mlp"),
        (changed("config_groups/group_0/targets", ["re:.*mlp"]), "0.mlp", "0.self_attn"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]}, "11.mlp", "1.mlp"),
        ({"quant_method": "fp8", "ignored_layers": ["up_proj"]}, None, "1.mlp"),
    ],
)
def test_which_layers_are_left_out(declared: dict[str, Any], covered: str | None, plain: str) -> None:
    quantization = read(declared)
    assert quantization is not None
    assert covered is None or quantization.covers(f"model.layers.{covered}.up_proj")
    assert not quantization.covers(f"model.layers.{plain}.up_proj")


@pytest.mark.parametrize(
    ("declared", "match"),
    [
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        ({"quant_method": "modelopt"}, "quant_algo=None"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme='odd'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "with weight_block_size"),
        (changed("format", "int-quantized"), "format='int-quantized'"),
        (changed("config_groups", {}), "config_groups={}"),
        (changed("config_groups/group_0", 7), "each group must be an object"),
        (changed("config_groups/group_0/weights/num_bits", 4), r"group_0.weights.num_bits=4"),
        (changed("config_groups/group_0/weights/type", "int"), r"weights.type='int'"),
        (changed("config_groups/group_0/weights/symmetric", False), r"weights.symmetric=False"),
        (changed("config_groups/group_0/weights/strategy", "group"), r"weights.strategy='group'"),
        (changed("config_groups/group_0/weights/strategy", "block"), r"weights.block_structure=None"),
        (
            {
                **IN_BLOCKS,
                "config_groups": {
                    "group_0": {**IN_BLOCKS["config_groups"]["group_0"], "input_activations": {**NUMBER, "dynamic": False}}
                },
            },
            "with block-scaled weights",
        ),
        (changed("config_groups/group_0/input_activations/num_bits", 4), r"input_activations.num_bits=4"),
        (changed("config_groups/group_0/input_activations/dynamic", False), r"input_activations.strategy='token'"),
        (changed("config_groups/group_1", {"weights": {**NUMBER, "strategy": "tensor"}}), "its groups differ"),
        ({"quant_method": "fp8", "kv_cache_scheme": "odd"}, "kv_cache_scheme='odd'"),
        (changed("kv_cache_scheme", {"num_bits": 4, "type": "int"}), r"kv_cache_scheme.type='int'"),
        (changed("kv_cache_scheme", {**NUMBER, "strategy": "token", "dynamic": True}), "kv_cache_scheme.strategy='token'"),
    ],
)
def test_an_unsupported_declaration_names_what_is_supported(declared: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        read(declared)
    assert "compressed-tensors" in str(caught.value)


def test_modelopt_has_a_file_of_its_own(tmp_path: Any) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}), encoding="utf-8")
    file = tmp_path / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}', encoding="utf-8")
    assert ModelShape.from_folder(tmp_path).quantization == read(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    )
    file.write_text('{"quantization": {"quant_algo": "W4A8"}}', encoding="utf-8")
    with pytest.raises(ModelError, match="W4A8"):
        ModelShape.from_config(load_config(tmp_path))
    file.write_text("no JSON", encoding="utf-8")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json is not JSON"):
        load_config(tmp_path)


def test_what_runs_as_one_product_is_quantized_as_one() -> None:
    quantization = read(changed("ignore", ["a.k_proj"]))
    assert quantization is not None
    assert require_uniform(quantization, ["a.gate_proj", "a.up_proj"])
    assert not require_uniform(quantization, ["a.k_proj"])
    with pytest.raises(ModelError, match=r"a.q_proj is in FP8 and a.k_proj is not"):
        require_uniform(quantization, ["a.q_proj", "a.k_proj"])
