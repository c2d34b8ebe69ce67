# SPDX-License-Identifier: Apache-2.0
"""Latency of a real engine: every figure follows from its samples."""

from __future__ import annotations

import pytest

from phalanx.bench import latency, offline, report, workloads
from phalanx.bench.roofline import Bandwidth


def test_per_token():
    assert latency.seconds_per_token([1.5, 1.38], [0.2, 0.1], 129) == pytest.approx(0.01)


def test_a_real_engine(running):
    target, llm = running
    bandwidth = Bandwidth(10e9, {"copy": 10e9})
    row = latency.measure(target, llm, workloads.parse("decode-2x8x24"), bandwidth)
    samples = row["samples_s"]
    assert (len(samples["first_token"]), len(samples["all_tokens"])) == (6, 2)
    assert row["tpot_ms"] == pytest.approx(1e3 * (min(samples["all_tokens"]) - min(samples["first_token"])) / 24)
    assert row["output_tok_s"] == pytest.approx(2 / row["tpot_ms"] * 1e3)
    assert row["fraction_of_roof"] == pytest.approx(row["roof_ms"] / row["tpot_ms"])
    assert 0 < row["fraction_of_roof"] < 1
    document = offline.document(target, llm.facts, bandwidth, 3.0, [row])
    assert document["engine"]["kv_tokens"] == llm.facts.num_blocks * 16
    report.show(latency.table(document))


def test_without_a_bandwidth_there_is_no_roof(running, capsys):
    target, llm = running
    bandwidth = Bandwidth(None, why="no such GPU")
    row = latency.measure(target, llm, workloads.parse("decode-1x8x8"), bandwidth)
    assert row["roof_ms"] is row["fraction_of_roof"] is None
    report.show(latency.table(offline.document(target, llm.facts, bandwidth, 3.0, [row])))
    assert "bandwidth not measured (no such GPU)" in capsys.readouterr().out
