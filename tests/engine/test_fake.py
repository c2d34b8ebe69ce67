# SPDX-License-Identifier: Apache-2.0
"""The checker refuses every step that would mislead a rank, and the fake executor keeps order and pace."""

from __future__ import annotations

import select
import time
from typing import Any

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.fake import FakeExecutor, StepChecker, fake_tokens
from phalanx.engine.messages import SlotAssignment, Step, StepBatch, StepRow, row_result
from phalanx.errors import StepDiverged

GREEDY = SamplingParams(temperature=0)
SIZES: dict[str, Any] = {
    "vocab_size": 40, "num_blocks": 8, "block_size": 4, "max_batch_size": 3, "max_num_tokens": 16, "max_seq_len": 24,
}  # fmt: skip


def admission(slot: int = 0, length: int = 6) -> SlotAssignment:
    return SlotAssignment(slot, list(range(length)), length, GREEDY, 0)


def step(number: int, *rows: StepRow, admitted: tuple[SlotAssignment, ...] = (), released: tuple[int, ...] = ()) -> Step:
    return Step(number, [StepBatch(list(released), list(admitted), list(rows))])


def prompt_row(slot: int = 0, blocks: tuple[int, ...] = (0, 1), length: int = 6) -> StepRow:
    return StepRow(slot, 0, length, list(range(length)), list(blocks), True)


FIRST = step(1, prompt_row(), admitted=(admission(),))


def test_a_request_by_hand_yields_its_tokens() -> None:
    checker = StepChecker(**SIZES)
    results = [
        checker.run(FIRST),
        checker.run(step(2, StepRow(0, 6, 1, [], [], True))),
        checker.run(step(3, StepRow(0, 7, 1, [], [], True))),
        checker.run(step(4, StepRow(0, 8, 1, [], [5], True))),
    ]
    tokens = [row_result(result.batches[0][0]).tokens[0] for result in results]
    assert tokens == fake_tokens(list(range(6)), GREEDY, seed=9, vocab_size=40, count=4)


def test_seeds_matter_unless_greedy() -> None:
    def tokens(params: SamplingParams, seed: int) -> list[int]:
        return fake_tokens([1, 2], params, seed=seed, vocab_size=1000, count=5)

    assert tokens(GREEDY, 1) == tokens(GREEDY, 2)
    assert tokens(SamplingParams(), 1) != tokens(SamplingParams(), 2)


BAD = {
    "a number is skipped": step(3, StepRow(0, 6, 1, [], [], True)),
    "two batches": Step(2, [StepBatch(), StepBatch()]),
    "a free slot is released": step(2, released=(1,)),
    "a slot is taken twice": step(2, admitted=(admission(),)),
    "a slot beyond the batch": step(2, admitted=(admission(3),)),
    "no prompt": step(2, admitted=(SlotAssignment(1, [], 0, GREEDY, 0),)),
    "a row of a free slot": step(2, StepRow(2, 0, 1, [0], [2], True)),
    "a row in a released slot": step(2, StepRow(0, 6, 1, [], [], True), released=(0,)),
    "an empty row": step(2, StepRow(0, 6, 0, [], [], False)),
    "two rows of a slot": step(2, StepRow(0, 6, 1, [], [], True), StepRow(0, 7, 1, [], [], True)),
    "a position is skipped": step(2, StepRow(0, 7, 1, [], [], True)),
    "beyond the tokens": step(2, StepRow(0, 6, 2, [1, 2], [], True)),
    "does not sample at the end": step(2, StepRow(0, 6, 1, [], [], False)),
    "other tokens": step(2, StepRow(0, 6, 1, [41], [], True)),
    "no token was sampled": step(2, StepRow(1, 0, 1, [], [2], True), admitted=(admission(1, 1),)),
    "a block that does not exist": step(2, StepRow(0, 6, 1, [], [8], True)),
    "no block for the position": step(2, prompt_row(1, (2,)), admitted=(admission(1),)),
    "another's block": step(2, prompt_row(1, (1, 2)), admitted=(admission(1),)),
    "begins inside a block": step(2, StepRow(1, 3, 3, [3, 4, 5], [0, 2], True), admitted=(admission(1),)),
    "a hit in a block of other content": step(2, StepRow(1, 4, 2, [4, 5], [1, 2], True), admitted=(admission(1),)),
    "too many tokens": step(2, prompt_row(1, (2, 3, 4, 5, 6), 17), admitted=(admission(1, 17),)),
    "decodes last": step(2, prompt_row(1, (2, 3)), StepRow(0, 6, 1, [], [], True), admitted=(admission(1),)),
    "beyond the longest": step(2, prompt_row(1, (2, 3, 4, 5, 6, 7), 24), admitted=(admission(1, 24),)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_step_that_breaks_a_rule_is_refused(name: str) -> None:
    checker = StepChecker(**SIZES | ({"max_num_tokens": 32} if name == "beyond the longest" else {}))
    checker.run(FIRST)
    with pytest.raises(StepDiverged, match="breaks a rule"):
        checker.run(BAD[name])


@pytest.mark.parametrize(("lag", "number", "allowed"), [(1, 2, True), (3, 3, False), (3, 4, True), (None, 4, False)])
def test_a_token_is_taken_from_the_slot_when_the_first_stage_has_it(lag: int | None, number: int, allowed: bool) -> None:
    checker = StepChecker(**SIZES, token_lag=lag)
    checker.run(FIRST)
    for later in range(2, number):
        checker.run(step(later))
    taking = step(number, StepRow(0, 6, 1, [], [], True))
    if allowed:
        checker.run(taking)
    else:
        with pytest.raises(StepDiverged, match=f"takes the token of step 1, and may do so {lag} steps later"):
            checker.run(taking)


def test_with_stages_that_return_tokens_one_more_step_is_in_flight() -> None:
    depths = [FakeExecutor.of(**SIZES, pipeline_stages=stages, returns_tokens=True).depth for stages in (1, 2, 4)]
    assert depths == [2, 3, 5]


def test_a_hit_in_the_right_block_is_taken() -> None:
    checker = StepChecker(**SIZES)
    checker.run(FIRST)
    checker.run(step(2, StepRow(1, 4, 2, [4, 5], [0, 2], True), admitted=(admission(1),)))


def test_a_block_behind_the_window_may_have_a_new_writer() -> None:
    sizes = SIZES | {"windows": (4,)}
    for number, allowed in ((3, False), (4, True)):
        checker = StepChecker(**sizes)
        checker.run(FIRST)
        for later in range(2, number):
            checker.run(step(later, StepRow(0, 4 + later, 1, [], [], True)))
        taking = step(number, prompt_row(1, (0, 4)), admitted=(admission(1),))
        if allowed:
            checker.run(taking)
        else:
            with pytest.raises(StepDiverged, match="held by"):
                checker.run(taking)


def wait(executor: FakeExecutor, seconds: float = 20.0) -> float:
    """Until something is ready to be collected; how long that took."""
    begin = time.monotonic()
    assert select.select(executor.waitables(), [], [], seconds)[0]
    return time.monotonic() - begin


def test_results_come_in_order_and_wake_the_poller() -> None:
    executor = FakeExecutor.of(**SIZES)
    assert executor.start()[1] == 8
    assert executor.collect() == []
    executor.submit(FIRST)
    executor.submit(step(2, StepRow(0, 6, 1, [], [], True)))
    wait(executor)
    assert [result.number for result in executor.collect()] == [1, 2]
    assert not select.select(executor.waitables(), [], [], 0)[0]
    executor.shutdown()
    executor.shutdown()


def test_stages_overlap() -> None:
    executor = FakeExecutor.of(**SIZES, pipeline_stages=4, latency=0.4)
    assert (executor.depth, len(executor.start()[0])) == (4, 4)
    begin = time.monotonic()
    executor.submit(FIRST)
    executor.submit(step(2, prompt_row(1, (2, 3)), admitted=(admission(1),)))
    assert executor.collect() == []
    numbers: list[int] = []
    while len(numbers) < 2:
        wait(executor)
        numbers += [result.number for result in executor.collect()]
        assert time.monotonic() - begin >= 0.4
    assert numbers == [1, 2]
    assert time.monotonic() - begin >= 0.5
    executor.shutdown()
