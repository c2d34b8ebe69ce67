# SPDX-License-Identifier: Apache-2.0
"""What drafts gain: by tokens that are stated, over steps and passes that are priced."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from phalanx import cli
from phalanx.config.model import ModelShape
from phalanx.errors import OptionError
from phalanx.layout import Layout, draft
from phalanx.layout.draft import DraftLm
from phalanx.layout.eagle3 import Eagle3
from phalanx.layout.families import known
from phalanx.planner import subject
from phalanx.planner.cost import Costs
from phalanx.planner.speculation import Speculation, gain


@pytest.fixture(scope="module")
def costs():
    """70B in FP8 on two H200: a step of one row takes 10.2 ms, one of four 10.8 (measured)."""
    return Costs(subject.shape_for("llama-3-70b"), "fp8", "fp8", Layout(tp=2), subject.machine_for("H200", gpus_per_node=2)[0])


def gained(costs, requests, tokens=2.5, network=None, drafts=3):
    return gain(costs, Speculation(drafts, network, tokens), requests, 256.0, 256)


def test_a_step_of_few_tokens_costs_little_more(costs):
    one = gained(costs, 1)
    assert one.step_ms == pytest.approx(10.2, rel=0.08)
    assert one.verify_ms == pytest.approx(10.8, rel=0.08)
    assert one.speed_up == pytest.approx(2.5 * one.step_ms / one.verify_ms)
    assert 1.0 < one.least_tokens < 1.15


def test_the_gain_falls_with_the_rows_and_grows_with_what_is_accepted(costs):
    gains = [gained(costs, requests).speed_up for requests in (1, 16, 64, 256)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2.2 > 1.0 > gains[-1]
    assert gained(costs, 1, 1.0).speed_up < 1.0 < gained(costs, 1, 1.5).speed_up < gained(costs, 1, 4.0).speed_up


def test_what_proposes_takes_time(costs):
    """Three passes of a head of 1.2 G parameters and four of a model of 1 G: see the bytes over the memory's bandwidth."""
    traits = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    small = ModelShape.from_config({**known("llama-3.1-8b"), **traits})
    head = Eagle3(replace(costs.shape, num_layers=1), 32000, 8192, (2, 40, 77))
    of_model, of_head = gained(costs, 1, network=DraftLm(small)), gained(costs, 1, network=head)
    assert 0.5 < of_head.draft_ms < 1.5
    assert 1.0 < of_model.draft_ms < 3.0
    assert of_model.speed_up < of_head.speed_up < gained(costs, 1).speed_up
    assert gained(costs, 1, network=head, drafts=6).draft_ms == pytest.approx(2 * of_head.draft_ms, rel=0.1)


def test_the_report_has_it(capsys, tmp_path):
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    words = ["plan", "llama-3-8b", "--gpu", "H100", "--gpus_per_node", "1", "--concurrency", "2"]
    assert cli.main([*words, "--speculative_config", config, "--acceptance_length", "2", "--json", str(tmp_path / "plan")]) == 0
    output = capsys.readouterr().out
    assert "drafts pay from 1." in output
    [plan] = json.loads((tmp_path / "plan").read_text())["plans"]
    assert f"{plan['speculation']['speed_up']:.2f}x: 2 tokens" in output
    assert plan["speculation"]["requests"] == 2
    assert cli.main([*words, "--speculative_config", config]) == 0
    assert "drafts pay" not in capsys.readouterr().out
    for wrong, text in (
        (["--acceptance_length", "2"], "has no effect without speculative_config"),
        (["--speculative_config", config, "--acceptance_length", "4.5"], "acceptance_length=4.5 is not from 1 to 4"),
    ):
        assert cli.main([*words, *wrong]) == 2
        assert text in capsys.readouterr().err


def test_a_draft_model_that_is_known_offline_needs_no_network(capsys, monkeypatch):
    monkeypatch.setattr(draft, "draft_folder", lambda config: pytest.fail("a whole checkpoint is fetched"))
    config = json.dumps({"method": "draft_model", "model": "llama-3-8b", "num_speculative_tokens": 3})
    words = ["plan", "llama-3-70b", "--gpu", "H200", "--gpus_per_node", "2", "--tp_size", "2", "--concurrency", "1"]
    assert cli.main([*words, "--speculative_config", config, "--acceptance_length", "3"]) == 0
    page = capsys.readouterr().out
    assert "drafts pay from" in page
    assert '"model": "meta-llama/Meta-Llama-3-8B"' in page, "a server takes no short name"


def test_lengths_that_no_row_has_are_refused():
    for length in (0.9, 4.1, float("nan")):
        with pytest.raises(OptionError, match="is not from 1 to 4"):
            Speculation(3, None, length)
