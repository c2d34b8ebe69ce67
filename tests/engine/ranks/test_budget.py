# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.engine.ranks import budget
from phalanx.errors import CapacityError
from phalanx.plan.memory import KvSpec
from tests.engine.drive import options

SPECS = [KvSpec(2, 16, 4)] * 3  # 768 bytes per token, 3072 per block of 4


def test_bytes_hold_so_many_blocks() -> None:
    assert budget.cpu_blocks(options(Path("x"), kv_cache_bytes=10 * 3072 + 5), SPECS, 128) == 10


def test_no_more_than_full_requests_can_use() -> None:
    assert budget.cpu_blocks(options(Path("x"), kv_cache_bytes=None), SPECS, 128) == 4 * 32
    assert budget.cpu_blocks(options(Path("x"), kv_cache_bytes=1 << 30), SPECS, 128) == 4 * 32


def test_a_budget_that_holds_no_block_says_what_would_fit() -> None:
    with pytest.raises(CapacityError, match=r"kv_cache_bytes=3,071.*at least 3,072"):
        budget.cpu_blocks(options(Path("x"), kv_cache_bytes=3071), SPECS, 128)
