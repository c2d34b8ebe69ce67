# SPDX-License-Identifier: Apache-2.0
"""The scheduler under hypothesis-made traces, against the rules that a rank relies on and the tokens of each request alone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.config import SamplingParams, StructuredOutputParams
from phalanx.engine import scheduler as scheduler_module
from phalanx.engine.fake import FakeProposer, StepChecker, fake_tokens
from phalanx.engine.limits import depth_of
from phalanx.engine.messages import (
    AddRequest,
    RequestRejected,
    RequestUpdate,
    RowResult,
    Step,
    StepResult,
)
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import CapacityError, EngineError, PromptTooLong, RequestError, StepDiverged
from tests.support.engine_client import each_update
from tests.support.engine_drafts import proposer
from tests.support.engine_grammar import VOCAB, Evens

ROOMY = SchedulerOptions(num_blocks=256, block_size=4, max_batch_size=16, max_num_tokens=64, max_seq_len=200, vocab_size=VOCAB)


class Ranks:
    """A scheduler, and ranks that give results when asked to."""

    def __init__(self, options: SchedulerOptions, propose: FakeProposer | None = None) -> None:
        self.scheduler = Scheduler(options, Evens)
        self.checker = StepChecker(
            vocab_size=VOCAB, num_blocks=options.num_blocks, block_size=options.block_size, max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens, max_seq_len=options.max_seq_len, windows=options.windows,
            token_lag=options.token_lag, propose=propose,
        )  # fmt: skip
        self.results: deque[StepResult] = deque()
        self.steps: list[Step] = []
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.refused: dict[str, RequestRejected] = {}

    def add(
        self, name: str, prompt: list[int], stop: list[int] | None = None, eos: list[int] | None = None, **params: object
    ) -> AddRequest:
        add = AddRequest(name, list(prompt), SamplingParams(**params), stop or [], eos or [])
        self.scheduler.add(add)
        return add

    def submit(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        self.steps.append(step)
        assert len(step.batches[0].rows) <= self.scheduler.options.max_rows, "ranks prepare for no more"
        self.results.append(self.checker.run(step))
        order = [request.id for request in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == self.scheduler.open_ids, "first come, first served"
        return True

    def fill(self) -> None:
        while self.submit():
            pass

    def process_result(self) -> None:
        for update in each_update(self.scheduler.process_result(self.results.popleft())):
            if isinstance(update, RequestRejected):
                self.refused[update.request_id] = update
            else:
                self.updates.setdefault(update.request_id, []).append(update)

    def finish(self, limit: int = 5000) -> None:
        """Run until nothing is open; a request that never ends fails the test."""
        for _ in range(limit):
            self.fill()
            if not self.results:
                assert not self.scheduler.open_ids, f"nothing moves, and {self.scheduler.open_ids} are open"
                return
            self.process_result()
        raise AssertionError(f"{limit} steps were not enough")

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates.get(name, []) for token in update.tokens]


def alone(add: AddRequest, options: SchedulerOptions, seed: int) -> tuple[list[int], str, int | None]:
    """What a request must yield: its tokens, finish reason and stop reason, from its own tokens alone."""
    limit = min(options.max_seq_len, len(add.token_ids) + (add.params.max_tokens or 10**9))
    size = options.block_size
    reaches = [options.max_seq_len if window is None else window // size + 2 for window in options.windows]
    fitting = [n for n in range(options.max_seq_len + 1) if sum(min(n, reach) for reach in reaches) <= options.num_blocks]
    limit = min(limit, fitting[-1] * size + 1)
    count = limit - len(add.token_ids)
    generated = fake_tokens(
        add.token_ids, add.params, seed=seed, vocab_size=VOCAB, count=count, stop_token_ids=add.stop_token_ids
    )  # fmt: skip
    for index, token in enumerate(generated):
        if token in add.stop_token_ids and index >= add.params.min_tokens:
            return generated[: index + 1], "stop", None if token in add.eos_token_ids else token
    return generated, "length", None


@st.composite
def schedulers(draw: st.DrawFn) -> SchedulerOptions:
    """Pools that hold one to three requests of full length, so that sharing and preemption are common. Drawn evenly: hypothesis
    likes small numbers, and in small schedulers nothing happens."""
    stages, returns = draw(st.sampled_from([(1, False), (1, False), (2, False), (4, False), (2, True), (3, True), (4, True)]))
    chunked = draw(st.sampled_from([True, True, False]))
    max_seq_len = draw(st.sampled_from(range(12, 61)))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    return SchedulerOptions(
        num_blocks=draw(st.sampled_from(range(4, 3 * 60))) * max_seq_len // (60 * block_size) + 2,
        block_size=block_size,
        max_batch_size=draw(st.sampled_from(range(1, 9))),
        max_num_tokens=draw(st.sampled_from([1, 3, 7, 8, 20, 40])) if chunked else max_seq_len,
        max_seq_len=max_seq_len,
        depth=depth_of(stages, returns_tokens=returns),
        pipeline_stages=stages,
        returns_tokens=returns,
        windows=draw(st.sampled_from([(None,), (None,), (1,), (5,), (16,), (None, 5), (None, 16, 16), (16, 1)])),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        chunked_prefill=chunked,
        vocab_size=VOCAB,
        seed=draw(st.integers(0, 3)),
        max_drafts=draw(st.sampled_from([0, 0, 1, 3, 8])),
        drafts_keep_kv=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=schedulers(), seed=st.sampled_from(range(1000)), requests=st.sampled_from(range(1, 15)), aborting=st.booleans())
def test_every_request_gets_its_own_tokens_whatever_happens_around_it(
    options: SchedulerOptions, seed: int, requests: int, aborting: bool
) -> None:
    chance = random.Random(seed)
    ranks = Ranks(options, proposer(chance, chance.choice([0, 0.3, 0.9, 1])))
    if chance.random() < 0.5:
        ranks.scheduler.choose_drafts = lambda _: chance.randrange(options.max_drafts + 1)
    roots = [[chance.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    added: dict[str, AddRequest] = {}
    seeds: dict[str, int] = {}
    aborted: set[str] = set()
    for number in range(requests):
        for _ in range(chance.randrange(4)):
            (ranks.submit if chance.random() < 0.6 or not ranks.results else ranks.process_result)()
        name = f"r{number}"
        prompt = chance.choice(roots)[: chance.randrange(1, options.max_seq_len)] + [
            chance.randrange(VOCAB) for _ in range(chance.randrange(3))
        ]
        seeds[name] = chance.randrange(-5, 5)
        stop = [chance.randrange(VOCAB) for _ in range(chance.choice([0, 0, 1, 4]))]
        length = chance.choice([None, chance.randrange(1, 30)])
        least = chance.randrange(3) if length is None or length > 3 else 0
        try:
            added[name] = ranks.add(
                name, prompt, stop, stop[:2], seed=seeds[name], max_tokens=length, min_tokens=least,
                temperature=chance.choice([0, 1]), prompt_logprobs=chance.choice([None, None, None, 0]),
                logprobs=chance.choice([None, 0]),
            )  # fmt: skip
        except (PromptTooLong, CapacityError):
            continue
        if aborting and chance.random() < 0.3:
            victim = chance.choice(list(added))
            if victim in ranks.scheduler.open_ids:
                aborted.add(victim)
            ranks.scheduler.abort(victim)
        ranks.scheduler.check()
    ranks.finish()

    for name, add in added.items():
        tokens, reason, stop_reason = alone(add, options, seeds[name])
        updates = ranks.updates.get(name, [])
        assert ranks.tokens(name) == tokens[: len(ranks.tokens(name))]
        if name in aborted:
            assert all(update.finish_reason is None for update in updates)
            continue
        assert ranks.tokens(name) == tokens
        assert [update.finish_reason for update in updates] == [None] * (len(updates) - 1) + [reason]
        assert updates[-1].stop_reason == stop_reason
        wants_prompt_logprobs = add.params.prompt_logprobs is not None
        assert [x and x.token for x in updates[0].prompt_logprobs or []] == (
            [None, *add.token_ids[1:]] if wants_prompt_logprobs else []
        )
        assert all(update.prompt_logprobs is None for update in updates[1:])
        assert [x.token for update in updates for x in update.logprobs] == (tokens if add.params.logprobs == 0 else [])
    ranks.scheduler.check()
    pool = ranks.scheduler.pool
    assert ranks.scheduler.idle
    assert (pool.referenced, pool.available) == (0, options.num_blocks)
    assert options.prefix_caching or pool.cached == 0


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_as_many_steps_are_in_flight_as_there_are_stages(stages: int) -> None:
    """The rule of pipelines: with at least as many requests as stages, no stage waits for the whole batch."""
    ranks = Ranks(replace(ROOMY, pipeline_stages=stages, depth=max(stages, 2)))
    chance = random.Random(7)
    for number in range(stages + 3):
        ranks.add(f"r{number}", [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))], max_tokens=60)
    for _ in range(40):
        ranks.fill()
        assert ranks.scheduler.steps_in_flight >= stages
        ranks.process_result()
    ranks.finish()


def returning(stages: int, options: SchedulerOptions = ROOMY) -> SchedulerOptions:
    """Stages of which the last returns tokens to the first."""
    return replace(options, pipeline_stages=stages, returns_tokens=True, depth=depth_of(stages, returns_tokens=True))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("requests", [1, 2, 5, 9])
def test_requests_go_on_before_their_tokens_are_known_where_the_last_stage_returns_them(stages: int, requests: int) -> None:
    """A step is queued behind those that the stages run: of the requests of the step that the last stage runs. Where there are
    fewer requests than stages, steps without rows come between."""
    ranks = Ranks(returning(stages))
    for number in range(requests):
        ranks.add(f"r{number}", [number], max_tokens=60)
    for _ in range(40):
        ranks.fill()
        assert max(request.pending for request in ranks.scheduler.running) == 2 or requests < stages
        assert ranks.scheduler.steps_in_flight == stages + 1
        assert all(not row.tokens for step in ranks.steps[2 * stages :] for row in step.batches[0].rows)
        ranks.process_result()
    shares = [{row.slot for row in step.batches[0].rows} for step in ranks.steps]
    assert all(one == other for one, other in pairwise(shares[stages::stages]))
    assert sum(map(len, shares[-stages:])) == requests
    assert shares[-stages:].count(set()) == max(stages - requests, 0)
    ranks.finish()
    assert {len(ranks.tokens(f"r{number}")) for number in range(requests)} == {60}


def steps_per_token(ranks: Ranks, name: str) -> float:
    return len(ranks.steps) / len(ranks.tokens(name))


@pytest.mark.parametrize("stages", [2, 4])
def test_a_constrained_request_finds_a_place_among_others_as_soon_as_its_token_is_known(stages: int) -> None:
    """Its token takes one step more than those of others, which have filled the next step by then: it gets a place of theirs."""
    ranks = Ranks(returning(stages, replace(ROOMY, max_seq_len=1000, num_blocks=2048)))
    for number in range(7):
        ranks.add(f"r{number}", [number], max_tokens=800)
    grammar = StructuredOutputParams(compiled="800")
    ranks.scheduler.add(AddRequest("even", [7], SamplingParams(max_tokens=800, structured_output=grammar)))
    for _ in range(300):
        ranks.fill()
        ranks.process_result()
    assert steps_per_token(ranks, "even") < stages + 2
    assert all(steps_per_token(ranks, f"r{number}") < stages + 0.1 for number in range(7))


def test_blocks_ahead_for_drafts_leave_the_next_request_waiting() -> None:
    """The first prompt takes blocks beyond its own, where its drafts keep their KV; the second has none left, and gets no row."""
    options = SchedulerOptions(
        num_blocks=5, block_size=4, max_batch_size=6, max_num_tokens=19, max_seq_len=19, max_drafts=8, drafts_keep_kv=True,
        windows=(16,), chunked_prefill=False, prefix_caching=False, vocab_size=VOCAB,
    )  # fmt: skip
    ranks = Ranks(options)
    ranks.add("first", list(range(8)), max_tokens=10)
    ranks.add("second", list(range(6)), max_tokens=10)
    assert ranks.submit()
    assert [row.count for row in ranks.steps[0].batches[0].rows] == [8]


def test_many_constrained_requests_leave_places_to_another() -> None:
    ranks = Ranks(returning(2, replace(ROOMY, max_seq_len=1000, num_blocks=2048)))
    grammar = StructuredOutputParams(compiled="800")
    for number in range(15):
        params = SamplingParams(max_tokens=800, structured_output=grammar)
        ranks.scheduler.add(AddRequest(f"even {number}", [number], params))
    ranks.add("plain", [7], max_tokens=800)
    for _ in range(300):
        ranks.fill()
        ranks.process_result()
    assert steps_per_token(ranks, "plain") < 4
    assert all(steps_per_token(ranks, f"even {number}") < 4 for number in range(15))


def test_steps_without_rows_are_made_only_for_a_request_that_can_go_on_behind_them() -> None:
    ranks = Ranks(returning(4))
    ranks.add("a", [1], max_tokens=3)
    ranks.finish()
    assert [len(step.batches[0].rows) for step in ranks.steps] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    grammar = StructuredOutputParams(compiled="9")
    ranks.scheduler.add(AddRequest("b", [2], SamplingParams(max_tokens=9, structured_output=grammar)))
    ranks.steps.clear()
    ranks.finish()
    assert len(ranks.steps) == 9
    assert all(step.batches[0].rows for step in ranks.steps)


def test_a_token_of_a_grammar_is_awaited_where_others_are_not() -> None:
    ranks = Ranks(returning(2))
    for number in range(4):
        ranks.add(f"r{number}", [number], max_tokens=40)
    ranks.scheduler.add(AddRequest("even", [7], SamplingParams(
        max_tokens=40, structured_output=StructuredOutputParams(compiled="40")
    )))  # fmt: skip
    constrained = next(request for request in ranks.scheduler.waiting if request.constrained)
    ahead = 0
    for _ in range(30):
        ranks.fill()
        assert constrained.pending <= 1
        rows = ranks.steps[-1].batches[0].rows
        assert all(row.tokens for row in rows if row.slot == constrained.slot)
        ahead += sum(not row.tokens for row in rows)
        ranks.process_result()
    assert ahead > 30
    ranks.finish()


def test_a_row_behind_a_stop_token_is_dropped() -> None:
    """The next step of the request is in flight when its token turns out to be its last."""
    ranks = Ranks(returning(2))
    for number in range(4):
        tokens = fake_tokens([number], SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, count=12)
        ranks.add(f"r{number}", [number], stop=[tokens[10]], temperature=0, max_tokens=60)
    ranks.finish()
    rows = sum(len(step.batches[0].rows) for step in ranks.steps)
    generated = sum(len(ranks.tokens(f"r{number}")) for number in range(4))
    assert {ranks.updates[f"r{number}"][-1].finish_reason for number in range(4)} == {"stop"}
    assert generated < rows <= generated + 4
    assert ranks.scheduler.pool.referenced == 0


def test_stages_get_even_shares_of_the_decodes() -> None:
    ranks = Ranks(replace(ROOMY, pipeline_stages=4, depth=4))
    for number in range(13):
        ranks.add(f"r{number}", [number], max_tokens=60)
    for _ in range(30):
        ranks.fill()
        ranks.process_result()
    assert sorted(len(step.batches[0].rows) for step in ranks.steps[-4:]) == [3, 3, 3, 4]


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_no_step_is_full_of_decodes_while_prompts_wait(stages: int, returns: bool) -> None:
    """Else the steps with prompts pass the stages one after the other: the short step is done long before they are. Each prompt
    here is split among the stages, so that all of them would end in the steps of one stage."""
    options = replace(
        ROOMY, pipeline_stages=stages, depth=stages, max_batch_size=32, max_num_tokens=1024, max_seq_len=2048, num_blocks=16384
    )  # fmt: skip
    ranks = Ranks(returning(stages, options) if returns else options)
    for number in range(32):
        ranks.add(f"r{number}", [number % VOCAB] * (256 * stages), max_tokens=40)
    decodes: list[int] = []
    while len(ranks.scheduler.waiting) > 8:
        ranks.fill()
        rows = ranks.steps[-1].batches[0].rows
        decodes.append(sum(row.count == 1 for row in rows))
        assert len(rows) > decodes[-1], f"step {len(ranks.steps)} has decodes alone"
        ranks.process_result()
    assert max(decodes) >= 12 // stages
    latest = decodes[-stages:]
    assert max(latest) - min(latest) <= 4, f"decodes of the last steps with prompts: {latest}"
    ranks.finish()


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(("slots", "stages", "most"), [(8, 1, 8), (8, 2, 4), (9, 4, 3), (3, 4, 1), (1, 2, 1)])
def test_a_step_holds_one_share_of_the_slots(slots: int, stages: int, most: int, chunked: bool) -> None:
    """Even the first, when no other is in flight and more requests wait than there are slots."""
    options = replace(
        ROOMY, max_batch_size=slots, pipeline_stages=stages, depth=max(stages, 2), chunked_prefill=chunked, max_num_tokens=128
    )  # fmt: skip
    ranks = Ranks(options)
    for number in range(30):
        ranks.add(f"r{number}", [number], max_tokens=5 + number % 7)
    ranks.fill()
    assert len(ranks.steps[0].batches[0].rows) == options.max_rows == most
    ranks.finish()
    assert max(len(step.batches[0].rows) for step in ranks.steps) == most


def test_a_stage_that_loses_its_requests_gets_others() -> None:
    ranks = Ranks(replace(ROOMY, pipeline_stages=2, depth=2))
    for number in range(8):
        ranks.add(f"r{number}", [number], max_tokens=100)
    ranks.fill()
    first = [row.slot for row in ranks.steps[0].batches[0].rows]
    for request in list(ranks.scheduler.running):
        if request.slot in first:
            ranks.scheduler.abort(request.id)
    for _ in range(6):
        ranks.process_result()
        ranks.fill()
    assert [len(step.batches[0].rows) for step in ranks.steps[-2:]] == [2, 2]


def test_requests_that_end_together_take_no_further_steps() -> None:
    """While a stage has the last tokens of half of them, the other half go to the first in one step."""
    ranks = Ranks(replace(ROOMY, pipeline_stages=2, depth=2))
    for number in range(8):
        ranks.add(f"r{number}", [number], max_tokens=9)
    ranks.finish()
    assert [len(step.batches[0].rows) for step in ranks.steps] == [4] * 2 * 9


def test_stages_share_one_long_prompt() -> None:
    options = replace(ROOMY, pipeline_stages=4, depth=4, max_num_tokens=4096, max_seq_len=4096, num_blocks=1024)
    ranks = Ranks(options)
    ranks.add("long", [1] * 2048, max_tokens=2)
    ranks.fill()
    assert [step.batches[0].rows[0].count for step in ranks.steps] == [512] * 4
    ranks.finish()


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("returns", [False, True])
def test_requests_go_on_beside_a_long_prompt_in_a_pipeline(stages: int, returns: bool) -> None:
    """Of as many requests as stages a step has one row, which a prompt of many steps must not take in each of them."""
    options = replace(ROOMY, max_num_tokens=64, max_seq_len=4000, num_blocks=2048)
    staged = replace(options, pipeline_stages=stages, depth=depth_of(stages, returns_tokens=False))
    ranks = Ranks(returning(stages, options) if returns else staged)
    ranks.add("long", [1] * 3000, max_tokens=2)
    assert ranks.submit()
    ranks.add("streams", [2] * 8, max_tokens=500)
    for number in range(stages - 1):
        ranks.add(f"short {number}", [3 + number] * 8, max_tokens=2)
    came = []
    while not ranks.tokens("long"):
        ranks.fill()
        ranks.process_result()
        came += [len(ranks.steps)] * (len(ranks.tokens("streams")) - len(came))
    assert len(came) > 3000 / 64 / (stages + 1) - 4
    assert all(after - before <= 2 * stages for before, after in pairwise(came))
    ranks.finish()


@pytest.mark.parametrize("stages", [2, 4])
def test_a_long_prompt_in_a_pipeline_leaves_what_shorter_ones_can_take(stages: int) -> None:
    options = SchedulerOptions(
        num_blocks=8192, block_size=16, max_batch_size=64, max_num_tokens=8192, max_seq_len=131072, vocab_size=VOCAB,
        pipeline_stages=stages, depth=stages,
    )  # fmt: skip
    ranks = Ranks(options)
    ranks.add("long", [1] * 100_000, max_tokens=2)
    assert ranks.submit()
    ranks.add("shorter", [2] * 5000, max_tokens=2)
    while not ranks.tokens("shorter"):
        ranks.fill()
        ranks.process_result()
    assert not ranks.tokens("long")
    filled = [sum(row.count for row in step.batches[0].rows) for step in ranks.steps[stages:]]
    assert filled[: 2 * stages] == [8192] * min(len(filled), 2 * stages)
    ranks.finish()


def counts(step: Step, ranks: Ranks) -> dict[str, int]:
    """Tokens of each request of a step."""
    names = {request.slot: request.id for request in ranks.scheduler.running}
    return {names[row.slot]: row.count for row in step.batches[0].rows}


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    ranks = Ranks(replace(ROOMY, max_num_tokens=32))
    ranks.add("long", [1] * 150)
    assert ranks.submit()
    assert counts(ranks.steps[-1], ranks) == {"long": 32}
    ranks.add("short", [2] * 10)
    ranks.add("half as long", [3] * 75)
    assert ranks.submit()
    assert counts(ranks.steps[-1], ranks) == {"long": 22, "short": 10}, "what the short one needs, and no more"
    ranks.process_result()
    assert ranks.submit()
    assert counts(ranks.steps[-1], ranks) == {"short": 1, "long": 31}, "nothing for one that is half as long"
    ranks.finish()


def test_a_prompt_whose_beginning_is_cached_is_as_long_as_the_rest() -> None:
    ranks, history = Ranks(replace(ROOMY, max_num_tokens=128, max_seq_len=1000, num_blocks=512)), [7] * 300
    ranks.add("first turn", history, max_tokens=1)
    ranks.finish()
    ranks.add("long", [1] * 700)
    assert ranks.submit()
    ranks.add("unknown", [8] * 310)
    ranks.add("second turn", [*history, *[9] * 10])
    assert ranks.submit()
    assert counts(ranks.steps[-1], ranks) == {"long": 102, "unknown": 16, "second turn": 10}
    ranks.finish()


def test_a_long_prompt_keeps_half_of_its_steps() -> None:
    ranks = Ranks(replace(ROOMY, max_num_tokens=32))
    ranks.add("long", [1] * 150)
    for number in range(40):
        ranks.add(f"short {number}", [number % VOCAB] * 12, max_tokens=1)
    chunks = []
    while not ranks.tokens("long"):
        assert ranks.submit()
        here = counts(ranks.steps[-1], ranks)
        assert sum(here.values()) == 32, "the step is full"
        chunks.append(here["long"])
        ranks.process_result()
    assert chunks[:7] == [16] * 7
    assert all(chunk >= 16 for chunk in chunks[:-1])
    ranks.finish()


def test_a_long_prompt_leaves_nothing_to_those_without_blocks() -> None:
    ranks = Ranks(replace(ROOMY, max_num_tokens=32, num_blocks=39, prefix_caching=False))
    ranks.add("long", [1] * 150, max_tokens=5)
    ranks.add("short", [2] * 10, max_tokens=5)
    for _ in range(4):
        assert ranks.submit()
        assert counts(ranks.steps[-1], ranks) == {"long": 32}
        ranks.process_result()
    ranks.finish()


def test_prompts_of_one_length_are_computed_one_after_the_other() -> None:
    ranks = Ranks(replace(ROOMY, max_num_tokens=32))
    for number in range(4):
        ranks.add(f"r{number}", [number] * 100, max_tokens=1)
    order = []
    while ranks.submit():
        order.append(list(counts(ranks.steps[-1], ranks).items()))
        ranks.process_result()
    assert order[:4] == [[("r0", 32)]] * 3 + [[("r0", 4), ("r1", 28)]]
    assert len(order) == 13, "every step is full"


def test_one_stage_runs_one_step_ahead_of_what_it_knows() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("a", [1, 2, 3], max_tokens=5)
    ranks.fill()
    assert [step.batches[0].rows[0].tokens for step in ranks.steps] == [[1, 2, 3], []]
    ranks.finish()
    assert len(ranks.tokens("a")) == 5
    assert len(ranks.steps) == 5, "the end by max_tokens is known ahead: no step beyond it"


def test_a_token_behind_a_late_stop_is_dropped() -> None:
    ranks = Ranks(ROOMY)
    first = fake_tokens([1, 2, 3], SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, count=1)
    ranks.add("a", [1, 2, 3], first, temperature=0)
    ranks.finish()
    assert len(ranks.steps) == 2
    assert ranks.tokens("a") == first
    assert ranks.updates["a"][0].finish_reason == "stop"
    assert ranks.scheduler.pool.referenced == 0


def test_a_constrained_request_waits_for_each_of_its_tokens() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("constrained", [1], max_tokens=20, structured_output=StructuredOutputParams(compiled="4"))
    ranks.add("free", [1], max_tokens=20)
    ranks.fill()
    assert [len(step.batches[0].rows) for step in ranks.steps] == [2, 1]
    ranks.finish()
    assert len(ranks.tokens("constrained")) == 4
    assert all(token % 2 == 0 for token in ranks.tokens("constrained"))
    assert ranks.updates["constrained"][-1].finish_reason == "stop"
    assert len(ranks.tokens("free")) == 20


def test_a_grammar_that_cannot_be_read_refuses_its_request_only() -> None:
    ranks = Ranks(ROOMY)
    with pytest.raises(RequestError, match="cannot be read"):
        ranks.add("a", [1], structured_output=StructuredOutputParams(compiled="not a number"))
    with pytest.raises(RequestError, match="no compiled grammar"):
        ranks.add("b", [1], structured_output=StructuredOutputParams(regex="x"))
    assert ranks.scheduler.idle


def test_a_token_that_the_grammar_does_not_take_refuses_its_request_only() -> None:
    scheduler = Scheduler(ROOMY, Evens)
    scheduler.add(AddRequest("a", [1], SamplingParams(structured_output=StructuredOutputParams(compiled="4"))))
    scheduler.add(AddRequest("b", [1], SamplingParams(max_tokens=1)))
    step = scheduler.schedule()
    assert step is not None
    update, refused = scheduler.process_result(StepResult(step.number, [[RowResult([3]), RowResult([3])]]))
    assert isinstance(refused, RequestRejected)
    assert "token 3" in refused.error["failure"]
    assert isinstance(update, RequestUpdate)
    scheduler.check()
    assert scheduler.idle


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    scheduler = Scheduler(ROOMY)
    for name in "abc":
        scheduler.add(AddRequest(name, [1, 2], SamplingParams(max_tokens=2)))
    step = scheduler.schedule()
    assert step is not None
    results = [RowResult([3]), RowResult([4, -2]), RowResult([5])]
    first, refused, third = scheduler.process_result(StepResult(step.number, [results]))
    assert isinstance(refused, RequestRejected)
    assert (refused.request_id, refused.error["kind"]) == ("b", "LogitsNotFinite")
    assert "the logits of token 2 are NaN or infinite" in refused.error["failure"]
    assert isinstance(first, RequestUpdate)
    assert isinstance(third, RequestUpdate)
    assert (first.tokens, third.tokens) == ([3], [5])
    assert (scheduler.stats().nonfinite_requests, scheduler.stats().generation_tokens) == (1, 2)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.batches[0].rows) == 2
    scheduler.process_result(StepResult(step.number, [[RowResult([4]), RowResult([6])]]))
    scheduler.check()
    assert scheduler.idle


def test_min_tokens_hold_stop_ids_back() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("a", [1], list(range(0, VOCAB, 2)), max_tokens=30, min_tokens=6)
    ranks.finish()
    tokens = ranks.tokens("a")
    assert all(token % 2 for token in tokens[:6])
    assert tokens[-1] % 2 == 0
    assert ranks.updates["a"][-1].stop_reason == tokens[-1]


def test_the_last_to_come_gives_way_and_loses_no_token() -> None:
    ranks = Ranks(replace(ROOMY, num_blocks=12, prefix_caching=False))
    for name in "abc":
        ranks.add(name, [ord(name) % VOCAB] * 8, [7], max_tokens=24, min_tokens=24, seed=3)
    ranks.finish()
    stats = ranks.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.generation_tokens, stats.prompt_tokens) == (72, 24)
    ends = [max(i for i, u in enumerate(ranks.updates[name])) for name in "abc"]
    assert ends == [23, 23, 23]


def test_a_long_prompt_beside_decodes_never_drains_the_pipeline() -> None:
    ranks = Ranks(replace(ROOMY, depth=2, max_num_tokens=8))
    ranks.add("a", [1, 2, 3], max_tokens=30)
    ranks.add("b", [4, 5, 6], max_tokens=30)
    for _ in range(4):
        ranks.fill()
        ranks.process_result()
    ranks.add("long", list(range(30)), max_tokens=3)
    mixed = 0
    while "long" not in ranks.updates:
        ranks.fill()
        assert ranks.scheduler.steps_in_flight == 2, "the next step is made before the results of this one are there"
        rows = ranks.steps[-1].batches[0].rows
        assert [row.count for row in rows[:2]] == [1, 1], "a token for each that decodes, whatever the prompt takes"
        mixed += len(rows) == 3
        ranks.process_result()
    assert mixed >= 5
    ranks.finish()
    assert [len(ranks.tokens(name)) for name in ("a", "b", "long")] == [30, 30, 3]


@pytest.mark.parametrize("stages", [1, 2])
def test_requests_that_only_their_limit_ends_wait_for_blocks_and_never_give_way(stages: int) -> None:
    options = replace(ROOMY, num_blocks=20, prefix_caching=False, pipeline_stages=stages, depth=2)
    ranks = Ranks(options)
    for number in range(9):
        ranks.add(f"{number}", [number] * (3 + number), max_tokens=6 + 3 * number, seed=3)
    most = 0
    while not ranks.scheduler.idle:
        ranks.fill()
        most = max(most, len(ranks.scheduler.running))
        ranks.process_result()
    stats = ranks.scheduler.stats()
    assert stats.preemptions == 0
    assert most >= 3, "they do run together"
    assert stats.generation_tokens == sum(6 + 3 * number for number in range(9))


def test_one_that_takes_the_whole_pool_is_not_forgotten_by_the_forecast() -> None:
    ranks = Ranks(replace(ROOMY, num_blocks=20, prefix_caching=False))
    ranks.add("whole", [1] * 4, max_tokens=200)  # alone it is admitted, though a forecast with room to spare would not
    for number in range(3):
        ranks.add(f"{number}", [number] * 4, max_tokens=40)
    ranks.finish()
    assert ranks.scheduler.stats().preemptions == 0
    assert [len(ranks.tokens(name)) for name in ("whole", "0", "1", "2")] == [77, 40, 40, 40]


def test_one_that_may_end_at_any_time_gives_way_to_nobodys_forecast() -> None:
    ranks = Ranks(replace(ROOMY, num_blocks=12, prefix_caching=False))
    ranks.add("open", [1] * 8, [7], max_tokens=24, min_tokens=24, seed=3)
    ranks.add("steady", [2] * 8, max_tokens=24, seed=3)
    ranks.fill()
    assert [request.id for request in ranks.scheduler.running] == ["open", "steady"]
    ranks.add("one too many", [3] * 8, max_tokens=24, seed=3)
    ranks.finish()
    assert [len(ranks.tokens(name)) for name in ("open", "steady", "one too many")] == [24, 24, 24]


def test_a_shared_beginning_is_computed_once() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("a", list(range(20)), max_tokens=4, temperature=0)
    ranks.finish()
    ranks.add("b", list(range(20)), max_tokens=4, temperature=0)
    ranks.add("c", [*range(10), 30], max_tokens=4)
    ranks.finish()
    assert ranks.tokens("a") == ranks.tokens("b")
    assert ranks.updates["b"][0].cached_tokens == 16, "the last token is computed, and a block is shared whole"
    assert ranks.updates["c"][0].cached_tokens == 8
    stats = ranks.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (51, 24)


def test_only_requests_with_the_same_salt_share_blocks() -> None:
    ranks = Ranks(ROOMY)
    for name, salt in (("plain", None), ("a", "a"), ("b", "b"), ("a again", "a"), ("plain again", None)):
        ranks.add(name, list(range(20)), max_tokens=4, cache_salt=salt)
        ranks.finish()
    assert [updates[0].cached_tokens for updates in ranks.updates.values()] == [0, 0, 0, 16, 16]


def test_a_block_is_shared_as_soon_as_the_step_that_computes_it_is_submitted() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("a", list(range(22)), max_tokens=4)
    ranks.submit()
    ranks.add("b", list(range(22)), max_tokens=4)
    ranks.submit()
    assert [row.start for row in ranks.steps[1].batches[0].rows] == [22, 20]
    ranks.finish()
    assert ranks.updates["b"][0].cached_tokens == 20


def test_two_that_come_together_share_nothing_within_their_step() -> None:
    ranks = Ranks(ROOMY)
    for name in "ab":
        ranks.add(name, list(range(20)), max_tokens=4)
    ranks.submit()
    assert [row.start for row in ranks.steps[0].batches[0].rows] == [0, 0]
    ranks.finish()
    ranks.scheduler.check()


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    ranks = Ranks(ROOMY)
    for name in "ab":
        ranks.add(name, list(range(20)), max_tokens=1, prompt_logprobs=2)
        ranks.finish()
    assert ranks.updates["b"][0].cached_tokens == 0
    logprobs = ranks.updates["b"][0].prompt_logprobs
    assert logprobs is not None
    assert len(logprobs) == 20
    assert logprobs[0] is None


def test_a_window_gives_blocks_back_while_the_request_runs() -> None:
    ranks = Ranks(replace(ROOMY, num_blocks=6, windows=(8,), max_num_tokens=8))
    ranks.add("a", list(range(40)), max_tokens=100)
    most = 0
    for _ in range(400):
        ranks.fill()
        most = max(most, ranks.scheduler.pool.referenced)
        if not ranks.results:
            break
        ranks.process_result()
    assert len(ranks.tokens("a")) == 100
    assert most <= 5


def test_a_windowed_hit_needs_only_what_the_window_reaches() -> None:
    ranks = Ranks(replace(ROOMY, num_blocks=9, windows=(8,), max_num_tokens=16))
    ranks.add("a", list(range(40)), max_tokens=1)
    ranks.finish()
    ranks.add("b", list(range(40)), max_tokens=3)
    ranks.finish()
    assert ranks.updates["b"][0].cached_tokens == 36


def test_a_prompt_without_chunks_goes_before_decodes() -> None:
    """Otherwise a prompt as long as a step would wait until nothing else runs."""
    ranks = Ranks(replace(ROOMY, chunked_prefill=False, max_num_tokens=20))
    ranks.add("a", [1], max_tokens=100)
    ranks.fill()
    ranks.add("long", [2] * 20, max_tokens=2)
    ranks.process_result()
    ranks.submit()
    assert [row.count for row in ranks.steps[-1].batches[0].rows] == [20]
    ranks.finish()
    assert len(ranks.tokens("a")) == 100


@pytest.mark.parametrize(
    ("options", "length", "error", "words"),
    [
        (ROOMY, 200, PromptTooLong, ["200", "max_seq_len is 200;", "shorten the prompt or raise max_seq_len"]),
        (replace(ROOMY, length_hint="raise kv"), 200, PromptTooLong, ["max_seq_len is 200;", "shorten the prompt or raise kv"]),
        (replace(ROOMY, chunked_prefill=False), 70, PromptTooLong, ["70", "max_num_tokens is 64"]),
        (replace(ROOMY, num_blocks=10), 45, CapacityError, ["45", "40 tokens", "12 blocks of 4"]),
        (ROOMY, 0, RequestError, ["0 tokens"]),
    ],
)
def test_what_cannot_run_is_refused_with_both_numbers(
    options: SchedulerOptions, length: int, error: type[Exception], words: list[str]
) -> None:
    ranks = Ranks(options)
    with pytest.raises(error) as caught:
        ranks.add("a", [1] * length)
    assert all(word in str(caught.value) for word in words)
    assert ranks.scheduler.idle


def test_a_prompt_beyond_the_model_is_not_told_to_raise_a_limit() -> None:
    with pytest.raises(PromptTooLong, match=r"max_seq_len is 200, the model's own limit; .*; shorten the prompt$"):
        Ranks(replace(ROOMY, length_hint="")).add("a", [1] * 200)


@pytest.mark.parametrize(
    ("prompt", "stop", "params", "name"),
    [
        ([VOCAB], [], {}, "prompt"),
        ([-1], [], {}, "prompt"),
        ([1], [VOCAB + 7], {}, "stop_token_ids"),
        ([1], [], {"logit_bias": {99: 1.0}}, "logit_bias"),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused(
    prompt: list[int], stop: list[int], params: dict[str, object], name: str
) -> None:
    with pytest.raises(RequestError, match=f"in {name} is unknown; the vocabulary has tokens 0..49"):
        Ranks(ROOMY).add("a", prompt, stop, **params)


def test_the_longest_prompt_that_fits_runs() -> None:
    for options in (ROOMY, replace(ROOMY, num_blocks=10)):
        ranks = Ranks(options)
        longest = min(options.max_seq_len - 1, options.num_blocks * options.block_size)
        ranks.add("a", [1] * longest, max_tokens=None)
        ranks.finish()
        assert len(ranks.tokens("a")) == 1
        assert ranks.updates["a"][-1].finish_reason == "length"


def test_seeds_of_requests_that_bring_none_repeat_with_the_engine_seed() -> None:
    def seeds(options: SchedulerOptions) -> list[int]:
        ranks = Ranks(options)
        for number in range(4):
            ranks.add(str(number), [1], **({"seed": 5} if number == 2 else {}))
        ranks.submit()
        return [admission.seed for admission in ranks.steps[0].batches[0].admitted]

    assert seeds(ROOMY) == seeds(ROOMY)
    assert seeds(ROOMY)[2] == 5
    assert seeds(ROOMY) != seeds(replace(ROOMY, seed=1))


def test_a_result_of_another_step_stops_the_engine() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("a", [1])
    ranks.fill()
    with pytest.raises(StepDiverged):
        ranks.scheduler.process_result(ranks.results[1])
    with pytest.raises(StepDiverged):
        ranks.scheduler.process_result(StepResult(1, [[RowResult([1]), RowResult([2])]]))
    with pytest.raises(StepDiverged):
        ranks.scheduler.process_result(StepResult(1, [[RowResult()]]))


def test_an_id_is_taken_once() -> None:
    ranks = Ranks(ROOMY)
    ranks.add("a", [1])
    with pytest.raises(RequestError, match="in use"):
        ranks.add("a", [1])
    ranks.scheduler.abort("nobody")


def test_the_check_sees_a_lost_slot() -> None:
    scheduler = Scheduler(ROOMY)
    scheduler._slots.pop()
    with pytest.raises(EngineError, match="slot accounting"):
        scheduler.check()


def test_hundreds_of_requests_cost_little_time() -> None:
    """A turn of 512 decodes; the bound is generous, since tests share their cores."""
    options = replace(ROOMY, num_blocks=20_000, block_size=16, max_batch_size=512, max_num_tokens=8192, max_seq_len=2048)
    scheduler = Scheduler(options)
    for number in range(512):
        scheduler.add(AddRequest(str(number), [number % VOCAB] * 16, SamplingParams(max_tokens=1000)))
    best = 1.0
    for _ in range(40):
        begin = time.perf_counter()
        step = scheduler.schedule()
        middle = time.perf_counter()
        assert step is not None
        result = StepResult(step.number, [[RowResult([7]) for _ in step.batches[0].rows]])
        later = time.perf_counter()
        scheduler.process_result(result)
        best = min(best, time.perf_counter() - later + middle - begin)
    assert best < 0.010


def test_the_core_imports_no_torch() -> None:
    modules = "scheduler, blocks, prefix, request, limits, loop, fake, process, messages"
    code = f"import sys; from phalanx.engine import {modules}; assert not set(sys.modules) & {{'torch', 'transformers'}}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_long_cached_prompts_are_admitted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost no budget of the step, and each takes milliseconds."""
    monkeypatch.setattr(scheduler_module, "ADMITTED_TOKENS", 100)
    ranks, prompt = Ranks(ROOMY), list(range(40))
    ranks.add("first", prompt, max_tokens=1)
    ranks.finish()
    before = len(ranks.steps)
    for i in range(7):
        ranks.add(f"r{i}", prompt, max_tokens=1)
    ranks.finish()
    admitted = [len(step.batches[0].admitted) for step in ranks.steps[before:]]
    assert sum(admitted) == 7
    assert max(admitted) == 3
