# SPDX-License-Identifier: Apache-2.0
"""config.json in both spellings, the families' defaults, and every field that makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.families import FAMILIES
from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.config.model import ModelShape, load_config
from phalanx.config.model_fields import MODEL
from phalanx.config.rope import ROPE_TYPES
from phalanx.errors import ModelError, UnsupportedArchitecture

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 384, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def shape(**changes: Any) -> ModelShape:
    return ModelShape.from_config({**SMALL, **changes})


def test_old_and_new_spelling_say_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = shape(torch_dtype="bfloat16", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    older = shape(torch_dtype="bfloat16", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = shape(dtype="bfloat16", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == older == new
    assert (new.dtype, new.rope.kind, new.rope.theta, new.rope.factor) == ("bf16", "llama3", 5e5, 8.0)
    assert (new.rope.low_freq_factor, new.rope.high_freq_factor, new.rope.original_max_positions) == (1.0, 4.0, 64)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("fields", "kind", "theta", "max_positions"),
    [
        ({"rope_parameters": {}, "rope_scaling": YARN, "rope_theta": 500.0}, "yarn", 500.0, 256),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {**YARN, "factor": 16.0}}, "yarn", 1e4, 512),
        ({"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": YARN, "rope_theta": 500.0}, "yarn", 500.0, 256),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": {}}, "default", 500.0, 256),
        ({"rope_parameters": None, "rope_scaling": {**YARN, "rope_theta": 7.0}, "rope_theta": 500.0}, "yarn", 7.0, 256),
        ({"rope_parameters": {"type": "linear", "factor": 4.0}}, "linear", 1e4, 1024),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}}, "linear", 1e4, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn", 1e4, 512),
    ],
)
def test_rope_is_read_wherever_it_stands(fields: dict[str, Any], kind: str, theta: float, max_positions: int) -> None:
    model = shape(**fields)
    assert (model.rope.kind, model.rope.theta, model.max_positions) == (kind, theta, max_positions)


def test_original_positions_beside_the_objects_count_first() -> None:
    assert shape(original_max_position_embeddings=16, rope_scaling=YARN).rope.original_max_positions == 16


@pytest.mark.parametrize("architecture", ["Olmo3ForCausalLM", "Gemma3ForCausalLM"])
def test_original_positions_beside_rope_by_the_type_of_a_layer_are_those_within_or_refused(architecture: str) -> None:
    """transformers reads them within the object of a type alone."""

    def original(outside: int | None, **fields: Any) -> int:
        model = shape(architectures=[architecture], sliding_window=8, original_max_position_embeddings=outside, **fields)
        return model.rope.original_max_positions

    nested = {"rope_parameters": {"full_attention": YARN}}
    assert original(None, rope_scaling=YARN) == original(32, rope_scaling=YARN) == original(32, **nested) == 32
    assert original(16) == original(16, rope_scaling={}) == 0
    for fields in ({"rope_scaling": YARN}, nested, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}):
        with pytest.raises(ModelError, match="original_max_position_embeddings=16 beside rope_"):
            original(16, **fields)


def test_gpt_oss_has_yarn_unless_its_file_says_otherwise() -> None:
    def rope(**fields: Any) -> Any:
        return shape(architectures=["GptOssForCausalLM"], num_local_experts=8, **fields).rope

    assert rope() == rope(rope_scaling={}) == rope(rope_parameters=None)
    assert (rope().kind, rope().factor, rope().truncate) == ("yarn", 32.0, False)
    assert (rope(rope_parameters={}).kind, rope(rope_parameters={}).theta) == ("default", 150_000.0)


def test_a_mixtral_that_states_nothing_has_its_own_defaults() -> None:
    model = shape(architectures=["MixtralForCausalLM"])
    assert (model.rope.theta, model.rms_norm_eps) == (1e6, 1e-5)


@pytest.mark.parametrize(("name", "dtype"), [("half", "fp16"), ("float", "fp32"), ("torch.bfloat16", "bf16"), ("float16", "fp16")])
def test_spellings_of_a_dtype(name: str, dtype: str) -> None:
    assert shape(torch_dtype=name).dtype == shape(dtype=name, torch_dtype="bfloat16").dtype == dtype


def test_an_id_of_minus_one_is_none(caplog: pytest.LogCaptureFixture) -> None:
    model = shape(eos_token_id=[-1, 7], bos_token_id=-1, generation_config={"eos_token_id": -1, "pad_token_id": -1})
    assert model.eos_token_ids == (7,)
    assert not caplog.messages


def test_a_field_that_is_in_no_table_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    additions = {"vendor_flag": 1, "sliding_window": 8, "_private": 1, "unset": None, "temperature": 0.6}
    shape(**additions, generation_config={"vendor_mode": True, "top_p": 0.9})
    assert caplog.messages == [
        "config.json: Phalanx knows nothing of vendor_flag, sliding_window, generation_config.json: vendor_mode: not used"
    ]
    caplog.clear()
    ModelShape.from_config({**SMALL, **additions}, quiet=True)
    assert not caplog.messages


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_a_field_of_rope_that_is_in_no_table_is_an_error(kind: str) -> None:
    with pytest.raises(ModelError, match=r"rope_parameters\.vendor_scale=2"):
        shape(rope_parameters={"rope_type": kind, "vendor_scale": 2})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_other_models_multiply_or_cap_is_refused(architecture: str) -> None:
    needed = {"Qwen3MoeForCausalLM": {"num_experts": 8}, "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 4}}
    sizes = {**SMALL, "num_key_value_heads": 4, "architectures": [architecture], **needed.get(architecture, {})}
    neutral = {"residual_multiplier": 1.0, "logits_scaling": 1, "clip_qkv": None, "alibi": False, "pruned_heads": {}}
    ModelShape.from_config({**sizes, **neutral})
    stated = {
        "residual_multiplier": 0.22, "logits_scaling": 8.0, "llama_4_scaling_beta": 0.1, "clip_qkv": 6.0,
        "per_layer_config": {"0": {}}, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    for name, value in stated.items():
        if name in MODEL[architecture].honoured:
            continue
        with pytest.raises(ModelError, match=name):
            ModelShape.from_config({**sizes, name: value})


def test_a_model_type_of_another_family_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="model_type='mistral'"):
        shape(model_type="mistral")
    shape(model_type="kimi")
    assert "model_type='kimi'" in caplog.messages[0]


def test_readers_read_honoured_fields_only() -> None:
    """The table of a family is what its readers read: a reader that reads another field is an error of ours."""
    fields = JsonFields({"hidden_size": 1, "beta": 2}, "config.json").sorted_by(FieldTable.of("hidden_size", "beta"))
    assert fields.count("hidden_size") == 1
    with pytest.raises(KeyError, match="beta"):
        fields.count("beta")


def test_traits_of_the_families() -> None:
    assert shape(attention_bias=True, mlp_bias=True).output_bias
    assert shape(mlp_bias=True).mlp_bias
    qwen2 = shape(architectures=["Qwen2ForCausalLM"], attention_bias=True)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = shape(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert shape(head_dim=20).head_dim == 20
    assert shape(hidden_size=50, head_dim=10).head_dim == 10


def test_windows_by_layer() -> None:
    def windows(architecture: str, **fields: Any) -> tuple[int | None, ...]:
        return shape(architectures=[f"{architecture}ForCausalLM"], **fields).windows

    assert windows("Llama", sliding_window=8) == (None,) * 4
    assert windows("Mistral", sliding_window=8) == (8,) * 4
    assert windows("Mistral", sliding_window=None) == (None,) * 4
    assert windows("Mistral") == (4096,) * 4
    assert windows("Qwen2", sliding_window=8) == (None,) * 4
    assert windows("Qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3) == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3", sliding_window=8, use_sliding_window=True, layer_types=kinds) == (8, None, 8, None)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "eos_token_id": 2}))
    assert ModelShape.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    model = ModelShape.from_folder(tmp_path)
    assert model.eos_token_ids == (7, 2, 9)
    assert load_config(tmp_path)["generation_config"] == {"eos_token_id": [7, 2, 9]}


def test_eos_ids_beyond_the_vocabulary_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each request lists the eos ids as stop tokens, and one that the model lacks would have every request rejected."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, SMALL["vocab_size"], 2]}))
    assert ModelShape.from_folder(tmp_path).eos_token_ids == (1, 2)
    assert len(caplog.messages) == 1
    assert f"[{SMALL['vocab_size']}]" in caplog.messages[0]


def test_yarn_stretches_the_context() -> None:
    yarn = shape(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256})
    assert yarn.max_positions == 1024
    assert yarn.rope.attention_factor == pytest.approx(0.1 * 1.3862943611 + 1.0)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, -4, 2.5, "48", True])
def test_a_size_that_is_missing_or_no_size_is_named(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name) as caught:
        ModelShape.from_config({**SMALL, name: value}, file="/models/x/config.json")
    assert "/models/x/config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 50}, "num_attention_heads=4 does not divide hidden_size=50"),
        ({"head_dim": 11}, "head_dim=11"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_scaling": 4.0}, "rope_scaling=4.0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor=0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 0]}}, "long_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0] * 6}}, "1 and 6 factors"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters per type of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}, "rope_parameters.llama_4_scaling_beta=0.1"),
        ({"rope_parameters": {**YARN, "attn_factor": 0.5}}, "rope_parameters.attn_factor=0.5"),
        ({"rope_parameters": {"factor": 4.0}}, "rope_parameters.factor=4.0 and no rope_type"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' and no factor"),
        ({"rope_parameters": {**YARN, "attention_factor": 0.0}}, "rope_parameters.attention_factor=0.0"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN}, "rope_parameters with rope_theta=500000.0"),
        ({"rope_parameters": {"rope_type": "llama3"}, "rope_scaling": YARN}, "rope_parameters with rope_type='llama3'"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts": 4}, "num_experts=4"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "high must be low"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method='bitsandbytes'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]}, "1 layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked"] * 4}, "types, chunked"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window=-1"),
    ],
)  # fmt: skip
def test_nonsense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        shape(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_an_unsupported_architecture_lists_those_that_are(architectures: Any) -> None:
    with pytest.raises(UnsupportedArchitecture) as caught:
        shape(architectures=architectures)
    assert all(name in str(caught.value) for name in FAMILIES)
    assert "".join(architectures or []) in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("{", "not JSON"), ("[1]", "is a JSON list")])
def test_a_faulty_file_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
