# SPDX-License-Identifier: Apache-2.0
"""Text models of multimodal checkpoints against transformers, by the names of released files and by those of transformers 5."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.config.model import ModelShape
from phalanx.errors import ModelError, UnsupportedArchitecture, WeightError
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.models_formation import Formation, run_steps
from tests.support.models_logits import LENGTHS, STEPS

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")  # of transformers, in the vision tower of Llama-4

LAYOUTS = [(1, 1), (2, 1), (1, 2)]
WRAPPED = [
    "mistral3",
    "llama4_vl",
    "ministral3_vl",
    "mistral4_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "exaone4_5",
    "gemma3_vl",
    "kimi_k25",
    "ernie4_5_vl",
]


@pytest.fixture(scope="module", params=[(name, own) for name in WRAPPED for own in (False, True)], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(folder, token ids per sequence, transformers' logits per sequence)."""
    name, own = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp(name), name, num_hidden_layers=3, stacked=own)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    if name == "kimi_k25" and not own:  # transformers renames the text model's layers as it renames those of the vision tower
        tensors = load_file(folder / "model.safetensors")
        as_released = {key.replace("language_model.model.blocks", "language_model.model.layers"): t for key, t in tensors.items()}
        save_file(as_released, folder / "model.safetensors", {"format": "pt"})
    if name == "llama4_vl":  # transformers 5.24 asks the output of the text model for that of images
        model = model.language_model
    generator = torch.Generator().manual_seed(11)
    ids = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    with torch.inference_mode():
        return folder, ids, [model(input_ids=tokens[None]).logits[0] for tokens in ids]


def _same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS, ids=str)
def test_logits_equal_transformers(checkpoint, tp: int, pp: int, caplog: pytest.LogCaptureFixture) -> None:
    folder, ids, expected = checkpoint
    caplog.set_level(logging.INFO)
    run_steps(Formation(folder, tp=tp, pp=pp), STEPS, ids, expected, _same)
    assert "the text model" in caplog.text
    assert "are not loaded: " in caplog.text
    assert "knows nothing of" not in caplog.text


def test_a_file_without_text_config_has_the_text_fields_beside_the_others(tmp_path: Path) -> None:
    """Qwen2.5-VL as released."""
    folder = write_checkpoint(tmp_path, "qwen2_5_vl", tie_word_embeddings=True)
    nested = ModelShape.from_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config, "model_type": "qwen2_5_vl", "rope_theta": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(flat))
    assert ModelShape.from_folder(folder) == nested
    assert nested.tie_word_embeddings


def test_the_text_fields_of_ernie_are_the_first_of_a_list(tmp_path: Path) -> None:
    """Ernie 4.5 VL as released: fields of all towers side by side, and values of text before those of images."""
    folder = write_checkpoint(tmp_path, "ernie4_5_vl", num_hidden_layers=3)
    nested = ModelShape.from_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    flat = {
        **text, **config, "model_type": "ernie4_5_moe_vl", "rope_theta": text.pop("rope_parameters")["rope_theta"],
        "moe_num_experts": [8, 8], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28], "moe_layer_interval": 1,
    }  # fmt: skip
    del flat["mlp_layer_types"], flat["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(flat))
    assert ModelShape.from_folder(folder) == nested
    assert nested.experts is not None
    assert nested.experts.intermediate == 32


def test_a_tensor_of_no_known_tower_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mistral3")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "audio_tower.proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match="audio_tower"):
        Formation(folder)


def test_another_text_model_and_two_quantizations_are_refused(tmp_path: Path) -> None:
    config = json.loads((write_checkpoint(tmp_path, "mistral3") / "config.json").read_text())
    with pytest.raises(UnsupportedArchitecture, match="'t5'"):
        ModelShape.from_config({**config, "text_config": {**config["text_config"], "model_type": "t5"}})
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = {**config["text_config"], "quantization_config": {**fp8, "weight_block_size": [64, 64]}}
    with pytest.raises(ModelError, match="two values of quantization_config"):
        ModelShape.from_config({**config, "text_config": text, "quantization_config": fp8})
    with pytest.raises(ModelError, match="logit_scale"):
        ModelShape.from_config({**config, "logit_scale": 0.5})


def test_a_field_beside_the_text_model_that_is_in_no_table_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((write_checkpoint(tmp_path, "mistral3") / "config.json").read_text())
    ModelShape.from_config({**config, "vendor_mode": 1, "text_config": {**config["text_config"], "vendor_flag": 1}})
    assert ["vendor_mode, vendor_flag: not used" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_quantization_names_layers_as_the_file_does(tmp_path: Path, prefix: str, nested: bool) -> None:
    config = json.loads((write_checkpoint(tmp_path, "mistral3") / "config.json").read_text())
    skipped = ["vision_tower", "multi_modal_projector", f"{prefix}layers.0.mlp.down_proj"]
    where = config["text_config"] if nested else config
    where["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skipped}
    quantization = ModelShape.from_config(config).quantization
    assert quantization is not None
    assert not quantization.of("model.layers.0.mlp.down_proj")
    assert quantization.of("model.layers.1.mlp.down_proj")
    assert quantization.of("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("family", "unified"), [("gemma4", False), ("gemma4", True), ("gemma4_moe", False), ("gemma4_e", False)], ids=str
)
def test_a_text_model_inside_of_gemma_4(family: str, unified: bool, tmp_path: Path) -> None:
    """As 31B, 12B, 26B-A4B and E2B are released, with tensors of towers beside those of the text model, and with keys and values
    of layers that share those of others."""
    theirs = write_checkpoint(tmp_path / "text", family, num_hidden_layers=6)
    tensors = load_file(theirs / "model.safetensors")
    if family == "gemma4_e":
        assert "model.layers.5.self_attn.k_proj.weight" not in tensors
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.5.self_attn.{name}.weight"] = tensors[f"model.layers.3.self_attn.{name}.weight"].clone()
    own = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    own["model.vision_embedder.patch_dense.weight" if unified else "model.vision_tower.patch_embedder.weight"] = torch.ones(2, 2)
    text = json.loads((theirs / "config.json").read_text())
    text["model_type"] = "gemma4_unified_text" if unified else "gemma4_text"
    if unified:
        del text["hidden_size_per_layer_input"]
    stem = "Gemma4Unified" if unified else "Gemma4"
    config = {"architectures": [f"{stem}ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    tokens = torch.arange(5, 30)
    expected = Formation(theirs).step([(0, tokens)])[0]
    torch.testing.assert_close(Formation(folder).step([(0, tokens)])[0], expected, rtol=0, atol=0)
