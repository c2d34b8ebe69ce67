# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers: prefill, chunks and paged decode in mixed batches, over tensor and pipeline ranks."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config import model_fields
from phalanx.config.families import FAMILIES, Family
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.families import layer_tensors
from phalanx.layout.weights import weight_bytes
from phalanx.models import weights
from phalanx.models.cache import LayerCache
from tests.support import checkpoints
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.models_formation import Formation, assert_catalog_is_read, assert_every_weight_matters, run_steps
from tests.support.models_logits import LENGTHS, STEPS

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMA3_STEP = {**LLAMA3, "high_freq_factor": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.3, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 7.0],
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-12q-3kv-biases-llama3": ("llama", {
        "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": LLAMA3, "vocab_size": 401,
    }),
    "llama-8q-1kv-linear": ("llama", {
        "num_attention_heads": 8, "num_key_value_heads": 1, "rope_parameters": LINEAR,
    }),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama4": ("llama4", {"num_attention_heads": 8, "rope_parameters": LLAMA3_STEP}),
    "llama4-12q-3kv-no-norm-biases": ("llama4", {
        "num_attention_heads": 12, "num_key_value_heads": 3, "use_qk_norm": False, "attention_bias": True, "moe_layers": [0, 2],
        "no_rope_layers": [0, 1, 1], "attention_chunk_size": 4,
    }),
    "mistral-window": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "ministral3": ("ministral3", {"num_attention_heads": 12, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen2-window-above": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-tied-12q-3kv": ("qwen2", {"tie_word_embeddings": True, "num_attention_heads": 12, "num_key_value_heads": 3}),
    "qwen3-12q-6kv-biases": ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 6, "attention_bias": True}),
    "qwen3-windows-tied": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "tie_word_embeddings": True,
    }),
    "seed-oss": ("seed_oss", {"num_attention_heads": 8}),
    "seed-oss-output-bias": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [0, 1, 0]}),
    "granite": ("granite", {}),
    "granite-tied-biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "granite-hybrid": ("granite_hybrid", {}),
    "granite-hybrid-dense-groups-rope": ("granite_hybrid", {
        "num_local_experts": 0, "mamba_n_groups": 2, "tie_word_embeddings": True, "position_embedding_type": "rope",
    }),
    "granite-hybrid-stacked": ("granite_hybrid", {
        "layer_types": ["mamba", "mamba", "attention"], "stacked": True, "mamba_n_groups": 8,
    }),
    "nemotron-h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "moe", "mamba"], "seed": 1}),
    "nemotron-h-stacked": ("nemotron_h", {"layers_block_type": ["moe", "attention", "mamba"], "stacked": True, "n_groups": 8}),
    "glm4-moe": ("glm4_moe", {"num_attention_heads": 8}),
    "glm4-moe-quarter-no-norm-yarn": ("glm4_moe", {
        "use_qk_norm": False, "attention_bias": False, "rope_parameters": {**YARN, "partial_rotary_factor": 0.25},
    }),
    "glm4-moe-stacked": ("glm4_moe", {"stacked": True}),
    "minimax-m2": ("minimax_m2", {"num_attention_heads": 12, "num_key_value_heads": 3}),
    "minimax-m2-stacked": ("minimax_m2", {"stacked": True}),
    "phi3-half-longrope-short": ("phi3", {
        "hidden_size": 64, "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5, "attention_factor": 1.3},
        "original_max_position_embeddings": 64, "max_position_embeddings": 64,
    }),
    "phi3-longrope-long": ("phi3", {
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 12, "tie_word_embeddings": True,
    }),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "olmo2": ("olmo2", {"num_attention_heads": 12, "num_key_value_heads": 3, "attention_bias": True}),
    "cohere": ("cohere", {"num_attention_heads": 12, "num_key_value_heads": 3, "attention_bias": True}),
    "cohere-normed-heads": ("cohere", {"num_attention_heads": 8, "num_key_value_heads": 2, "use_qk_norm": True}),
    "cohere2": ("cohere2", {
        "num_attention_heads": 8, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "exaone4": ("exaone4", {
        "num_attention_heads": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "exaone4-no-window-tied": ("exaone4", {
        "num_attention_heads": 12, "num_key_value_heads": 3, "sliding_window": None, "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": True,
    }),
    "ernie4-5": ("ernie4_5", {"num_attention_heads": 12, "num_key_value_heads": 3, "use_bias": True}),
    "ernie4-5-moe": ("ernie4_5_moe", {"num_attention_heads": 12, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "ernie4-5-moe-stacked": ("ernie4_5_moe", {"stacked": True, "moe_layer_start_index": 0, "moe_layer_end_index": 1}),
    "hy-v3": ("hy_v3", {"num_attention_heads": 12, "num_key_value_heads": 3, "attention_bias": True}),
    "hy-v3-stacked": ("hy_v3", {"stacked": True, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "gemma2": ("gemma2", {"num_attention_heads": 12, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", {
        "num_attention_heads": 12, "num_key_value_heads": 3, "attention_bias": True, "final_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "gemma4": ("gemma4", {
        "num_attention_heads": 8, "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "gemma4-values-biases": ("gemma4", {
        "num_attention_heads": 12, "num_key_value_heads": 3, "attention_bias": True, "attention_k_eq_v": False,
        "tie_word_embeddings": True, "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
    "gemma4-experts": ("gemma4_moe", {
        "num_attention_heads": 8, "num_key_value_heads": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }),
    "gemma4-experts-inputs-shared": ("gemma4_moe", {
        "stacked": True, "tie_word_embeddings": True, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 400,
        "num_kv_shared_layers": 1, "num_hidden_layers": 4, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    }),
    "gemma4-inputs-shared": ("gemma4_e", {
        "num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }),
    "gemma4-one-size-of-heads": ("gemma4_e", {
        "num_hidden_layers": 6, "num_kv_shared_layers": 3, "global_head_dim": 12, "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }),
    "olmo3": ("olmo3", {"num_attention_heads": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-5-tied-biases": ("qwen3_5", {"tie_word_embeddings": True, "attention_bias": True, "full_attention_interval": 3}),
    "qwen3-5-moe-one-value-head": ("qwen3_5_moe", {"linear_num_value_heads": 4}),
}  # fmt: skip

LAYOUTS = [(1, 1), (2, 1), (4, 2)]

# Per step: how many next tokens of which of three sequences (40, 25 and 13 tokens long); single tokens first, as in the engine.


@functools.cache
def _case_files(case: str, root: Path) -> tuple[Path, list[Tensor], list[Tensor]]:
    """(folder, token ids per sequence, transformers' logits per sequence)."""
    family, overrides = CASES[case]
    folder = write_checkpoint(root / case, family, **{"num_hidden_layers": 3, **overrides})
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    with torch.inference_mode():
        return folder, ids, [reference(tokens[None]).logits[0] for tokens in ids]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def _assert_same(logits: Tensor, expected: Tensor) -> None:
    """Log-probabilities reach -20 here, where fp32's last place is 2e-6. The order of a sum depends on the GEMM library:
    it moved them by up to 1.2e-4 at tp 4, and by 2.6e-4 where a temperature makes the scores of queries larger (Ministral 3)."""
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=4e-4)


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS, ids=[f"tp{tp}pp{pp}" for tp, pp in LAYOUTS])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tp: int, pp: int, root: Path) -> None:
    folder, ids, expected = _case_files(case, root)
    formation = Formation(folder, tp=tp, pp=pp)
    run_steps(formation, STEPS, ids, expected, _assert_same)


def test_one_line_of_data_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arcee, of which the package has nothing: its MLP is ReLU squared without a gate."""
    arcee = Family(4096, "head_dim attention_bias mlp_bias", activation="relu2", rms_norm_eps=1e-5)
    monkeypatch.setitem(FAMILIES, "ArceeForCausalLM", arcee)
    monkeypatch.setitem(model_fields.MODEL, "ArceeForCausalLM", model_fields._table(arcee))
    monkeypatch.setitem(checkpoints._FAMILIES, "arcee", ("Arcee", {"attention_bias": True, "mlp_bias": True}))
    folder = write_checkpoint(tmp_path, "arcee", rope_parameters=YARN)
    tokens = torch.arange(5, 45)
    with torch.inference_mode():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens[None]).logits[0]
    for tp, pp in LAYOUTS:
        _assert_same(Formation(folder, tp=tp, pp=pp).step([(0, tokens)])[0], expected)


def test_three_ranks_with_heads_that_straddle(tmp_path: Path) -> None:
    """6 query heads and 2 KV heads over 3 ranks: the middle rank's queries belong to both."""
    folder = write_checkpoint(tmp_path, "llama", num_attention_heads=6, intermediate_size=96)
    tokens = torch.arange(5, 30)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    formation = Formation(folder, tp=3)
    assert [model.declared_caches()[0][0].shape[0] for model in formation.models[0]] == [2, 2, 2]
    _assert_same(formation.step([(0, tokens)])[0], expected)


@pytest.mark.parametrize("case", ["phi3-window", "gemma4-experts"])
def test_projections_of_one_input_may_be_apart(case: str, root: Path, tmp_path: Path) -> None:
    """Of a family whose checkpoints have them in one tensor (Phi-3), or those of all experts (Gemma 4), unless tools have quantized
    them."""
    folder, ids, expected = _case_files(case, root)
    shape = ModelShape.from_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    fused = [each for layer in range(shape.num_layers) for each in layer_tensors(shape, layer) if each.fused is not None]
    for tensor in fused:
        stored, rows = tensors[tensor.fused.name], slice(tensor.fused.row, tensor.fused.row + tensor.shape[0])
        parts = stored[:, rows] if tensor.experts else stored[rows].unsqueeze(0)
        tensors |= {name: part.clone() for name, part in zip(tensor.expand(), parts, strict=True)}
    for name in {tensor.fused.name for tensor in fused}:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", tmp_path)
    _assert_same(Formation(tmp_path, tp=2).step([(0, ids[1])])[0], expected[1])


@pytest.mark.parametrize("case", [
    "llama-12q-3kv-biases-llama3", "mistral-window", "qwen2-window-above", "qwen3-12q-6kv-biases", "granite", "minimax-m2",
    "phi3-window", "olmo3", "gemma2", "gemma3", "gemma4", "qwen3-next", "granite-hybrid",
    "nemotron-h", "gemma4-experts", "gemma4-inputs-shared",
])  # fmt: skip
def test_every_weight_changes_the_outcome(case: str, root: Path) -> None:
    """The checkpoints of these tests leave no part of the arithmetic neutral: but what multiplies the input of the last norm."""
    folder, ids, _ = _case_files(case, root)
    neutral = f"registered.{ModelShape.from_folder(folder).num_layers - 1}.layer_scalar.weight"
    assert_every_weight_matters(Formation(folder), ids[1], least=1e-2, neutral=neutral)


@pytest.mark.parametrize("case", ["gemma4", "gemma4-values-biases", "gemma4-experts", "gemma4-inputs-shared", "exaone4"])
def test_what_is_declared_is_read(case: str, root: Path) -> None:
    assert_catalog_is_read(_case_files(case, root)[0], is_on_disk="experts" not in case)


def test_stages_have_the_bytes_that_are_declared(root: Path) -> None:
    """Of what no layer has, too: the first stage makes the inputs of all layers."""
    folder = _case_files("gemma4-inputs-shared", root)[0]
    formation = Formation(folder, tp=2, pp=2)
    for (model, *_), nbytes in zip(formation.models, weight_bytes(formation.shape, "fp32", Layout(tp=2, pp=2)), strict=True):
        targets = {part.target.data_ptr(): part.target.nbytes for part in weights.slices(model)}
        assert sum(targets.values()) + sum(each.inv_freq.nbytes for each in model.rotary_embs.values()) == nbytes


def test_copies_of_experts_have_the_scale_of_their_expert(root: Path) -> None:
    folder, ids, expected = _case_files("gemma4-experts", root)
    formation = Formation(folder, tp=2, moe_ep=2, redundant_experts=4)
    _assert_same(formation.step([(0, ids[1])])[0], expected[1])


def test_bf16_stays_near_fp32(root: Path) -> None:
    """Half precision goes through the same code; its noise is that of the dtype."""
    folder, ids, expected = _case_files("llama-yarn", root)
    formation = Formation(folder)
    for stage in formation.models:
        for model in stage:
            model.to(torch.bfloat16)
            for rotary in model.rotary_embs.values():
                rotary.float()
    formation.caches = [
        [[LayerCache({name: each.bfloat16() for name, each in c.tensors.items()}) for c in rank] for rank in stage]
        for stage in formation.caches
    ]
    logits = formation.step([(0, ids[1])])[0]
    assert logits.dtype == torch.float32
    near = (logits.log_softmax(-1) - expected[1].log_softmax(-1)).abs().mean()
    assert 1e-4 < near < 0.3
