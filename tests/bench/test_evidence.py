# SPDX-License-Identifier: Apache-2.0
"""`phalanx bench evidence` on the demo model: a real server beside transformers."""

from __future__ import annotations

import json
import math
import stat
import sys

import pytest

from phalanx.bench import evidence
from phalanx.config.sources import RawOptions
from phalanx.errors import EngineError, OptionError

LM_EVAL = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--output_path") + 1], "model")
out.mkdir(parents=True)
tasks = words[words.index("--tasks") + 1].split(",")
(out / "results_1.json").write_text(json.dumps({{"results": {{task: {{"acc,none": 0.5, "alias": task}} for task in tasks}}}}))
"""


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(evidence, "TEXTS", evidence.TEXTS[:2])
    monkeypatch.setattr(evidence, "STREAMS", (2,))


def raw_options(**values):
    values = {"model": "demo", "device": "cpu", **values}
    return RawOptions(values, dict.fromkeys(values, "the test"))


def test_the_demo_agrees_with_transformers(short, monkeypatch, tmp_path):
    program = tmp_path / "lm_eval"
    program.write_text(LM_EVAL.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(evidence, "lm_eval_program", lambda: str(program))
    monkeypatch.setenv("PHALANX_API_KEY", "the server's key")
    document = evidence.run(
        raw_options(cluster_token="a secret of more than sixteen bytes"), evidence.Questions("cpu", ["gsm8k", "mmlu"], 3)
    )
    beside = document["results"]["transformers"]
    assert beside["agrees"]
    assert beside["positions"] > 150
    assert beside["mean_difference"] < 1e-4
    assert beside["same_best_token"] == 1
    assert beside["greedy_equal"] == [1, 1]
    [speed] = document["results"]["speed"]
    assert speed["output_tok_s"] > 0
    assert document["results"]["lm_eval"]["tasks"]["mmlu"]["acc,none"] == 0.5
    assert document["asked"] == {"model": "demo", "device": "cpu"}
    assert "secret" not in json.dumps(document)
    assert len(evidence.tables(document)) == 3


def sides(change):
    reference = [{"logprobs": [-1.0, -2.0], "best": [3, 4], "greedy": " ab cd"}]
    return reference, [{"logprobs": [value + change for value in (-1.0, -2.0)], "best": [3, 5], "greedy": "ab xy"}]


@pytest.mark.parametrize(
    ("change", "agrees"),
    [(0.0, True), (0.019, True), (-0.021, False), (0.03, False), (math.nan, False), (-math.inf, False), (-800.0, False)],
)
def test_what_differs_is_said(change, agrees):
    comparison = evidence.compared(*sides(change))
    assert comparison["agrees"] is agrees
    assert comparison["same_best_token"] == 0.5
    assert comparison["greedy_equal"] == [0.6]
    json.dumps(comparison, allow_nan=False)


def test_without_transformers_the_rest_is_measured(short, tmp_path):
    """A folder that transformers cannot read: why is in the report."""
    why = evidence.transformers_reference(tmp_path, "cpu", tmp_path)
    assert isinstance(why, str)
    assert why.startswith("transformers ended with status 1: ")


def test_what_is_missing_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(evidence, "lm_eval_program", lambda: None)
    with pytest.raises(OptionError, match="needs lm-eval"):
        evidence.check(evidence.Questions("cpu", ["gsm8k"]))
    monkeypatch.setattr(evidence, "lm_eval_program", lambda: "lm_eval")
    monkeypatch.setenv("PHALANX_API_KEY", "k")
    with pytest.raises(OptionError, match="wants a key"):
        evidence.check(evidence.Questions("cpu", ["gsm8k"]))
    with pytest.raises(OptionError, match="cuda, cpu or none"):
        evidence.check(evidence.Questions("tpu"))


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(EngineError, match="max_seq_len"), evidence.server(raw_options(max_seq_len=10**9), tmp_path):
        pass
