# SPDX-License-Identifier: Apache-2.0
"""The script that trains EAGLE-3 heads: its passes are those of a head that drafts, and the engine accepts what it has trained."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from phalanx import LLM, SamplingParams
from phalanx.comm.group import Solo
from phalanx.config.locate import DEMO
from phalanx.config.model import ModelShape
from phalanx.layout.eagle3 import Eagle3
from phalanx.models import registry, weights
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint
from tests.support.eagle3_heads import reference_drafts, write_head

pytestmark = pytest.mark.usefixtures("forked_python")

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_eagle3.py"
ENGINE = {"max_seq_len": 128, "max_batch_size": 32, "dtype": "fp32"}
PROMPTS = [f"t {number * 7} t{number}" for number in range(24)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_eagle3", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_eagle3"] = importlib.util.module_from_spec(spec)  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True, "norm_output": True}], ids=["plain", "norms"])
def test_passes_are_those_of_a_head_that_drafts(script: ModuleType, target: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    """Each pass of one forward over a text predicts what the head drafts behind the text's tokens, by plain torch."""
    folder, layers, count = write_head(tmp_path / "head", ids=(0, 2, 3), **flags), (0, 2, 3), 4
    tokens = torch.randint(3, 384, (19,), generator=torch.Generator().manual_seed(5)).tolist()
    drafts = reference_drafts(folder, target, tokens, layers, count)
    shape = ModelShape.from_folder(target)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, torch.device("cpu")))
    weights.load(model, target)
    read = load_file(folder / "model.safetensors")
    ids = read.pop("d2t") + torch.arange(96)
    del read["t2d"]
    head = script.Head(Eagle3.from_folder(folder, shape))
    head.load_state_dict(read)
    options = script.parsed(["model", "head", "--unroll", str(count), "--device", "cpu"])
    texts = [script.Text([3, 4, 5, 6], 1, 0.0, False), script.Text(tokens + drafts, len(tokens) - 1, 0.0, False)]
    states = script.states_of(model, texts, layers, ids, tmp_path, 64)
    states.inner = states.inner.float()
    table = model.embed_tokens.weight.float()
    trainer = script.Trainer(head, table, ids, states, options)
    loss, matches = trainer.run(texts)
    assert matches.tolist() == [[True] * count]
    assert loss.isfinite()
    texts[1].tokens[-2] = 3 if drafts[-2] != 3 else 4
    assert trainer.run(texts)[1].tolist()[0][:3] == [True, True, False]


def test_the_engine_accepts_what_a_trained_head_drafts(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And little of what an untrained one drafts. No token changes."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    common = [
        "demo", "--work", str(tmp_path / "work"), "--prompts", str(prompts), "--max_tokens", "40", "--temperatures", "0",
        "--draft_vocab_size", "256", "--lr", "5e-3", "--batch_tokens", "300", "--layers", "0", "2", "4", "--unroll", "3",
        "--device", "cpu", "--threads", "1", "--engine", json.dumps(ENGINE),
    ]  # fmt: skip
    assert script.main([common[0], str(tmp_path / "untrained"), *common[1:], "--epochs", "0"]) == 0
    assert script.main([common[0], str(tmp_path / "trained"), *common[1:], "--epochs", "11"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("texts: 24 of 24") == printed.count("states: those of the run before") == 1  # in the second run
    texts = [json.loads(line) for line in (tmp_path / "work" / "texts.jsonl").read_text().splitlines()]
    accepted = {}
    for name in ("untrained", "trained"):
        config = {
            "method": "eagle3", "model": str(tmp_path / name), "num_speculative_tokens": 3,
            "num_speculative_tokens_per_batch_size": [[1, 32, 3]],
        }  # fmt: skip
        with LLM("demo", **ENGINE, speculative_config=config) as llm:
            outputs = llm.generate([text["prompt"] for text in texts], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == [text["output"] for text in texts]
            stats = llm.stats()
            accepted[name] = sum(stats.accepted_tokens) / stats.draft_tokens
    assert accepted["trained"] > 0.3
    assert accepted["untrained"] < 0.1


def test_what_cannot_be_trained_is_refused(
    script: ModuleType, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    few = tmp_path / "few.txt"
    few.write_text("one\ntwo\n")
    cases = {
        ("--layers", "0", "1", "9"): "the head reads the states before layers 0, 1, 9; the target has 4 layers",
        ("--layers", "1", "2"): "--layers begins with 1",
        ("--layers", "0", "1", "2", "--prompts", str(few)): "2 prompts are not enough",
        ("--layers", "0", "1", "2", "--prompts", str(tmp_path / "none.txt")): "none.txt cannot be read",
    }
    for options, message in cases.items():
        assert script.main([str(target), str(tmp_path / "head"), *options]) == 1
        assert message in capsys.readouterr().err
    for flag, value in [
        ("--unroll", "0"),
        ("--lr", "nan"),
        ("--lr", "0"),
        ("--engine", "[1]"),
        ("--config", "7"),
        ("--engine", "{"),
    ]:
        with pytest.raises(SystemExit):
            script.main([str(target), str(tmp_path / "head"), flag, value])
        assert f"argument {flag}: " in capsys.readouterr().err
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    assert script.main([str(target), str(target), "--layers", "0", "1", "2"]) == 1
    assert "HEAD is the model's folder" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    recurrent = write_checkpoint(tmp_path / "recurrent", "qwen3_next")
    assert script.main([str(recurrent), str(tmp_path / "head")]) == 1
    assert "Qwen3NextForCausalLM keeps a state of each request" in capsys.readouterr().err
    work = tmp_path / "head.work"
    work.mkdir(exist_ok=True)
    (work / "about.json").write_text(json.dumps({"model": "another"}))
    assert script.main([str(DEMO), str(tmp_path / "head"), "--layers", "0", "2", "4"]) == 1
    assert "has texts of another model" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()  # a head that is there keeps its config.json
    short = [{"prompt": [1], "output": [2, 3], "temperature": 0}] * 21
    (work / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in short))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("x\n" * 21)
    stated = {"model": str(DEMO), "weights": script.changed(DEMO), "max_tokens": 2, "temperatures": [0.0], "prompts": ["x"] * 21}
    (work / "about.json").write_text(json.dumps(stated))
    options = ["--layers", "0", "2", "4", "--prompts", str(prompts), "--max_tokens", "2", "--temperatures", "0"]
    assert script.main([str(DEMO), str(tmp_path / "head"), *options]) == 1
    assert "0 answers have more than 5 tokens" in capsys.readouterr().err
