# SPDX-License-Identifier: Apache-2.0
"""Why two halves are enough: a model of the protocol, run in every order that hypothesis thinks of."""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_order import step_ranks

Memory = list[list[dict[tuple[int, int], object]]]  # [rank][half][(place, source)]


class Overwritten(AssertionError):
    """A push met a word that its reader had not cleared."""


def push(memory: Memory, to: int, half: int, key: tuple[int, int], value: object) -> None:
    if key in memory[to][half]:
        raise Overwritten(f"rank {to}, half {half}, {key}")
    memory[to][half][key] = value


def oneshot(call: int, rank: int, world: int, half: int, memory: Memory, maker: random.Random) -> Generator[None, None, None]:
    """One rank's part in one call, one memory access at a time; its programs in any order. Sizes differ between calls."""
    places = range(1 + call % 3)
    for place in maker.sample(places, len(places)):
        for peer in maker.sample([r for r in range(world) if r != rank], world - 1):
            push(memory, peer, half, (place, rank), (call, rank))
            yield
    for place in maker.sample(places, len(places)):
        for source in (r for r in range(world) if r != rank):
            yield from take(memory, rank, half, (place, source), (call, source))


def twoshot(call: int, rank: int, world: int, half: int, memory: Memory, maker: random.Random) -> Generator[None, None, None]:
    """Shares of one place each; where the message is short, the last ranks own nothing."""
    owners = 1 + call % world
    for owner in maker.sample(range(owners), owners):
        if owner != rank:
            push(memory, owner, half, (0, rank), (call, rank))
            yield
    if rank < owners:
        for source in (r for r in range(world) if r != rank):
            yield from take(memory, rank, half, (0, source), (call, source))
        for peer in maker.sample([r for r in range(world) if r != rank], world - 1):
            push(memory, peer, half, (1, rank), (call, "sum"))
            yield
    for owner in (r for r in range(owners) if r != rank):
        yield from take(memory, rank, half, (1, owner), (call, "sum"))


def take(memory: Memory, rank: int, half: int, key: tuple[int, int], value: object) -> Generator[None, None, None]:
    while key not in memory[rank][half]:
        yield
    assert memory[rank][half].pop(key) == value
    yield


def run(kinds: list, world: int, halves: int, seed: int) -> None:
    memory: Memory = [[{} for _ in range(halves)] for _ in range(world)]

    def calls(rank: int, rng: random.Random) -> Generator[None, None, None]:
        for call, kind in enumerate(kinds):
            yield from kind(call, rank, world, call % halves, memory, rng)

    step_ranks(world, seed, calls)
    assert not any(words for halves_of in memory for words in halves_of), "words were left behind"


@given(st.integers(2, 4), st.integers(0, 10_000), st.lists(st.sampled_from([oneshot, twoshot]), min_size=1, max_size=8))
def test_two_halves_never_lose_a_word(world: int, seed: int, kinds: list) -> None:
    run(kinds, world, 2, seed)


def test_one_half_would() -> None:
    def many() -> None:
        for seed in range(200):
            run([oneshot] * 5, 2, 1, seed)

    with pytest.raises(Overwritten):
        many()
