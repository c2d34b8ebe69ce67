# SPDX-License-Identifier: Apache-2.0
"""The weight files of a folder as transformers finds them: generated indices and files, whole and in shards, of one age or of two.

A folder gives the weights that transformers takes from it, or is refused. A failure prints the seed of its folder.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.errors import WeightError
from phalanx.models import registry, weights
from phalanx.models.checkpoint import HEAD, INDEX, SINGLE
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.fuzz import fuzz_seeds


def generate(chance: random.Random, sources: dict[str, Path], folder: Path) -> list[str]:
    """Write a folder; returns what was done to it."""
    changes = []
    tied = chance.random() < 0.3
    first = sources["tied" if tied else "shards"]
    shutil.copytree(first, folder)
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    places = index["weight_map"]
    files = sorted(set(places.values()))
    if chance.random() < 0.4:
        changes.append("places shuffled")
        index["weight_map"] = places = {name: chance.choice(files) for name in places}
    if chance.random() < 0.2:
        changes.append("names not listed")
        for name in chance.sample(sorted(places), 3):
            if list(places.values()).count(places[name]) > 1:
                del places[name]
    if chance.random() < 0.2:
        changes.append("metadata empty")
        index["metadata"] = {}
    if tied and chance.random() < 0.5:
        changes.append("tied head stored")
        name = next(file for file in files if "model.embed_tokens.weight" in load_file(folder / file))
        tensors = load_file(folder / name)
        tensors[HEAD] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / name, {"format": "pt"})
        places[HEAD] = name
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    if not tied and chance.random() < 0.3:
        changes.append("whole file beside")
        shutil.copy(sources["single"] / SINGLE, folder / SINGLE)
        if chance.random() < 0.5:
            changes.append("shards gone")
            for file in files:
                (folder / file).unlink()
    elif chance.random() < 0.15:
        changes.append("a shard gone")
        (folder / chance.choice(files)).unlink()
    return changes


def of_transformers(folder: Path) -> dict[str, torch.Tensor] | None:
    """The weights by name; None where it refuses the folder or fills in weights of its own."""
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError):
        return None
    return None if report["missing_keys"] or report["mismatched_keys"] else dict(model.state_dict())


def of_phalanx(folder: Path) -> dict[str, torch.Tensor] | None:
    """Some weights by the names of transformers; None where it refuses the folder."""
    shape = ModelShape.from_folder(folder, quiet=True)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, torch.device("cpu")))
    try:
        weights.load(model, folder)
    except WeightError:
        return None
    assert model.lm_head is not None
    values: dict[str, Any] = {HEAD: model.lm_head.table.weight[: shape.vocab_size]}
    for part in weights.slices(model):
        if part.name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight", "embed_tokens.weight")):
            values[part.name] = part.target
    return values


def test_generated_folders_give_the_weights_that_transformers_takes(tmp_path: Path) -> None:
    sources = {
        "shards": write_checkpoint(tmp_path / "shards", "llama", seed=1, max_shard_size="60KB"),
        "single": write_checkpoint(tmp_path / "single", "llama", seed=2),
        "tied": write_checkpoint(tmp_path / "tied", "llama", seed=3, tie_word_embeddings=True, max_shard_size="60KB"),
    }
    outcomes: Counter[str] = Counter()
    with fuzz_seeds(20) as seeds:
        for seed in seeds:
            folder = tmp_path / str(seed)
            seeds.case = ", ".join(generate(random.Random(seed), sources, folder))
            expected, values = of_transformers(folder), of_phalanx(folder)
            assert (expected is None) == (values is None)
            if expected is not None and values is not None:
                assert len(values) == 11
                assert [name for name, value in values.items() if not torch.equal(value, expected[name])] == []
            outcomes["refused" if expected is None else "read"] += 1
            shutil.rmtree(folder)
    print(f"{seeds.count} folders: {dict(outcomes)}")
    assert outcomes["read"] > outcomes["refused"]
