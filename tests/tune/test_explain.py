# SPDX-License-Identifier: Apache-2.0
"""explain says of every size what runs and why, as the table does."""

from __future__ import annotations

import re
from itertools import pairwise

from phalanx.comm.choose import SP_MIN_TOKENS
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.seed import default
from phalanx.tables.table import Table
from phalanx.tune.codegen import decide_benchmarks
from phalanx.tune.explain import lines
from tests.support.tune_benchmarks import NVLINK2, bench


def test_ranges_cover_every_size():
    (one,) = decide_benchmarks([bench(NVLINK2)])
    text = list(lines(one.table, "bf16", 8192, (Fusion.RESIDUAL_RMS_NORM,)))
    assert text[0].startswith("sm90.nvlink.tp2: ")
    assert any("regret of the seed" in line for line in text)
    ranges = [re.match(r" +(\d+) (?:to (\d+)|or more) +tokens: (\w+), (fused|then a kernel)", line) for line in text]
    ranges = [match for match in ranges if match]
    assert ranges[0][1] == "1"
    for before, after in pairwise(ranges):
        assert int(after[1]) == int(before[2]) + 1
    for match in ranges:
        entry = one.table.lookup("bf16", Fusion.RESIDUAL_RMS_NORM, int(match[1]), 8192)
        assert (match[3], match[4] == "fused") == (entry.strategy.name, entry.fused)
    assert "x the speed of NCCL" in text[-len(ranges)]
    assert "not measured at this size: the seed" in text[-1]


def test_it_says_from_how_many_tokens_on_layers_run_sequence_parallel():
    here = Fingerprint(90, "nvlink", 2)
    table = Table(here, (), default(here))
    sharded = [line for line in lines(table, "bf16", 8192, (Fusion.RESIDUAL_RMS_NORM,)) if "RS_NORM_AG" in line]
    assert len(sharded) == 1
    assert f"from {SP_MIN_TOKENS[2]} tokens on" in sharded[0]
    assert "from 2048 tokens on GEMM_RS" in sharded[0]
    cpu = Fingerprint(0, "shm", 2)
    assert not any("RS_NORM_AG" in line for line in lines(Table(cpu, (), default(cpu)), "bf16", 8192, (Fusion.RESIDUAL_RMS_NORM,)))


def test_what_cannot_run_is_said():
    here = Fingerprint(90, "nvlink", 2)
    text = list(lines(Table(here, (), default(here)), "bf16", 1004, (Fusion.NONE,)))
    assert "no table: the seed decides everywhere" in text[1]
    assert "NCCL" in text[3]
    assert "cannot run this: ONESHOT moves 8 elements at a time" in text[3]
