# SPDX-License-Identifier: Apache-2.0
"""explain says of every size what runs in a layer and why, as the table does."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from phalanx.comm.choose import Decision, Rules, decider
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import default
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import SEQUENCE_PARALLEL
from phalanx.tables.table import Table
from phalanx.tune.codegen import decide_benchmarks
from phalanx.tune.explain import lines
from tests.support.tune_benchmarks import LAYERS, NVLINK2, bench

NORM = Fusion.RESIDUAL_RMS_NORM
PLACES = {Caller.GEMM: "behind a linear layer", Caller.SHARDED: "behind a mixture", Caller.REPLICATED: "needs the whole residual"}
LINE = re.compile(r" +(\d+) (?:to (\d+)|or more) +tokens: (\w+)(?:, (fused|then a kernel))? +(\w+): (.+)")


def blocks(table: Table, hidden: int, fusion: Fusion = NORM) -> dict[Caller, list[re.Match[str]]]:
    """The lines of each caller."""
    ranges: dict[Caller, list[re.Match[str]]] = {caller: [] for caller in Caller}
    here = Caller.REPLICATED
    for line in lines(table, "bf16", hidden, (fusion,)):
        here = next((caller for caller, place in PLACES.items() if place in line), here)
        match = LINE.fullmatch(line)
        if match:
            ranges[here].append(match)
    return ranges


@pytest.fixture(scope="module")
def tuned_table() -> Table:
    (one,) = decide_benchmarks([bench(NVLINK2, strategies=LAYERS, hidden="4096,8192", fusions="RESIDUAL_RMS_NORM")])
    return one.table


@pytest.mark.parametrize("hidden", [5120, 8192])
def test_ranges_cover_every_size(tuned_table: Table, hidden: int):
    decide = decider(Rules(NVLINK2, {}, tuned_table.lookup))
    for caller, ranges in blocks(tuned_table, hidden).items():
        check_ranges(ranges, lambda tokens, caller=caller: decide(tokens, hidden, "bf16", NORM, caller))  # type: ignore[misc]


def check_ranges(ranges: list[re.Match[str]], decide: Callable[[int], Decision]) -> None:
    assert ranges[0][1] == "1"
    for before, after in pairwise(ranges):
        assert int(after[1]) == int(before[2]) + 1
    assert ranges[-1][2] is None
    for match in ranges:
        first, last = int(match[1]), int(match[2] or 40_000)
        for tokens in {*range(first, last, max((last - first) // 50, 1)), last}:
            decision = decide(tokens)
            assert (match[3], match[5]) == (decision.strategy.name, decision.source)
            assert decision.strategy in SEQUENCE_PARALLEL or (match[4] == "fused") == decision.fused


def test_no_seed_where_it_was_measured(tuned_table: Table):
    """The benchmark covers 1 to 16384 tokens; layers run by its times, and no longer by a threshold of another machine."""
    ranges = blocks(tuned_table, 8192)
    for caller in Caller:
        assert {match[5] for match in ranges[caller] if int(match[1]) <= 16384} == {"table"}
        assert ranges[caller][-1][5] == "seed"
    names = {caller: {match[3] for match in ranges[caller]} for caller in Caller}
    assert "GEMM_RS" in names[Caller.GEMM] - names[Caller.SHARDED]
    assert "RS_NORM_AG" in names[Caller.SHARDED] - names[Caller.REPLICATED]
    text = list(lines(tuned_table, "bf16", 8192, (NORM,)))
    assert text[0].startswith("sm90.nvlink.tp2: ")
    assert any("regret of the seed" in line for line in text)
    assert any("regret of the table in layers" in line for line in text)
    assert any("x the speed of a GEMM and then an all-reduce" in line for line in text)


@pytest.mark.parametrize("machine", ["sm90.nvlink.tp8", "sm89.pcie_p2p.tp2"])
def test_what_was_not_measured_on_this_class_is_estimated(machine: str, tmp_path):
    """The thresholds of H200 run on every machine whose GPUs reach each other until it is tuned, and the label says so."""
    here = Fingerprint.parse(machine)
    ranges = blocks(table_for(here, tmp_path), 8192)
    first, long = (128, 2048) if here.world == 2 else (64, 4096)
    sharded = [match for match in ranges[Caller.GEMM] if match[3] in ("RS_NORM_AG", "GEMM_RS")]
    assert [(match[3], int(match[1])) for match in sharded] == [("RS_NORM_AG", first), ("GEMM_RS", long)]
    for matches in (sharded, ranges[Caller.REPLICATED]):
        assert {match[5] for match in matches} == {"estimated"}


@pytest.mark.parametrize("machine", ["sm90.nvlink.tp2", "sm90.nvlink.tp4"])
def test_a_sharded_residual_is_explained(machine: str) -> None:
    here = Fingerprint.parse(machine)
    text = list(lines(table_for(here), "bf16", 4096, (NORM,)))
    assert "left sharded stays so" in text[-2]
    assert "gather it first" in text[-1]
    assert not any("stays so" in line for line in lines(table_for(here), "bf16", 4096, (Fusion.NONE,)))


def test_cpu_ranks_have_no_sequence_parallelism_until_they_are_tuned():
    cpu = Fingerprint(0, "shm", 2)
    assert not any("RS_NORM_AG" in line or "GEMM_RS" in line for line in lines(Table(cpu, (), default(cpu)), "bf16", 8192, (NORM,)))


def test_what_cannot_run_is_said():
    here = Fingerprint(90, "nvlink", 2)
    text = list(lines(Table(here, (), default(here)), "bf16", 1004, (Fusion.NONE,)))
    assert "no table: the seed decides everywhere" in text[1]
    assert "NCCL" in text[3]
    assert "cannot run this: ONESHOT moves 8 elements at a time" in text[3]
