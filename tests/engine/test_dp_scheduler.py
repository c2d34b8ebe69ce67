# SPDX-License-Identifier: Apache-2.0
"""Where requests go, and what a step of several data-parallel indices holds. Random schedules: test_scheduler_fuzz.py."""

from __future__ import annotations

from collections import deque

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.fake import StepChecker, fake_tokens
from phalanx.engine.limits import SchedulerOptions
from phalanx.engine.messages import AddRequest, RequestUpdate, RowResult, Step, StepResult
from phalanx.errors import RequestError, StepDiverged
from tests.support.engine_client import each_update

VOCAB = 50
LIMITS = SchedulerOptions(num_blocks=40, block_size=4, max_batch_size=4, max_num_tokens=32, max_seq_len=80, vocab_size=VOCAB)


class Ranks:
    def __init__(self, options: SchedulerOptions = LIMITS, indices: int = 2) -> None:
        self.scheduler = DpScheduler(options, indices)
        self.checkers = [
            StepChecker(
                vocab_size=VOCAB, num_blocks=options.num_blocks, block_size=options.block_size,
                max_batch_size=options.max_batch_size, max_num_tokens=options.max_num_tokens, max_seq_len=options.max_seq_len,
            )
            for _ in range(indices)
        ]  # fmt: skip
        self.results: deque[StepResult] = deque()
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 5, **params: object) -> None:
        self.scheduler.add(AddRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **params)))  # type: ignore[arg-type]

    def step(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        parts = zip(self.checkers, step.batches, strict=True)
        self.results.append(StepResult(step.number, [each.run(Step(step.number, [batch])).batches[0] for each, batch in parts]))
        return step

    def process_result(self) -> None:
        for update in each_update(self.scheduler.process_result(self.results.popleft())):
            assert isinstance(update, RequestUpdate)
            self.tokens.setdefault(update.request_id, []).extend(update.tokens)

    def finish(self) -> list[Step]:
        steps = []
        while not self.scheduler.idle:
            steps.append(self.step())
            self.process_result()
        assert self.scheduler.schedule() is None
        self.scheduler.check()
        return steps


def rows_of(step: Step) -> list[int]:
    return [len(batch.rows) for batch in step.batches]


def test_requests_go_where_least_is_to_be_done() -> None:
    ranks = Ranks()
    ranks.add("long", [1] * 20)
    for number in range(3):
        ranks.add(f"short{number}", [2 + number] * 5)
    step = ranks.step()
    assert rows_of(step) == [1, 3]
    assert step.extent is not None
    assert step.extent.tokens == [20, 15]
    assert (step.extent.decode_rows, step.extent.prefill_rows, step.extent.decodes) == (0, 3, False)
    assert step.extent.prefill_pairs == 210  # 1 + 2 + ... + 20; the other index has 45
    stats = ranks.scheduler.stats()
    assert (stats.dp_running, stats.dp_blocks_referenced) == ([1, 3], [5, 6])
    assert stats.running == 4
    ranks.process_result()
    decode = ranks.step()
    assert decode.extent is not None
    assert (decode.extent.tokens, decode.extent.decode_rows, decode.extent.decodes) == ([1, 3], 3, True)
    ranks.process_result()
    ranks.finish()
    assert ranks.scheduler.stats().generation_tokens == 20


def test_an_index_without_requests_has_an_empty_part_and_an_idle_engine_no_step() -> None:
    ranks = Ranks(indices=3)
    assert ranks.scheduler.schedule() is None
    ranks.add("only", [3, 4, 5], temperature=0)
    steps = ranks.finish()
    assert {tuple(rows_of(step)) for step in steps} == {(1, 0, 0)}
    assert ranks.tokens["only"] == fake_tokens([3, 4, 5], SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, count=5)
    assert ranks.scheduler.idle


def test_a_prompt_goes_to_the_index_that_has_its_beginning() -> None:
    ranks, shared = Ranks(), [7] * 16
    ranks.add("other", [1] * 24)
    ranks.add("first", [*shared, 8])
    step = ranks.step()
    assert rows_of(step) == [1, 1]  # "first" runs on index 1
    ranks.process_result()
    ranks.finish()
    ranks.add("busy", [9] * 6, max_tokens=20)  # on index 0
    ranks.add("again", [*shared, 9, 9])
    step = ranks.step()
    assert [[row.start for row in batch.rows] for batch in step.batches] == [[0], [16]]
    ranks.process_result()
    ranks.finish()
    assert ranks.scheduler.stats().prefix_hits == 16


def test_a_request_waits_for_the_first_index_that_has_room() -> None:
    """Four slots on each index: the ninth request is on none, and goes to the index on which the first request ends."""
    ranks = Ranks()
    for number in range(9):
        ranks.add(f"r{number}", [1 + number] * 3, max_tokens=2 if number == 5 else 9)
    while sum(rows_of(ranks.step())) < 8:
        ranks.process_result()
    assert (ranks.scheduler.stats().running, ranks.scheduler.stats().waiting) == (8, 1)
    ranks.process_result()
    ranks.finish()
    assert {name: len(tokens) for name, tokens in ranks.tokens.items()} == {f"r{n}": 2 if n == 5 else 9 for n in range(9)}


def test_steps_are_full_while_prompts_wait() -> None:
    """An index gets what its next step has room for beside the rest of the prompt that the step before left."""
    options = SchedulerOptions(
        num_blocks=400, block_size=4, max_batch_size=40, max_num_tokens=32, max_seq_len=80, vocab_size=VOCAB, prefix_caching=False
    )  # fmt: skip
    ranks = Ranks(options)
    for number in range(40):
        ranks.add(f"r{number}", [number % VOCAB] * 10)
    full = 0
    while len(ranks.scheduler.waiting) > 4:
        step = ranks.step()
        assert step.extent is not None
        assert step.extent.tokens == [32, 32]
        full += 1
        ranks.process_result()
    assert full >= 5
    ranks.finish()


def test_requests_without_a_seed_draw_different_ones() -> None:
    ranks = Ranks()
    for number in range(4):
        ranks.add(f"r{number}", [1, 2, 3], temperature=1.0)
    seeds = [assignment.seed for batch in ranks.step().batches for assignment in batch.admitted]
    assert len(set(seeds)) == 4


def test_abort_before_and_after_it_has_an_index() -> None:
    ranks = Ranks()
    ranks.add("a", [1, 2])
    ranks.step()
    ranks.add("b", [1, 2])
    with pytest.raises(RequestError, match="'b' is in use"):
        ranks.add("b", [1, 2])
    for name in ("a", "b", "never"):
        ranks.scheduler.abort(name)
    assert ranks.scheduler.open_ids == []
    ranks.process_result()
    assert ranks.tokens == {}
    assert ranks.scheduler.idle


def test_a_result_of_rows_that_no_index_had_is_refused() -> None:
    ranks = Ranks()
    ranks.add("a", [1, 2])
    ranks.step()
    result = ranks.results.popleft()
    with pytest.raises(StepDiverged, match="1 of 2 indices"):
        ranks.scheduler.process_result(StepResult(result.number, [result.batches[0], [RowResult([1])]]))
    with pytest.raises(StepDiverged, match="out of order"):
        ranks.scheduler.process_result(StepResult(result.number + 1, result.batches))
