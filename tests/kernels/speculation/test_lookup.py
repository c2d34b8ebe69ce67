# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: against a search in Python, and the kernels in Triton's interpreter against plain torch, and compiled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from phalanx.kernels.speculation import lookup
from phalanx.kernels.speculation.drafts import NO_DRAFT
from tests.support.kernels_compiled import compiled_as
from tests.support.kernels_interpreted import interpret

pytestmark = pytest.mark.usefixtures("forked_python")


TEXT = 30
"""Columns before the tokens of a slot."""


def searched(tokens: Sequence[int], predicted: Sequence[int], least: int, most: int, count: int) -> list[int]:
    """Drafts, by the definition: the longest match first; of equally long ones the prediction's, then the last."""
    for length in range(min(most, len(tokens)), least - 1, -1):
        suffix = list(tokens[len(tokens) - length :])
        for end in range(len(predicted) - 1, length - 2, -1):
            if list(predicted[end - length + 1 : end + 1]) == suffix:
                return [*predicted[end + 1 : end + 1 + count], *[NO_DRAFT] * count][:count]
        for end in range(len(tokens) - 2, length - 2, -1):
            if list(tokens[end - length + 1 : end + 1]) == suffix:
                drafts = list(tokens)
                for _ in range(count):
                    drafts.append(drafts[end + 1 + len(drafts) - len(tokens)])
                return drafts[len(tokens) :]
    return [NO_DRAFT] * count


def histories(chance: random.Random, rows: int, width: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """History, slots, lengths, and where predictions begin; every third slot has none. What lies behind a row's tokens, and before
    its prediction, is of another request."""
    columns = TEXT + width
    history = torch.tensor([[chance.randrange(vocabulary) for _ in range(columns)] for _ in range(rows + 2)], dtype=torch.int32)
    slots = torch.tensor(chance.sample(range(rows + 2), rows))
    begins = torch.tensor([chance.randrange(TEXT) if slot % 3 else TEXT for slot in range(rows + 2)])
    return history, slots, torch.tensor([chance.randrange(width) for _ in range(rows)]), begins


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 5), (5, 5)])
def test_drafts_are_what_followed_the_last_tokens(least: int, most: int) -> None:
    chance, matches = random.Random(least * 10 + most), 0
    for vocabulary in (2, 4, 20):
        history, slots, lengths, begins = histories(chance, 40, 50, vocabulary)
        drafts = lookup.look_up(history, slots, lengths, begins, TEXT, least=least, most=most, count=6)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            tokens, predicted = history[slot, TEXT : TEXT + length + 1].tolist(), history[slot, begins[slot] : TEXT].tolist()
            wanted = searched(tokens, predicted, least, most, 6)
            assert drafts[row].tolist() == wanted
            matches += wanted[0] >= 0
    assert 10 < matches < 120


def test_a_text_that_repeats_goes_on() -> None:
    history = torch.tensor([[7, 1, 2, 3, 1, 2, 3, 0, 0, 0]], dtype=torch.int32)
    slots, lengths, begins = torch.tensor([[0], [6], [0]])
    drafts = lookup.look_up(history, slots, lengths, begins, 0, least=2, most=4, count=7)
    assert drafts.tolist() == [[1, 2, 3, 1, 2, 3, 1]]


def test_tokens_are_appended_behind_those_of_their_slots() -> None:
    history = torch.zeros(3, 6, dtype=torch.int32)
    sampled = torch.tensor([[4, 5, -1, 2], [6, -1, -1, 0], [7, 8, 9, 2]])
    lookup.append_tokens(history, torch.tensor([2, 0, 1]), torch.tensor([2, 0, 7]), sampled)
    assert history.tolist() == [[6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 7], [0, 4, 5, 0, 0, 0]]


def check_kernels() -> None:
    from phalanx.kernels.speculation import lookup_kernels

    lookup.has_triton = lambda: False
    chance = random.Random(0)
    for rows, width, vocabulary, block, programs in ((1, 700, 3, 64, 512), (5, 130, 2, 64, 8), (9, 40, 30, 1024, 512)):
        lookup_kernels.BLOCK, lookup_kernels.PROGRAMS = block, programs
        history, slots, lengths, begins = histories(chance, rows, width, vocabulary)
        for least, most in ((1, 3), (3, 5)):
            for count in (1, 7):
                drafts = lookup_kernels.look_up(history, slots, lengths, begins, TEXT, least, most, count)
                wanted = lookup.look_up(history, slots, lengths, begins, TEXT, least=least, most=most, count=count)
                assert torch.equal(drafts, wanted)
        sampled = torch.randint(0, 9, (rows, 6))
        sampled[:, 3:5] = -1
        other = history.clone()
        lookup_kernels.append_tokens(history[:, TEXT:], slots, lengths, sampled)
        lookup.append_tokens(other[:, TEXT:], slots, lengths, sampled)
        assert torch.equal(history, other)


def test_kernels_in_the_interpreter() -> None:
    interpret([check_kernels])


@pytest.mark.gpu1
def test_kernels_on_gpu() -> None:
    with torch.device("cuda"):
        check_kernels()


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", ["append_tokens", "search", "copy_drafts"])
def test_kernels_compile(name: str, arch: int) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.speculation import lookup_kernels

    kernel = getattr(lookup_kernels, f"_{name}")
    kinds = {"history": "*i32"} | dict.fromkeys(("slots", "lengths", "begins", "sampled", "keys", "drafts"), "*i64")
    kinds |= dict.fromkeys(("width", "text", "stride", "limit", "parts", "count"), "i32")
    constants = {"LEAST": 2, "MOST": 5, "PARTS": lookup_kernels.PROGRAMS, "BLOCK": 64}
    known = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    assert len(compiled_as(kernel, kinds, known, arch).asm["cubin"]) > 0
