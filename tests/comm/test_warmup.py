# SPDX-License-Identifier: Apache-2.0
"""Which further steps a start runs so that no all-reduce needs a kernel later."""

from __future__ import annotations

import itertools

import pytest
import torch

from phalanx.comm.choose import Rules
from phalanx.comm.group import Solo
from phalanx.comm.tuned_group import TunedGroup
from phalanx.comm.twoshot import row_launch
from phalanx.comm.warmup import more_token_counts
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Entry

NUM_SMS, MOST = 132, 8192
POWERS = [1 << power for power in range(14)]


class Ranks(Solo):
    def __init__(self, size: int) -> None:
        self.size = size


def group_of(size: int, rules: Rules) -> TunedGroup:
    return TunedGroup(Ranks(size), rules, {}, "")


def counts_of(group: TunedGroup, hidden: int, known: list[int] = POWERS) -> list[int]:
    return more_token_counts(group, known, max_tokens=MOST, hidden=hidden, dtype=torch.bfloat16, num_sms=NUM_SMS)


@pytest.mark.parametrize(("world", "hidden"), list(itertools.product((2, 4, 8), (2048, 4096, 8192))))
def test_shipped_tables_need_few_more(world: int, hidden: int) -> None:
    """And with them, no count launches a two-shot with a norm that none of them launches."""
    machine = Fingerprint(90, "nvlink", world)
    group = group_of(world, Rules(machine, {}, table_for(machine).lookup))
    counts = counts_of(group, hidden)
    assert len(counts) < 12
    assert not set(counts) & set(POWERS)

    def launched(tokens: int) -> set[object]:
        chosen = {
            (fusion, caller): group.decide(tokens, hidden, "bf16", fusion, caller)
            for fusion in Fusion if fusion is not Fusion.NONE for caller in Caller if fusion.shards
        }  # fmt: skip
        launch = row_launch(tokens, hidden // 8, world, NUM_SMS)
        shape = launch.warps, launch.block, launch.flat, launch.registers
        return {(key, shape) for key, decision in chosen.items() if decision.strategy is Strategy.TWOSHOT and decision.fused}

    covered = {each for tokens in (*POWERS, *counts) for each in launched(tokens)}
    assert all(launched(tokens) <= covered for tokens in range(1, MOST + 1, 3))  # of any remainder by a power of two


def test_a_range_between_two_powers_is_found() -> None:
    def lookup(dtype: str, fusion: Fusion, tokens: int, hidden: int, caller: Caller) -> Entry:
        return Entry(Strategy.TWOSHOT if 140 <= tokens <= 180 else Strategy.ONESHOT, True, "table", "of this test")

    counts = counts_of(group_of(2, Rules(Fingerprint(90, "nvlink", 2), {}, lookup)), 4096)
    assert [tokens for tokens in counts if 140 <= tokens <= 180] == [140]
    assert counts_of(group_of(2, Rules(Fingerprint(90, "nvlink", 2), {}, lookup)), 4096, sorted({*POWERS, *counts})) == []


def test_a_rank_alone_needs_none() -> None:
    assert more_token_counts(Solo(), [], max_tokens=MOST, hidden=4096, dtype=torch.bfloat16, num_sms=NUM_SMS) == []
