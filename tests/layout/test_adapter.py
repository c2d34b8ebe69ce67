# SPDX-License-Identifier: Apache-2.0
"""Adapters are checked whole: what the model has no place for is refused by name, before anything is placed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.config.model import ModelShape
from phalanx.errors import ModelError, WeightError
from phalanx.layout.adapter import AdapterFile, read_adapter
from tests.support.adapters import PEFT, SEVEN, write_adapter
from tests.support.checkpoints import write_checkpoint

Tensors = dict[str, torch.Tensor]
Q_A = f"{PEFT}model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def shape(base) -> ModelShape:
    return ModelShape.from_folder(base)


def load(folder: Path, shape: ModelShape) -> AdapterFile:
    return read_adapter(folder, shape, max_rank=16)


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder


def test_a_sound_adapter_has_a_part_for_each_module(base, shape, tmp_path):
    file = load(write_adapter(tmp_path, base, rank_pattern={"v_proj": 9}), shape)
    assert file.rank == 9
    assert len(file.parts) == 2 * len(SEVEN)
    (value,) = (part for part in file.parts if part.layer == "model.layers.1.self_attn.v_proj")
    assert value == ("model.layers.1.self_attn.v_proj", value.a, value.b, 9, pytest.approx(8 / 9), 0)
    assert value.a == f"{PEFT}{value.layer}.lora_A.weight"


def test_the_digest_is_that_of_all_that_changes_the_output(base, shape, tmp_path):
    changes = [{}, {"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 2}}]
    folders = [write_adapter(tmp_path / str(number), base) for number in range(len(changes))]
    for folder, change in zip(folders, changes, strict=True):
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    other = changed(write_adapter(tmp_path / "other", base), lambda tensors: tensors[Q_A].add_(1e-3))
    assert len({load(folder, shape).digest for folder in [*folders, other]}) == len(changes) + 1
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    (folders[3] / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "renamed"}))
    assert load(folders[3], shape).digest == load(folders[0], shape).digest


def test_a_tensor_of_several_layers_is_taken_apart(tmp_path):
    """Phi-3 has q, k and v in one tensor, and so have its adapters."""
    base = write_checkpoint(tmp_path / "base", "phi3")
    shape = ModelShape.from_folder(base)
    parts = {part.layer: part for part in load(write_adapter(tmp_path / "a", base, modules=["qkv_proj"]), shape).parts}
    name = "model.layers.0.self_attn"
    rows = [parts[f"{name}.{each}_proj"].row for each in "qkv"]
    assert rows == [0, 48, 72]
    assert len({parts[f"{name}.{each}_proj"].a for each in "qkv"}) == 1


def rename(name: str, other: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def add(name: str, *size: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(size)})


BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no tensor": (lambda tensors: tensors.clear(), "adapts no module"),
    "half a pair": (lambda tensors: tensors.pop(Q_B), f"holds {Q_A} without its lora_B"),
    "another model's module": (rename(Q_A, Q_A.replace("q_proj", "query_key_value")), "has no such linear layer"),
    "merged q, k and v": (rename(Q_A, Q_A.replace("q_proj", "qkv_proj")), "has no such linear layer"),
    "a layer too many": (rename(Q_A, Q_A.replace("layers.0", "layers.7")), "num_hidden_layers=2"),
    "the norm": (add(f"{PEFT}model.layers.0.input_layernorm.lora_A.weight", 4, 48), "has no such linear layer"),
    "a transposed A": (lambda tensors: tensors.update({Q_A: tensors[Q_A].T.contiguous()}), r"shape \[48, 4\]"),
    "another rank": (lambda tensors: tensors.update({Q_A: torch.ones(5, 48)}), r"rank 4 and the model imply \[4, 48\]"),
    "another model's size": (lambda tensors: tensors.update({Q_B: torch.ones(64, 4)}), r"imply \[48, 4\]"),
    "a vector": (lambda tensors: tensors.update({Q_A: torch.ones(192)}), r"shape \[192\]"),
    "integers": (lambda tensors: tensors.update({Q_A: torch.ones(4, 48, dtype=torch.int8)}), "dtype I8"),
    "DoRA": (add(f"{PEFT}model.layers.0.self_attn.q_proj.lora_magnitude_vector", 48), "it belongs to DoRA"),
    "a head": (add(f"{PEFT}lm_head.weight", 384, 48), "the output head are not computed"),
    "an adapted head": (add(f"{PEFT}lm_head.lora_A.weight", 4, 48), "the output head are not computed"),
    "an embedding": (add(f"{PEFT}model.embed_tokens.lora_embedding_A", 4, 384), "adapters of embeddings"),
    "a bias": (add(f"{PEFT}model.layers.0.self_attn.q_proj.bias", 48), "trained biases are not read"),
    "a bias of B": (add(f"{PEFT}model.layers.0.self_attn.q_proj.lora_B.bias", 48), "trained biases are not read"),
    "an expert": (add(f"{PEFT}model.layers.0.mlp.experts.3.gate_proj.lora_A.weight", 4, 48), "adapters of experts"),
    "a name without a place": (add("weight", 4), "it is no tensor of a LoRA adapter"),
    "the same twice": (lambda tensors: tensors.update({Q_A.removeprefix(PEFT): tensors[Q_A].clone()}), "two names of one tensor"),
    "B of zeros": (lambda tensors: [each.zero_() for name, each in tensors.items() if "lora_B" in name], "changes nothing"),
    "B of negative zeros": (lambda tensors: [each.fill_(-0.0) for name, each in tensors.items() if "lora_B" in name], "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_the_model_has_no_place_for_is_refused_by_name(base, shape, tmp_path, case):
    change, failure = BROKEN[case]
    folder = changed(write_adapter(tmp_path, base), change)
    with pytest.raises(WeightError, match=failure):
        load(folder, shape)


def test_what_the_config_contradicts_is_refused_by_name(base, shape, tmp_path):
    folder = write_adapter(tmp_path, base)
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, failure in (({"target_modules": ["k_proj"]}, "target_modules of"), ({"r": 8}, r"imply \[8, (48|80)\]")):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(WeightError, match=failure):
            load(folder, shape)


def test_a_rank_above_the_largest_is_refused_with_the_option(base, shape, tmp_path):
    with pytest.raises(WeightError, match="has rank 17; max_lora_rank is 16; start with max_lora_rank=17"):
        load(write_adapter(tmp_path, base, r=17), shape)


def test_a_folder_without_safetensors_is_refused(base, shape, tmp_path):
    with pytest.raises(WeightError, match=r"is no folder; give the folder .* one of a hub must be downloaded before"):
        load(tmp_path / "absent", shape)
    folder = write_adapter(tmp_path / "a", base)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(WeightError, match=r"holds no adapter_model.safetensors; it holds adapter_model.bin; weights are read from"):
        load(folder, shape)


@pytest.mark.parametrize(("tokens", "failure"), [
    ({"<new>": 384}, "has token '<new>': 384; the model has vocab_size=384; their embeddings"),
    ({"<new>": "1"}, "token '<new>': '1'"), ([], "holds no JSON object"),
])  # fmt: skip
def test_tokens_that_the_model_has_no_embedding_for_are_refused(base, shape, tmp_path, tokens, failure):
    folder = write_adapter(tmp_path, base)
    (folder / "added_tokens.json").write_text(json.dumps({"<the base's>": 383, "<first>": 0}))
    assert load(folder, shape)
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    with pytest.raises(ModelError, match=failure):
        load(folder, shape)


def test_a_damaged_file_is_refused_wherever_it_is_damaged(base, shape, tmp_path):
    """A hundred of them: cut short, or with random bytes in the header. Bytes among the values make another sound adapter."""
    file, chance = write_adapter(tmp_path, base) / WEIGHTS, random.Random(0)
    sound = file.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    refused = 0
    for number in range(100):
        damaged = bytearray(sound[: chance.randrange(len(sound))] if number % 2 else sound)
        if not number % 2:
            for _ in range(3):
                damaged[chance.randrange(header)] = chance.randrange(256)
        file.write_bytes(damaged)
        try:
            load(tmp_path, shape)
        except ModelError:
            refused += 1
    assert refused >= 95  # a byte of the header's padding, or of metadata, changes nothing
