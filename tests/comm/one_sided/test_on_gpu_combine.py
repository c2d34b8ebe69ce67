# SPDX-License-Identifier: Apache-2.0
"""Why dispatches need two halves and combines one region: a model of the protocol, run in many orders."""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_order import step_ranks

Key = tuple[object, ...]
Memory = list[dict[Key, object]]  # [rank]


class Overwritten(AssertionError):
    """A push met a word that its reader had not cleared."""


def push(memory: Memory, to: int, key: Key, value: object) -> None:
    if key in memory[to]:
        raise Overwritten(f"rank {to}, {key}")
    memory[to][key] = value


def take(memory: Memory, rank: int, key: Key, value: object) -> Generator[None, None, None]:
    while key not in memory[rank]:
        yield
    assert memory[rank].pop(key) == value
    yield


def exchange(
    call: int, rank: int, world: int, halves: int, memory: Memory, maker: random.Random, seed: int
) -> Generator[None, None, None]:
    """One rank's part in a dispatch and the combine behind it, of one token of each rank, one access at a time; its programs in any
    order. Which ranks a token reaches is known to its own rank, and by its header to the others."""
    routing = random.Random(seed * 997 + call)
    reached = [[routing.random() < 0.4 for _ in range(world)] for _ in range(world)]
    peers = [peer for peer in range(world) if peer != rank]
    half = call % halves
    for peer in maker.sample(peers, len(peers)):
        push(memory, peer, ("header", half, rank), call)
        yield
        if reached[rank][peer]:
            push(memory, peer, ("payload", half, rank), call)
            yield
    for peer in maker.sample(peers, len(peers)):
        yield from take(memory, rank, ("header", half, peer), call)
        if reached[peer][rank]:
            yield from take(memory, rank, ("payload", half, peer), call)
    for peer in maker.sample(peers, len(peers)):
        if reached[peer][rank]:
            push(memory, peer, ("sum", rank), call)
            yield
    for peer in maker.sample(peers, len(peers)):
        if reached[rank][peer]:
            yield from take(memory, rank, ("sum", peer), call)


def run(calls: int, world: int, halves: int, seed: int) -> None:
    memory: Memory = [{} for _ in range(world)]

    def all_calls(rank: int, rng: random.Random) -> Generator[None, None, None]:
        for call in range(calls):
            yield from exchange(call, rank, world, halves, memory, rng, seed)

    step_ranks(world, seed, all_calls)
    assert not any(memory), "words were left behind"


@given(st.integers(1, 8), st.integers(2, 4), st.integers(0, 10_000))
def test_two_halves_and_one_region_never_lose_a_word(calls: int, world: int, seed: int) -> None:
    run(calls, world, 2, seed)


def test_one_half_would() -> None:
    def many() -> None:
        for seed in range(200):
            run(5, 2, 1, seed)

    with pytest.raises(Overwritten):
        many()
