# SPDX-License-Identifier: Apache-2.0
"""A quantized output head: each rank has rows of the vocabulary, and logits are those of the dequantized weight; files tell whether
a head is quantized where the configuration forgets it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config.model import ModelShape
from phalanx.config.quantization import INT4_ON_LOAD, ON_LOAD
from phalanx.errors import WeightError
from phalanx.layout import Layout
from phalanx.layout.weights import weight_bytes
from phalanx.models import weights
from phalanx.models.decoder import Decoder
from phalanx.models.layers.embedding import QuantizedVocabulary, VocabParallelEmbedding
from phalanx.worker.self_check import quantized_kernels
from tests.support import nvfp4_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import FORMS, Form, rewrite
from tests.support.models_formation import Formation
from tests.support.quantized_checkpoints import declare, per_channel, per_tensor, with_input_scale

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 390, "std": 0.08,
}  # fmt: skip
IDS = torch.randint(0, 384, (24,), generator=torch.Generator().manual_seed(1))
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True}


def of_fp8(encode: Callable[[Tensor], Any]) -> Callable[[Form, Tensor, str], Any]:
    def act(form: Form, weight: Tensor, name: str) -> Any:
        stored, scales, meant = encode(weight)
        return {"weight": stored, **scales}, meant

    return act


def with_head(form: Form) -> Form:
    """The form, whose configuration does not except the head."""
    config = copy.deepcopy(form.config)
    for entry in ("ignore", "exclude_modules"):
        if entry in config:
            config[entry] = [name for name in config[entry] if name != "lm_head"]
    return replace(form, config={**config, "lm_head": True} if config["quant_method"] == "gptq" else config)


FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["model.layers.1.mlp.down_proj"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**ACTIVATIONS, "dynamic": False, "strategy": "channel"}, "input_activations": None,
    }},
}  # fmt: skip
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.1.mlp.down_proj"]}
QUANTIZED = {
    **{kind: with_head(FORMS[kind]) for kind in ("packed 32", "packed 64 with zeros", "packed channel", "gptq", "gptq with zeros")},
    "nvfp4": with_head(nvfp4_checkpoints.FORMS["modelopt"]), "fp8": Form(FP8, of_fp8(per_channel), -1),
    "fp8 modelopt": Form(MODELOPT_FP8, of_fp8(with_input_scale(per_tensor)), -1),
}  # fmt: skip


def quantize_head(folder: Path, form: Form, plain: Path) -> tuple[Path, Path]:
    """The checkpoints of `rewrite`, their heads in the form, too."""
    stored, meant = rewrite(plain, folder, form)
    for path, quantized in ((stored, True), (meant, False)):
        contents = load_file(path / "model.safetensors")
        tensors, weight = form.encode(form, load_file(plain / "model.safetensors")["lm_head.weight"].float(), "lm_head.q_proj")
        del contents["lm_head.weight"]
        contents |= {f"lm_head.{end}": each for end, each in tensors.items()} if quantized else {"lm_head.weight": weight}
        save_file({name: each.contiguous() for name, each in contents.items()}, path / "model.safetensors", {"format": "pt"})
    return stored, meant


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), "llama", dtype=torch.bfloat16, **SIZES)


def _shapes(model: Decoder) -> set[str]:
    return {case.shape for case in quantized_kernels._cases(model, 3)}


def logits(folder: Path, **options: Any) -> Tensor:
    formation = Formation(folder, **options)
    return torch.cat([formation.step([(0, IDS[:20])], padding=1)[0], formation.step([(0, IDS[20:])])[0]])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_logits_are_those_of_the_dequantized_head(kind: str, plain: Path, tmp_path: Path) -> None:
    """Of 390 tokens, two ranks have 256 and 134, and four 128, 128, 128 and 6, each with padding."""
    stored, meant = quantize_head(tmp_path, QUANTIZED[kind], plain)
    shape = ModelShape.from_folder(stored)
    expected = logits(meant)
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        formation = Formation(stored, tp=tp, pp=pp)
        head = formation.models[-1][0].lm_head
        assert isinstance(head.table, QuantizedVocabulary)
        torch.testing.assert_close(logits(stored, tp=tp, pp=pp), expected, rtol=1e-4, atol=1e-4)
        assert shape.vocab_size == expected.shape[1] == 390
        states = torch.randn(3, 128)
        outputs = [model.lm_head.local(states, out=torch.full((3, head.width), 7.0)) for model in formation.models[-1]]
        assert torch.equal(outputs[0], head.local(states)), "a graph's buffer gets the same bits"
        assert f"{head.table.num_tokens} x 128" in str(_shapes(formation.models[-1][0])), "the kernels' test of the start has it"
        assert not outputs[-1][:, formation.models[-1][-1].lm_head.table.num_tokens :].any()
        assert torch.equal(torch.cat(outputs, 1)[:, :390].argmax(1), torch.cat([o.clone() for o in outputs], 1).argmax(1))


@pytest.mark.parametrize("kind", ["packed 32", "nvfp4", "fp8"])
def test_the_planner_counts_a_quantized_head(kind: str, plain: Path, tmp_path: Path) -> None:
    stored, _ = quantize_head(tmp_path, QUANTIZED[kind], plain)
    for pp in (1, 2):
        formation = Formation(stored, pp=pp)
        promised = weight_bytes(formation.shape, "fp32", Layout(pp=pp))
        own = tuple(
            sum({each.data_ptr(): each.nbytes for each in (*stage[0].parameters(), *stage[0].buffers())}.values())
            for stage in formation.models
        )
        assert promised == own


@pytest.mark.parametrize("kind", ["packed 32", "fp8", "nvfp4"])
def test_a_plain_head_stays_plain_whatever_the_configuration_says(
    kind: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, meant = rewrite(plain, tmp_path, QUANTIZED[kind])
    with caplog.at_level(logging.WARNING):
        model = Formation(stored).models[0][0]
    head = model.lm_head.table
    assert isinstance(head, VocabParallelEmbedding)
    weights.require_complete(model, stored)
    assert model.lm_head.table is head, "to check a folder changes nothing"
    assert "1 weights in 16 bit that its quantization does not except, lm_head.weight among them" in caplog.text
    torch.testing.assert_close(logits(stored, tp=2), logits(meant), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_tools_that_leave_the_head_alone(kind: str, plain: Path, tmp_path: Path) -> None:
    """AutoAWQ quantizes no head, and GPTQ one that `lm_head` names."""
    config = {name: value for name, value in FORMS[kind].config.items() if name != "modules_to_not_convert"}
    form = replace(FORMS[kind], config=config)
    assert ModelShape.from_folder(rewrite(plain, tmp_path, form)[0]).quantization.head is None  # type: ignore[union-attr]
    assert ON_LOAD.head is None
    assert INT4_ON_LOAD.head is None


def test_a_quantized_head_that_the_configuration_excepts_is_named(plain: Path, tmp_path: Path) -> None:
    stored, _ = quantize_head(tmp_path, QUANTIZED["packed 32"], plain)
    declare(stored, FORMS["packed 32"].config)
    with pytest.raises(WeightError, match=r"lm_head\.weight_.*by config.json the output head is in 16 or 32 bit"):
        Formation(stored)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """Also on a stage without the embedding, and where the configuration excepts nothing."""
    plain = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, tie_word_embeddings=True, **SIZES)
    stored, meant = rewrite(plain, tmp_path, QUANTIZED["packed 32"])
    for pp in (1, 2):
        torch.testing.assert_close(logits(stored, pp=pp), logits(meant), rtol=1e-4, atol=1e-4)
