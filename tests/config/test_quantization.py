# SPDX-License-Identifier: Apache-2.0
"""What checkpoints say about their FP8 weights: read as meant, or refused with what is read."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from phalanx.config.json_fields import JsonFields
from phalanx.config.model import ModelShape, load_config
from phalanx.config.quantization import Int4, Quantization, require_uniform
from phalanx.config.quantization_config import TABLES, read_quantization
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


SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2,
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


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def packed(field: str = "num_bits", value: Any = 4, **more: Any) -> dict[str, Any]:
    """compressed-tensors with 4-bit integers; one field of the weights' scheme is changed."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, field: value, **more}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


IN_BLOCKS = changed("config_groups/group_0/weights", {**NUMBER, "strategy": "block", "block_structure": [128, 128]})


def test_a_plain_checkpoint() -> None:
    assert read(None) is None
    assert read({}) is None


DECLARED: dict[str, dict[str, Any]] = {
    "modelopt": {"quantization": {"quant_algo": "FP8"}}, "compressed-tensors": COMPRESSED, "fp8": {}, "awq": AWQ, "gptq": GPTQ,
    "mxfp4": {},
}  # fmt: skip


@pytest.mark.parametrize("method", TABLES)
def test_a_field_in_no_table_is_named(method: str) -> None:
    declared = {**DECLARED[method], "quant_method": method, "vendor_rounding": "up", "_tool": 1}
    fields = JsonFields({"quantization_config": declared}, "config.json")
    read_quantization(fields, stacked_experts=True)
    assert fields.additions == ["quantization_config.vendor_rounding"]


def test_a_field_of_a_scheme_in_no_table_is_named(caplog: pytest.LogCaptureFixture) -> None:
    inner = changed("config_groups/group_0/weights/rounding", "up")
    ModelShape.from_config({**SIZES, "quantization_config": inner})
    assert "quantization_config.config_groups.group_0.weights.rounding" in caplog.messages[0]


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
        (changed("sparsity_config", {"format": "dense", "global_sparsity": 0.1}), "channel", "token", "weight_scale", False),
        ({"producer": {"name": "modelopt", "version": "0.33"}, "quant_algo": "FP8"}, "tensor", "static", "weight_scale", False),
        (
            {"producer": {"name": "ModelOpt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "fp8"}},
            "tensor",
            "static",
            "weight_scale",
            True,
        ),
        ({"quant_method": "ModelOpt", "quant_algo": "fp8", "kv_cache_scheme": "FP8"}, "tensor", "static", "weight_scale", True),
        ({"quant_method": "FP8", "activation_scheme": "STATIC"}, "tensor", "static", "weight_scale", False),
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


EXCLUDED = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.0.*"]}


@pytest.mark.parametrize(
    ("declared", "covered", "plain"),
    [
        (EXCLUDED, "1.mlp", "0.mlp"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["model.layers.1.mlp.up_proj"]}, "11.mlp", "1.mlp"),
        ({**EXCLUDED, "ignore": ["model.layers.1.mlp.up_proj"]}, "11.mlp", "1.mlp"),
        ({**EXCLUDED, "ignore": ["model.layers.1.mlp.up_proj"]}, "11.mlp", "0.mlp"),
        (COMPRESSED, "0.mlp", "0.self_attn"),
        (changed("ignore", ["model.layers.1.mlp.up_proj"]), "11.mlp", "1.mlp"),
        (changed("config_groups/group_0/targets", ["re:.*mlp"]), "0.mlp", "0.self_attn"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]}, "11.mlp", "1.mlp"),
        ({"quant_method": "fp8", "ignored_layers": ["up_proj"]}, None, "1.mlp"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["gate_up_proj"]}, None, "1.mlp"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.mlp.gate_up_proj"]}, "11.mlp", "1.mlp"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1*"]}, "2.mlp", "11.mlp"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["*.1.mlp.*"]}, "11.mlp", "1.mlp"),
        ({"quant_method": "fp8", "modules_to_not_convert": [r"model\.layers\.(1|3)"]}, "11.mlp", "3.mlp"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mlp.up"]}, "1.mlp", "mlp.up"),
        (changed("ignore", [r"re:.*\.1\.mlp|.*\.3\."]), "11.mlp", "1.mlp"),
        (changed("ignore", [r"re:.*\.1\.mlp|.*\.3\."]), "2.mlp", "3.mlp"),
        (changed("ignore", [r"re:.*\.1\.mlp\.up$|.*lm_head"]), "1.mlp", "1.mlp.up"),
        (changed("ignore", ["model.layers.1.mlp.gate_up_proj"]), "11.mlp", "1.mlp"),
        (changed("ignore", ["Linear"]), None, "1.mlp"),
        (changed("config_groups/group_0/targets", ["re:.*0.mlp|.*1.mlp"]), "11.mlp", "2.mlp"),
    ],
)
def test_which_layers_are_left_out(declared: dict[str, Any], covered: str | None, plain: str) -> None:
    quantization = read(declared)
    assert quantization is not None
    assert covered is None or quantization.of(f"model.layers.{covered}.up_proj")
    assert not quantization.of(f"model.layers.{plain}.up_proj" if plain.endswith(("mlp", "attn")) else f"model.layers.{plain}")


@pytest.mark.parametrize(
    ("declared", "match"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({**AWQ, "bits": 8}, "bits=8"),
        ({**AWQ, "version": "gemv"}, "version='gemv'"),
        ({**AWQ, "zero_point": False}, "zero_point=False"),
        ({**GPTQ, "bits": 3}, "bits=3"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**GPTQ, "group_size": 48}, "group_size=48"),
        ({**GPTQ, "dynamic": {"mlp.(": {}}}, "is no regular expression"),
        ({**GPTQ, "dynamic": {"+:.*down": {"bits": 2}}}, "bits=2"),
        (packed("num_bits", 3), "num_bits=3"),
        (packed("type", "float"), "type='float'"),
        (packed("strategy", "tensor"), "strategy='tensor'"),
        (packed("actorder", "odd"), "actorder='odd'"),
        (packed("dynamic", True), "dynamic=True"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo=None"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme='odd'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "with weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mlp.(up"]}, "is no regular expression"),
        ({"producer": {"name": "quark"}, "quant_algo": "FP8"}, "quant_method=None"),
        (changed("ignore", ["re:["]), "is no regular expression"),
        (changed("sparsity_config", {"format": "sparse-24-bitmask"}), "weights must be dense"),
        (changed("config_groups/group_0/format", "pack-quantized"), "activations must be in 16 bit"),
        (changed("config_groups/group_0/format", "nvfp4-pack-quantized"), "it must be 4 here"),
        (changed("format", "int-quantized"), "weights.type='float'"),
        (changed("format", "naive-quantized"), "format='naive-quantized'"),
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
        (changed("config_groups/group_1", {"weights": {**NUMBER, "strategy": "tensor"}}), "each must have targets"),
        ({"quant_method": "fp8", "kv_cache_scheme": "odd"}, "kv_cache_scheme='odd'"),
        (changed("kv_cache_scheme", {"num_bits": 4, "type": "int"}), r"kv_cache_scheme.type='int'"),
        (changed("kv_cache_scheme", {**NUMBER, "strategy": "token", "dynamic": True}), "kv_cache_scheme.strategy='token'"),
    ],
)
def test_an_unsupported_declaration_names_what_is_supported(declared: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        read(declared)
    assert "compressed-tensors" in str(caught.value)


@pytest.mark.parametrize(
    ("declared", "match"),
    [
        ({"quant_method": "fp8", "modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ({"quant_method": "fp8", "is_checkpoint_fp8_serialized": False}, "is_checkpoint_fp8_serialized=False"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "quantization": {"quant_algo": "NVFP4"}},
            "two values of quantization_config.quant_algo: 'FP8', and 'NVFP4'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "W4A8_AWQ"}}},
            "quantized_layers.x.quant_algo='W4A8_AWQ'",
        ),
        (changed("config_groups/group_0/output_activations", NUMBER), "output_activations"),
        (changed("config_groups/group_0/weights/group_size", 128), "group_size=128"),
    ],
)
def test_a_field_that_asks_for_another_arithmetic_is_refused(declared: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read(declared)


def test_modelopt_has_a_file_of_its_own(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    file = tmp_path / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}', encoding="utf-8")
    assert ModelShape.from_folder(tmp_path).quantization == read(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    )
    for text in ('{"producer": {"name": "modelopt"}, "quant_algo": "FP8", "exclude_modules": ["lm_head"]}', "{}"):
        (tmp_path / "config.json").write_text(json.dumps({**SIZES, "quantization_config": json.loads(text)}), encoding="utf-8")
        assert ModelShape.from_folder(tmp_path).quantization == read(
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        )
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
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


@pytest.mark.parametrize(
    ("declared", "int4"),
    [
        (packed(), Int4("packed", 128)),
        (packed("group_size", 32), Int4("packed", 32)),
        (packed("symmetric", False), Int4("packed", 128, zeros=True)),
        (packed("strategy", "channel", group_size=None), Int4("packed", 0)),
        (packed("strategy", None, group_size=-1), Int4("packed", 0)),
        (packed("actorder", "static"), Int4("packed", 128)),  # T4: changes nothing that is stored
        (packed("actorder", "weight"), Int4("packed", 128)),
        (packed("actorder", "group"), Int4("packed", 128, by_index=True)),
        (packed("actorder", "group", strategy="channel", group_size=None), Int4("packed", 0)),
        (AWQ, Int4("awq", 128, zeros=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, Int4("awq", 0, zeros=True)),
        (GPTQ, Int4("gptq", 128)),  # T2: zeros are 8, whatever is stored
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Int4("gptq", 128)),
        ({**GPTQ, "sym": False}, Int4("gptq", 128, zeros=True, zero_offset=1)),
        ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, Int4("gptq", 128, zeros=True)),  # T1
        ({**GPTQ, "desc_act": True}, Int4("gptq", 128, by_index=True)),
        ({**GPTQ, "desc_act": True, "group_size": -1}, Int4("gptq", 0)),
        ({**GPTQ, "bits": 8}, Int4("gptq", 128, bits=8)),
        ({**GPTQ, "bits": 8, "sym": False}, Int4("gptq", 128, zeros=True, zero_offset=1, bits=8)),
        (packed("num_bits", 8), Int4("packed", 128, bits=8)),
        (packed("num_bits", None), Int4("packed", 128, bits=8)),
    ],
)
def test_weights_of_4_bit_integers(declared: dict[str, Any], int4: Int4) -> None:
    quantization = read(declared)
    assert quantization is not None
    assert (quantization.weights, quantization.activations, quantization.int4) == ("int4", "none", int4)
    assert quantization.unit("model.layers.0.mlp.down_proj") == int4.group


def test_an_entry_of_awq_is_any_part_of_a_name() -> None:
    """T7: as AutoAWQ and vLLM read it."""
    quantization = read({**AWQ, "modules_to_not_convert": ["self_attn", "model.layers.0."]})
    assert quantization is not None
    assert not quantization.of("model.layers.7.self_attn.o_proj")
    assert not quantization.of("model.layers.0.mlp.down_proj")
    assert quantization.of("model.layers.10.mlp.down_proj")


def test_the_first_pattern_of_dynamic_counts() -> None:
    """It is matched at the beginning of a name; "-:" leaves layers as they are, anything else overrides fields."""
    dynamic = {
        r"+:.*\.1\.mlp": {"group_size": 32}, r"-:.*mlp": {}, r".*\.2\.": {"sym": False, "desc_act": True}, "-:layers": {},
    }  # fmt: skip
    quantization = read({**GPTQ, "dynamic": dynamic})
    assert quantization is not None

    def scheme(layer: str) -> Int4 | None:
        group = quantization.of(f"model.layers.{layer}")
        return None if group is None else group.int4

    assert scheme("1.mlp.down_proj") == Int4("gptq", 32)
    assert scheme("2.mlp.down_proj") is None
    assert scheme("2.self_attn.o_proj") == Int4("gptq", 128, zeros=True, by_index=True, zero_offset=1)
    assert scheme("3.self_attn.o_proj") == Int4("gptq", 128)


def test_groups_of_several_formats() -> None:
    """FP8 and 4-bit integers in one checkpoint: a group that names a layer comes before a pattern, and that before all layers."""
    declared = packed()
    declared["format"] = "mixed-precision"
    declared["config_groups"]["group_0"]["format"] = "pack-quantized"
    fp8 = copy.deepcopy(COMPRESSED["config_groups"]["group_0"])
    declared["config_groups"]["group_1"] = {**fp8, "format": "float-quantized", "targets": ["re:.*self_attn"]}
    small = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    named = {"format": "pack-quantized", "weights": small, "targets": ["model.layers.0.self_attn.o_proj"]}
    declared["config_groups"]["group_2"] = named
    quantization = read({**declared, "ignore": ["re:.*layers.9"]})
    assert quantization is not None
    groups = {
        name: quantization.of(f"model.layers.{name}") for name in ("0.mlp.up_proj", "1.self_attn.o_proj", "0.self_attn.o_proj")
    }
    assert [None if group is None else (group.weights, group.int4) for group in groups.values()] == [
        ("int4", Int4("packed", 128)), ("channel", None), ("int4", Int4("packed", 32)),
    ]  # fmt: skip
    assert not quantization.of("model.layers.9.self_attn.o_proj")
