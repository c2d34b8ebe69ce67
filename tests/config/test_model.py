# SPDX-License-Identifier: Apache-2.0
"""config.json in both spellings, the families' defaults, and every field that makes no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from phalanx.config.model import FAMILIES, ModelShape, load_config
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


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_config_json_leaves_out_is_as_in_the_reference(family: str) -> None:
    """The defaults of our table are those of transformers' own config classes."""
    reference = getattr(transformers, f"{family}Config")()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ours = ModelShape.from_config({"architectures": [f"{family}ForCausalLM"], **{name: getattr(reference, name) for name in sizes}})
    assert ours.num_kv_heads == reference.num_key_value_heads
    assert ours.head_dim == (getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads)
    assert ours.max_positions == reference.max_position_embeddings
    assert ours.rms_norm_eps == reference.rms_norm_eps
    assert ours.rope.theta == 10_000.0
    assert ours.tie_word_embeddings == reference.tie_word_embeddings
    window = reference.sliding_window if family == "Mistral" else None
    assert ours.windows == (window,) * reference.num_hidden_layers


def test_what_config_json_of_gpt_oss_leaves_out_is_as_in_the_reference() -> None:
    reference = transformers.GptOssConfig()
    sizes = {"vocab_size": 384, "hidden_size": 2880, "num_hidden_layers": 3, "num_attention_heads": 64}
    ours = ModelShape.from_config({"architectures": ["GptOssForCausalLM"], **sizes, "intermediate_size": 2880})
    assert (ours.num_kv_heads, ours.head_dim) == (reference.num_key_value_heads, reference.head_dim)
    assert (ours.max_positions, ours.rms_norm_eps) == (reference.max_position_embeddings, reference.rms_norm_eps)
    rope = reference.rope_parameters
    assert (ours.rope.theta, ours.rope.kind, ours.rope.factor) == (rope["rope_theta"], rope["rope_type"], rope["factor"])
    assert (ours.rope.beta_fast, ours.rope.beta_slow) == (rope["beta_fast"], rope["beta_slow"])
    assert ours.rope.truncate == rope["truncate"]
    assert ours.rope.original_max_positions == rope["original_max_position_embeddings"]
    assert (ours.qkv_bias, ours.output_bias, ours.sinks) == (reference.attention_bias, reference.attention_bias, True)
    assert ours.windows == (reference.sliding_window, None, reference.sliding_window)
    experts = ours.experts
    assert experts is not None
    assert experts.swiglu is not None
    assert (experts.count, experts.per_token) == (reference.num_local_experts, reference.num_experts_per_tok)
    assert tuple(experts.swiglu) == (reference.swiglu_alpha, reference.swiglu_limit)
    assert not experts.mxfp4
    assert ours.dtype == "bf16"
    assert ours.window is None


@pytest.mark.parametrize("version", [2, 3])
def test_what_a_deepseek_leaves_out_is_what_transformers_takes(version: int) -> None:
    reference = getattr(transformers, f"DeepseekV{version}Config")(hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
    ours = ModelShape.from_config({"architectures": [f"DeepseekV{version}ForCausalLM"], **sizes})
    latent, experts = ours.latent, ours.experts
    assert latent is not None
    assert experts is not None
    assert experts.scoring is not None
    ranks = reference.q_lora_rank, reference.kv_lora_rank
    dims = reference.qk_nope_head_dim, reference.qk_rope_head_dim, reference.v_head_dim
    assert (latent.q_rank, latent.kv_rank, latent.nope, latent.rope, latent.v) == (*ranks, *dims)
    assert ours.max_positions == reference.max_position_embeddings
    assert (experts.count, experts.intermediate) == (reference.n_routed_experts, reference.moe_intermediate_size)
    assert experts.shared == reference.n_shared_experts * reference.moe_intermediate_size
    assert experts.dense_layers == tuple(range(reference.first_k_dense_replace))
    assert experts.renormalize == reference.norm_topk_prob
    assert experts.scoring.scale == reference.routed_scaling_factor
    if version == 3:
        assert (experts.scoring.groups, experts.scoring.top_groups) == (reference.n_group, reference.topk_group)
        assert experts.per_token == reference.num_experts_per_tok
        assert ours.mtp_layers == reference.num_mtp_layers


def test_traits_of_the_families() -> None:
    names = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3")
    assert set(FAMILIES) == {f"{name}ForCausalLM" for name in names}
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


def test_blocks_can_be_freed_only_where_every_layer_has_a_window() -> None:
    assert shape(architectures=["MistralForCausalLM"], sliding_window=8).window == 8
    assert shape().window is None
    mixed = shape(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert mixed.window is None


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "eos_token_id": 2, "bos_token_id": 1}))
    assert ModelShape.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    model = ModelShape.from_folder(tmp_path)
    assert model.eos_token_ids == (7, 2, 9)
    assert model.bos_token_id == 1
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
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters per type of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "high must exceed"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]}, "1 layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked"] * 4}, "with chunked"),
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
