# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Mistral's own format, params.json and consolidated.safetensors, against transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config.locate import checkpoint_digest, locate
from phalanx.config.mistral_format import as_config, tensor_name
from phalanx.config.model import ModelShape
from phalanx.config.rope import Temperature
from phalanx.errors import ModelError, WeightError
from phalanx.layout.families.registry import layer_tensors, outer_tensors
from phalanx.planner.subject import shape_for
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import Formation, run_steps
from tests.support.models_logits import STEPS, assert_same, logits_of

OF_ATTENTION = {
    "q_a_proj": "wq_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "wkv_b", "o_proj": "wo", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv",
}  # fmt: skip
OF_MLP = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
OUTER = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
MOE = {
    "num_experts": 8, "num_experts_per_tok": 3, "expert_hidden_dim": 32, "first_k_dense_replace": 1, "num_shared_experts": 2,
    "routed_scale": 1.5, "route_every_n": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "expert_parallel": 1,
}  # fmt: skip
PARAMS: dict[str, Any] = {
    "dim": 48, "n_layers": 3, "hidden_dim": 80, "n_heads": 4, "n_kv_heads": 4, "norm_eps": 1e-6, "vocab_size": 384,
    "tied_embeddings": False, "max_position_embeddings": 256, "rope_theta": 500.0, "use_biases": False, "causal": True,
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 8, "beta": 32, "alpha": 1, "apply_scale": False},
    "llama_4_scaling": {"beta": 0.7, "original_max_position_embeddings": 8},
}  # fmt: skip
LATENT = {
    **PARAMS, "head_dim": 24, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe": MOE,
}  # fmt: skip
DENSE = {**PARAMS, "head_dim": 16, "n_kv_heads": 2, "norm_eps": 1e-5}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.7,
}
EXPECTED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    # (params.json, the family, its fields)
    "latent": (LATENT, "mistral4", {"first_k_dense_replace": 1, "rope_parameters": {**ROPE, "attention_factor": 1.0}}),
    "latent, scaled": (
        {**LATENT, "yarn": {**PARAMS["yarn"], "apply_scale": True}}, "mistral4",
        {"first_k_dense_replace": 1, "rope_parameters": {**ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "dense": (DENSE, "ministral3", {"rope_parameters": {**ROPE, "attention_factor": 1.0}}),
    "dense, scaled": ({**DENSE, "yarn": {**PARAMS["yarn"], "apply_scale": True}}, "ministral3", {"rope_parameters": ROPE}),
}  # fmt: skip


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """The rows of a projection with the pairs that are rotated together beside each other, not half a head apart."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def renamed(tensors: dict[str, Tensor], params: dict[str, Any]) -> dict[str, Tensor]:
    """As Mistral's format has them."""
    out = dict[str, Tensor]()
    for name, value in tensors.items():
        if name in OUTER:
            out[OUTER[name]] = value
            continue
        _, _, layer, *path, end = name.split(".")
        before = f"layers.{layer}."
        if path == ["mlp", "experts"]:  # as transformers 5 stacks them
            for expert, each in enumerate(value):
                parts = {"w2": each} if end == "down_proj" else dict(zip(("w1", "w3"), each.chunk(2), strict=True))
                out |= {f"{before}experts.{expert}.{part}.weight": own.clone() for part, own in parts.items()}
        elif path[0] == "self_attn":
            if path[1] in ("q_proj", "k_proj"):
                value = neighbours(value, params["n_heads"] if path[1] == "q_proj" else params["n_kv_heads"])
            out[f"{before}attention.{OF_ATTENTION[path[1]]}.{end}"] = value
        elif path[0] == "mlp":
            block = {"gate": "", "shared_experts": "shared_experts."}.get(path[1], "feed_forward.")
            out[f"{before}{block}{OF_MLP.get(path[-1], path[-1])}.{end}"] = value
        else:
            norm = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}[path[0]]
            out[f"{before}{norm}.{end}"] = value
    return {name: value.contiguous() for name, value in out.items()}


def written(root: Path, case: str) -> tuple[Path, Path]:
    """(folder of transformers, the same model in Mistral's format)."""
    params, family, fields = EXPECTED[case]
    fields = {"num_hidden_layers": 3, "rms_norm_eps": params["norm_eps"], **fields}
    theirs = write_checkpoint(root / "theirs", family, stacked=True, **fields)
    own = root / "own"
    own.mkdir()
    (own / "params.json").write_text(json.dumps(params))
    save_file(renamed(load_file(theirs / "model.safetensors"), params), own / "consolidated.safetensors")
    return theirs, own


@pytest.mark.parametrize("case", EXPECTED)
def test_logits_equal_transformers(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """YaRN without apply_scale multiplies neither cosines and sines nor scores."""
    theirs, own = written(tmp_path, case)
    ids, expected = logits_of(theirs)
    for tp, pp in ((1, 1), (2, 2)):
        run_steps(Formation(own, tp=tp, pp=pp), STEPS, ids, expected, assert_same)
    assert "knows nothing of" not in caplog.text
    assert locate(str(own)) == own
    assert shape_for(str(own)) == shape_for(str(own / "params.json")) == ModelShape.from_folder(own)
    assert checkpoint_digest(own, weights=True) != checkpoint_digest(theirs, weights=True)


def test_files_of_an_index_beside_a_vision_encoder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, own = written(tmp_path, "latent")
    tensors = load_file(own / "consolidated.safetensors")
    tensors["vision_encoder.transformer.layers.0.attention.wq.weight"] = torch.ones(2, 2)
    tensors["patch_merger.merging_layer.weight"] = torch.ones(2, 2)
    (own / "consolidated.safetensors").unlink()
    places = {name: f"consolidated-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == file}, own / file)
    (own / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (own / "params.json").write_text(json.dumps({**LATENT, "vision_encoder": {"hidden_size": 8}, "novelty": 3}))
    caplog.set_level(logging.INFO)
    ids, expected = logits_of(theirs)
    assert_same(Formation(own).step([(0, ids[1])])[0], expected[1])
    assert "are not loaded: 1 of patch_merger, 1 of vision_encoder" in caplog.text
    assert "knows nothing of novelty" in caplog.text
    save_file({"layers.0.attention.wq_c.weight": torch.ones(2)}, own / "consolidated-00001-of-00002.safetensors")
    with pytest.raises(WeightError):
        Formation(own)


LARGE_3 = {
    "dim": 7168, "head_dim": 192, "hidden_dim": 16384, "kv_lora_rank": 512, "max_position_embeddings": 294912, "n_heads": 128,
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8192}, "n_kv_heads": 128, "n_layers": 61, "norm_eps": 1e-6,
    "moe": {
        "expert_hidden_dim": 4096, "expert_model_parallel": 1, "expert_parallel": 1, "first_k_dense_replace": 3,
        "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "num_experts": 128, "num_experts_per_tok": 4,
        "num_shared_experts": 1, "route_every_n": 1, "routed_scale": 1.0,
    },
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 131072,
    "quantization_config": {
        "config_groups": {"FP8_BLOCK": {
            "format": "float-quantized", "output_activations": None, "targets": ["Linear"],
            "input_activations": {
                "dynamic": True, "group_size": 128, "num_bits": 8, "strategy": "group", "symmetric": True, "type": "float",
            },
            "weights": {
                "block_structure": [128, 128], "dynamic": False, "num_bits": 8, "strategy": "block", "symmetric": True,
                "type": "float",
            },
        }},
        "format": "float-quantized", "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "ignore": [
            "model.embed_tokens", "re:patch_merger.*", "re:vision_encoder.*", "re:vision_language_adapter.*",
            "re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$", "re:.*gate$", "lm_head",
        ],
    },
    "rope_theta": 10000.0, "tied_embeddings": False, "vision_encoder": {"hidden_size": 1664},
    "yarn": {"alpha": 1, "apply_scale": False, "beta": 32, "factor": 36, "original_max_position_embeddings": 8192},
}  # fmt: skip
"""Of Mistral-Large-3-675B-Instruct-2512."""


def test_mistral_large_3() -> None:
    shape = ModelShape.from_config(as_config(LARGE_3))
    tensors = [*outer_tensors(shape), *(each for layer in range(61) for each in layer_tensors(shape, layer))]
    assert sum(each.elements for each in tensors) / 1e9 == pytest.approx(672.9, rel=1e-3)
    assert (shape.architecture, shape.wrapper) == ("Mistral4ForCausalLM", "Mistral3ForConditionalGeneration")
    assert shape.latent is not None
    assert shape.latent.softmax_scale == 192**-0.5
    assert shape.quantization is not None
    in_fp8 = {name: shape.quantization.of(f"model.layers.5.{name}") is not None for name in (
        "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate", "self_attn.q_b_proj", "mlp.experts.7.gate_proj",
    )}  # fmt: skip
    assert list(in_fp8.values()) == [False, False, False, True, True]


@pytest.mark.parametrize(("edit", "message"), [
    ({"use_biases": True}, "use_biases=True"), ({"causal": False}, "causal=False"), ({"_sliding_window": [8]}, "_sliding_window="),
    ({"multimodal": {"whisper_model_args": {}}}, "multimodal="), ({"qk_nope_head_dim": None}, "moe without qk_nope_head_dim"),
    ({"moe": None}, "no moe beside"), ({"moe": {**MOE, "use_load_balancing_bias": True}}, "use_load_balancing_bias=True"),
    ({"moe": {**MOE, "num_expert_groups": 2}}, "n_group=2"), ({"quantization": {"qformat_weight": "int4"}}, "qformat_weight"),
    ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 16}}, "16 in llama_4_scaling"),
])  # fmt: skip
def test_what_is_refused(edit: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelShape.from_config(as_config({**LATENT, **edit}))


def test_a_temperature_without_yarn_and_the_older_name_of_the_context() -> None:
    params = {name: value for name, value in DENSE.items() if name not in ("yarn", "max_position_embeddings")} | {
        "max_seq_len": 128
    }
    shape = ModelShape.from_config(as_config(params), quiet=True)
    assert (shape.max_positions, shape.rope.kind) == (128, "default")
    assert shape.rope.temperature == Temperature(0.7, 8)
    yarn = {**DENSE, "rope_theta": 1.0}
    with pytest.raises(ModelError, match=r"rope_theta=1\.0; YaRN divides by its logarithm"):
        ModelShape.from_config(as_config(yarn), quiet=True)


@pytest.mark.parametrize(("scheme", "activations"), [("TENSOR", "static"), ("NO_SCALES", "token")])
def test_fp8_by_tensor(scheme: str, activations: str) -> None:
    """Mistral Small 4."""
    config = as_config({**LATENT, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}})
    quantization = ModelShape.from_config(config).quantization
    assert quantization is not None
    assert (quantization.weights, quantization.activations) == ("tensor", activations)
    names = [tensor_name(f"layers.0.experts.1.w2.{end}").rpartition(".")[2] for end in ("qscale_weight", "qscale_act")]
    assert tuple(names) == quantization.beside_weight
