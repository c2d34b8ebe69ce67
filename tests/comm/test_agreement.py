# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest

from phalanx.comm.agreement import agree, difference
from phalanx.errors import EngineError


class Board:
    """A store of one process: `get` waits for the key."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=30)
            return self._values[key].encode()


def test_equal_facts_are_no_error() -> None:
    assert difference([{"a": "1"}, {"a": "1"}]) is None


def test_a_difference_names_the_ranks_and_the_fact() -> None:
    verdict = difference([{"model": "x", "torch version": "2.13"}] * 3 + [{"model": "x", "torch version": "2.12"}])
    assert isinstance(verdict, EngineError)
    assert "torch version" in str(verdict)
    assert "ranks 0, 1, 2: 2.13, rank 3: 2.12" in str(verdict)


def test_a_fact_that_one_rank_lacks_is_a_difference() -> None:
    assert "rank 1: nothing" in str(difference([{"table": "ab12"}, {}]))


def test_every_rank_comes_to_the_same_verdict() -> None:
    board, verdicts = Board(), []

    def rank(number: int) -> None:
        with pytest.raises(EngineError) as caught:
            agree(board, number, 3, {"options": "same", "model": "other" if number == 1 else "one"})
        verdicts.append(str(caught.value))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(verdicts) == 3
    assert len(set(verdicts)) == 1
    assert "ranks 0, 2: one, rank 1: other" in verdicts[0]
