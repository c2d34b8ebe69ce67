# SPDX-License-Identifier: Apache-2.0
"""What drafts gain: by tokens that are stated, over steps and passes that are priced."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.planner.rows import RESULTS
from phalanx import cli
from phalanx.config.model import ModelShape
from phalanx.engine.limits import SchedulerOptions
from phalanx.errors import OptionError
from phalanx.layout import Layout, draft
from phalanx.layout.draft import DraftLm
from phalanx.layout.eagle3 import Eagle3
from phalanx.layout.families import known
from phalanx.layout.mtp import Mtp
from phalanx.planner import simulate, subject
from phalanx.planner.arrivals import Arrival
from phalanx.planner.cost import Costs, Work
from phalanx.planner.speculation import DraftCosts, Speculation, gain


@pytest.fixture(scope="module")
def costs():
    """70B in FP8 on two H200: a step of one row takes 10.2 ms, one of four 10.8 (measured)."""
    return Costs(subject.shape_for("llama-3-70b"), "fp8", "fp8", Layout(tp=2), subject.machine_for("H200", gpus_per_node=2)[0])


@pytest.fixture(scope="module")
def head(costs):
    return Eagle3(replace(costs.shape, num_layers=1), 32000, 8192, (2, 40, 77))


def simulated(costs, requests, speculation=None, tokens=256):
    """Of equal requests at once: ms per token, and the result."""
    options = SchedulerOptions(
        num_blocks=20000, block_size=16, max_batch_size=256, max_num_tokens=8192, max_seq_len=4096, prefix_caching=False,
        max_drafts=0 if speculation is None else speculation.drafts, drafts_keep_kv=True,
    )  # fmt: skip
    result = simulate.run(costs, options, [Arrival(0.0, 128, tokens)] * requests, speculation=speculation)
    return 1e3 * sum(each.tpot for each in result.served) / requests, result


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


def test_what_proposes_takes_time(costs, head):
    """Three passes of a head of 1.2 G parameters and four of a model of 1 G: see the bytes over the memory's bandwidth."""
    traits = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    small = ModelShape.from_config({**known("llama-3.1-8b"), **traits})
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


def test_predicted_beside_measured(costs, head):
    """70B in FP8 on two H200 with an EAGLE-3 head: each row of the file, at the acceptance that it had. Seven drafts in each step
    of one request; the depth that the engine chooses for eight."""
    rows = json.loads((RESULTS / "engine_speculation_70b_tp2.json").read_text(encoding="utf-8"))["eagle3"]
    for count, row in rows["none"].items():
        assert simulated(costs, int(count))[0] == pytest.approx(row["ms_per_token"], rel=0.05), f"{count} requests, no drafts"
    for length in ("3.3", "3.9", "4.8"):
        row = rows[length]["1"]
        tokens = 1 + row["accepted"] / row["steps"]
        always = Speculation(7, head, tokens, table=((1, 4096, 7),))
        step = gain(costs, always, 1, 256.0, 256)
        assert step.verify_ms + step.draft_ms == pytest.approx(row["ms_per_step"], rel=0.05), f"a step at {length} tokens"
        assert simulated(costs, 1, always)[0] == pytest.approx(row["ms_per_token"], rel=0.08), f"{length} tokens a step"
    chosen, result = simulated(costs, 8, Speculation.of_rates([0.7] * 7, head))
    assert chosen == pytest.approx(rows["rate 0.7"]["8"]["ms_per_token"], rel=0.08)
    assert result.accepted == pytest.approx(rows["rate 0.7"]["8"]["accepted"], rel=0.05)


def test_a_simulation_chooses_fewer_drafts_for_more_rows_and_none_where_they_do_not_pay(costs, head):
    good, bad = (Speculation.of_rates([rate] * 7, head) for rate in (0.7, 0.1))
    each = []
    for requests in (1, 64, 256):
        _, result = simulated(costs, requests, good, 64)
        assert result.generated == 64 * requests
        each.append(result.drafts / requests)
    assert each[0] > 1.5 * each[1] > 10 * each[2] > 0  # with 256 rows now and then, to see whether that has changed
    plain, _ = simulated(costs, 64)
    slowed, result = simulated(costs, 64, bad)
    assert result.drafts < 0.15 * result.generated
    assert plain < slowed < 1.06 * plain  # the head takes in all tokens
    lookup, _ = simulated(costs, 64, Speculation.of_rates([0.1] * 7, None))
    assert lookup == pytest.approx(plain, rel=0.02)


def test_rates_are_those_of_a_length_or_stated():
    assert Speculation(3, None, 1 + 0.5 + 0.25 + 0.125).rates == pytest.approx([0.5] * 3)
    stated = Speculation.of_rates([0.8, 0.5], None)
    assert stated.tokens == pytest.approx(1 + 0.8 + 0.4)
    assert stated.rates == (0.8, 0.5)


def test_a_module_of_the_target_is_a_part_of_it():
    shape = subject.shape_for("deepseek-v3")
    costs = Costs(shape, "fp8", "bf16", Layout(tp=8), subject.machine_for("H200", gpus_per_node=8)[0])
    part = DraftCosts(costs, Mtp.of(shape)).extend(Work(8, 8, 8 * 256.0)) / sum(costs.step_seconds(Work(8, 8, 8 * 256.0)))
    assert 0.01 < part < 0.03  # one layer of 61


def test_a_trace_is_simulated_with_drafts(capsys, tmp_path):
    config = {"method": "ngram", "num_speculative_tokens": 3}
    words = ["plan", "simulate", "burst", "--model", "llama-3-8b", "--gpu", "H100", "--gpus_per_node", "1", "--requests", "4"]
    words += ["--isl", "64", "--osl", "64"]
    figures = {}
    for name, more in (
        ("none", []),
        ("stated", ["--speculative_config", json.dumps(config), "--acceptance_length", "2.5"]),
        ("synthetic", ["--speculative_config", json.dumps(config | {
            "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0, 0.0, 0.0]})]),
    ):  # fmt: skip
        assert cli.main([*words, *more, "--json", str(tmp_path / name)]) == 0
        output = capsys.readouterr().out
        figures[name] = json.loads((tmp_path / name).read_text())
        accepted, drafts = figures[name]["accepted_tokens"], figures[name]["draft_tokens"]
        assert (f"speculation: {accepted} of {drafts} drafts accepted" in output) == (name != "none")
    assert figures["stated"]["tpot_ms"]["mean"] < 0.6 * figures["none"]["tpot_ms"]["mean"]
    assert figures["synthetic"]["accepted_tokens"] == 0 < figures["synthetic"]["draft_tokens"]
    synthetic = json.dumps(config | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0})
    for wrong, text in (
        (["--speculative_config", json.dumps(config)], "must know how many drafts are accepted"),
        (["--speculative_config", synthetic, "--acceptance_length", "2"], "acceptance_length is stated twice"),
    ):
        assert cli.main([*words, *wrong]) == 2
        assert text in capsys.readouterr().err
