# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from phalanx.executor.protocol import StoreOperation, StoreReply, StoreRequest
from phalanx.executor.rank_store import RankStore


def request(rank: int, number: int, operation: StoreOperation, keys: list[str], *values: bytes) -> StoreRequest:
    return StoreRequest(rank, number, operation, keys, list(values))


def test_who_waits_for_keys_is_answered_when_the_last_of_them_is_set() -> None:
    store = RankStore()
    assert store.receive(request(1, 7, "get", ["a", "b"])) == []
    assert store.receive(request(2, 9, "wait", ["b"])) == []
    assert store.receive(request(0, 1, "set", ["a"], b"first")) == [(0, StoreReply(1, []))]
    replies = store.receive(request(0, 2, "set", ["b"], b"second"))
    assert replies == [(0, StoreReply(2, [])), (2, StoreReply(9, [])), (1, StoreReply(7, [b"first", b"second"]))]
    assert store.receive(request(0, 3, "set", ["b"], b"third")) == [(0, StoreReply(3, []))], "nobody is answered twice"


@pytest.mark.parametrize("operation", ["add", "append", "compare_set"])
def test_every_operation_that_sets_a_key_answers_those_who_wait(operation: StoreOperation) -> None:
    store = RankStore()
    store.receive(request(1, 1, "wait", ["k"]))
    values = [b"", b"5"] if operation == "compare_set" else [b"5"]
    assert store.receive(request(0, 1, operation, ["k"], *values))[1:] == [(1, StoreReply(1, []))]
    assert store.receive(request(0, 2, "get", ["k"])) == [(0, StoreReply(2, [b"5"]))]


@pytest.mark.parametrize(
    "wrong",
    [
        request(0, 1, "add", ["a", "b"], b"1"), request(0, 1, "set", ["a", "b"], b"1"), request(0, 1, "set", ["a"], b"1", b"2"),
        request(0, 1, "add", ["a"], b"many"), request(0, 1, "append", ["a"]), request(0, 1, "compare_set", ["a"], b"1"),
    ],
)  # fmt: skip
def test_what_no_rank_requests_is_an_error_and_changes_nothing(wrong: StoreRequest) -> None:
    store = RankStore()
    with pytest.raises(ValueError, match=r"does not take|invalid literal"):
        store.receive(wrong)
    assert store.receive(request(0, 2, "count", [])) == [(0, StoreReply(2, [b"0"]))]
