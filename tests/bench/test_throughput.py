# SPDX-License-Identifier: Apache-2.0
"""Throughput of a real engine, with what its scheduler did."""

from __future__ import annotations

import pytest

from phalanx.bench import offline, report, throughput, workloads
from phalanx.bench.roofline import Bandwidth


def test_a_real_engine(running, capsys):
    target, llm = running
    bandwidth = Bandwidth(10e9, {"copy": 10e9})
    row = throughput.measure(target, llm, workloads.parse("batch-24x16x12"), bandwidth)
    assert row["output_tok_s"] == pytest.approx(24 * 12 / row["seconds"])
    assert row["total_tok_s"] == pytest.approx(24 * 28 / row["seconds"])
    assert row["requests_s"] == pytest.approx(24 / row["seconds"])
    assert 12 <= row["steps"] < 60
    assert row["preemptions"] == 0
    assert 0 < row["fraction_of_roof"] == pytest.approx(row["output_tok_s"] / row["roof_tok_s"])
    report.show(throughput.table(offline.document(target, llm.facts, bandwidth, 3.0, [row])))
    assert "batch-24x16x12" in capsys.readouterr().out
