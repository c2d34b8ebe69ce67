# SPDX-License-Identifier: Apache-2.0
"""The steps of a check are of every kind, legal under any limits, and always the same."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from phalanx.worker.self_check.steps import CheckStep, check_steps

LIMITS: dict[str, Any] = {
    "vocab_size": 384, "max_num_tokens": 8192, "max_seq_len": 4096, "max_rows": 256, "block_size": 16, "blocks": 10_000,
}  # fmt: skip
SMALL = [
    {}, {"max_rows": 1}, {"max_rows": 2, "max_seq_len": 8}, {"blocks": 1}, {"blocks": 3, "block_size": 4}, {"max_num_tokens": 1},
    {"max_num_tokens": 3, "max_rows": 5}, {"max_seq_len": 2}, {"vocab_size": 1, "blocks": 40, "block_size": 1},
    {"groups": 3}, {"groups": 3, "blocks": 20},
]  # fmt: skip


def require_legal(steps: list[CheckStep], limits: dict[str, Any]) -> None:
    """Rows follow each other, tokens have blocks of their own, and no limit is passed."""
    done: dict[int, int] = {}
    room: dict[int, int] = {}
    used: list[int] = []
    for step in steps:
        for assignment in step.batch.admitted:
            assert assignment.slot not in done
            done[assignment.slot] = room[assignment.slot] = 0
        rows = step.batch.rows
        assert sum(row.count for row in rows) <= limits["max_num_tokens"]
        assert len(rows) <= limits["max_rows"]
        assert [row.decodes for row in rows] == sorted((row.decodes for row in rows), reverse=True)
        for row in rows:
            assert row.start == done[row.slot]
            assert len(row.tokens) == row.count >= 1
            assert all(0 <= token < limits["vocab_size"] for token in row.tokens)
            used += row.blocks
            room[row.slot] += len(row.blocks) // limits.get("groups", 1) * limits["block_size"]
            done[row.slot] += row.count
            assert done[row.slot] <= min(room[row.slot], limits["max_seq_len"])
    assert len(used) == len(set(used))
    assert all(0 <= block < limits["blocks"] for block in used)
    assert steps[-1].batch.released == list(range(limits["max_rows"]))


@pytest.mark.parametrize("limits", SMALL, ids=str)
def test_steps_are_legal_under_any_limits(limits: dict[str, Any]) -> None:
    require_legal(check_steps(**{**LIMITS, **limits}), {**LIMITS, **limits})


def test_there_is_every_kind_of_step() -> None:
    steps = check_steps(**LIMITS)
    assert steps == check_steps(**LIMITS)
    kinds: dict[str, int] = defaultdict(int)
    for step in steps[:-1]:
        kinds[step.kind] += 1
    assert kinds == {
        "a prompt of 192 tokens": 1, "a prompt of 192 tokens in chunks": 5, "38 short prompts": 1, "decode of 1 row": 2,
        "decode of 40 rows": 2, "a prompt beside decode rows": 1,
    }  # fmt: skip
