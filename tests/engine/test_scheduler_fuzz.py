# SPDX-License-Identifier: Apache-2.0
"""Random schedules, differentially: each request must get the same tokens in a crowd as alone, and no block or slot may be lost.

Grammar calls end late and in any order here; adapters are loaded, replaced and unloaded under few names while requests run, and the
ranks' keys and values depend on the adapter. A failure prints the seed of its schedule.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from phalanx.config import SamplingParams, StructuredOutputParams
from phalanx.engine.adapters import Adapter, Adapters
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.fake import FakeExecutor
from phalanx.engine.grammar_threads import GrammarCall, InlineGrammarCalls
from phalanx.engine.limits import depth_of
from phalanx.engine.messages import AddRequest, RequestRejected, RequestUpdate, StepResult
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import CapacityError, PromptTooLong
from phalanx.layout.adapter import AdapterFile
from tests.support.engine_client import each_update
from tests.support.engine_drafts import proposer
from tests.support.engine_grammar import VOCAB, Evens
from tests.support.fuzz import fuzz_seeds

ADAPTERS = ("a", "b", "c", "d")
WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (None,),
    (1,),
    (5,),
    (16,),
    (None, 5),
    (None, 16),
    (None, None, 1),
    (16, 5),
    (None, 7, 7, 3),
]
"""Of the groups of layers."""


class LateGrammarCalls(InlineGrammarCalls):
    """Calls end at once and are collected late, in any order."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self.prompt = False

    def collect(self) -> list[GrammarCall]:
        calls = super().collect()
        self._chance.shuffle(calls)
        late = [call for call in calls if not self.prompt and self._chance.random() < 0.5]
        self._ended = late
        return [call for call in calls if call not in late]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    prompt_logprobs: list[int | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def take(self, update: RequestUpdate) -> None:
        assert self.finish_reason is None, "an update after the last one"
        self.tokens += update.tokens
        self.logprobs += [logprob.token for logprob in update.logprobs]
        if update.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = [logprob and logprob.token for logprob in update.prompt_logprobs]
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason


class Simulation:
    """A scheduler on ranks whose steps are all checked."""

    def __init__(self, options: SchedulerOptions, chance: random.Random, indices: int = 1, adapters: int = 1) -> None:
        self.calls, self.adapters = LateGrammarCalls(chance), Adapters(adapters)
        self.scheduler: Scheduler | DpScheduler
        if indices == 1:
            self.scheduler = Scheduler(options, Evens, grammar_calls=self.calls, adapters=self.adapters)
            self.schedulers = [self.scheduler]
        else:
            self.scheduler = DpScheduler(options, indices, Evens, grammar_calls=self.calls, adapters=self.adapters)
            self.schedulers = self.scheduler.indices
        self.answers: dict[str, Answer] = {}
        self.steps = 0
        self._results: deque[StepResult] = deque()
        self._ranks = FakeExecutor.of(
            vocab_size=VOCAB, num_blocks=options.num_blocks, block_size=options.block_size, max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens, max_seq_len=options.max_seq_len, windows=options.windows, thorough=True,
            indices=indices, pipeline_stages=options.pipeline_stages, returns_tokens=options.returns_tokens,
            propose=proposer(chance, chance.choice([0, 0.3, 0.9, 1])), state_snapshots=options.state_snapshots,
            host_blocks=options.host_blocks, host_states=options.host_states,
        )  # fmt: skip
        if chance.random() < 0.5:
            self.scheduler.choose_drafts = lambda _: chance.randrange(options.max_drafts + 1)

    def load(self, name: str, digest: bytes) -> None:
        key, file = self.adapters.next_key(), AdapterFile("", digest, 8, ())
        self._ranks.read_adapter(key, file)
        assert self._ranks.adapters_read() == [(key, None)]
        self.adapters.put(Adapter(name, key, file))
        self.drop()

    def drop(self) -> None:
        for key in self.adapters.forgotten(self.scheduler.open_adapters):
            self._ranks.drop_adapter(key)

    def submit(self) -> bool:
        step = self.scheduler.schedule()
        if step is not None:
            self.steps += 1
            self._ranks.submit(step)
            self._results += self._ranks.collect()
            if step.extent is not None:
                assert step.extent.tokens == [sum(row.count for row in batch.rows) for batch in step.batches]
                assert any(step.extent.tokens) or self.scheduler.options.returns_tokens, "a step without tokens"
        return step is not None

    def process(self) -> None:
        messages = self.scheduler.process_result(self._results.popleft()) if self._results else []
        for message in each_update([*messages, *self.scheduler.process_grammar_calls()]):
            assert not isinstance(message, RequestRejected), message
            self.answers.setdefault(message.request_id, Answer()).take(message)

    def finish(self) -> None:
        self.calls.prompt = True
        for _ in range(20_000):
            if not self.submit():
                self.process()
            if self.scheduler.idle:
                return
        raise AssertionError(f"{self.scheduler.open_ids} do not end")

    def close(self) -> None:
        self._ranks.shutdown()


def draw_options(chance: random.Random) -> SchedulerOptions:
    stages, chunked = chance.choice([1, 1, 2, 3, 4]), chance.random() < 0.7
    returns = stages > 1 and chance.random() < 0.6
    max_seq_len, block_size = chance.randrange(12, 61), chance.choice([1, 2, 4, 8])
    windows = chance.choice(WINDOWS)
    prefix_caching, snapshots = chance.random() < 0.7, chance.choice([0, 0, 0, 1, 3, 8])
    return SchedulerOptions(
        num_blocks=len(windows) * (chance.randrange(4, 110) * max_seq_len // (60 * block_size) + 2), block_size=block_size,
        max_batch_size=chance.randrange(1, 9), max_num_tokens=chance.choice([1, 3, 7, 8, 20, 40]) if chunked else max_seq_len,
        max_seq_len=max_seq_len, depth=depth_of(stages, returns_tokens=returns), pipeline_stages=stages,
        returns_tokens=returns, windows=windows,
        prefix_caching=prefix_caching, chunked_prefill=chunked, vocab_size=VOCAB,
        max_drafts=0 if snapshots and prefix_caching else chance.choice([0, 1, 3, 8]), drafts_keep_kv=chance.random() < 0.5,
        state_snapshots=snapshots if prefix_caching else 0, least_kept=chance.choice([1, 8, 20]),
        host_blocks=chance.choice([0, 1, 3, 10, 100]) if prefix_caching else 0,
        host_states=chance.choice([0, 1, 2, 8]) if prefix_caching and snapshots else 0, copied_blocks=chance.choice([1, 3, 64]),
    )  # fmt: skip


def draw_request(chance: random.Random, name: str, roots: list[list[int]], options: SchedulerOptions) -> AddRequest:
    prompt = chance.choice(roots)[: chance.randrange(1, options.max_seq_len)]
    prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(3))]
    stop = [chance.randrange(VOCAB) for _ in range(chance.choice([0, 1, 1, 4]))]
    constrained = chance.random() < 0.4
    fields: dict[str, Any] = {
        "seed": chance.randrange(-5, 5), "max_tokens": chance.choice([None, None, chance.randrange(4, 30)]),
        "min_tokens": 0 if constrained else chance.randrange(3), "temperature": chance.choice([0, 1]),
        "prompt_logprobs": chance.choice([None, None, None, 0]), "logprobs": chance.choice([None, 0]),
    }  # fmt: skip
    if constrained:
        fields["structured_output"] = StructuredOutputParams(compiled=str(chance.randrange(1, 20)))
    return AddRequest(name, prompt, SamplingParams(**fields), stop, stop[:2])


def change_adapters(crowd: Simulation, chance: random.Random) -> None:
    name = chance.choice(ADAPTERS)
    if chance.random() < 0.3 and name in crowd.adapters:
        crowd.adapters.remove(name)
        crowd.drop()
    elif chance.random() < 0.5:
        crowd.load(name, chance.randbytes(16))


def check_schedule(seed: int, indices: int = 1) -> tuple[int, int]:
    """One schedule; returns its steps and preemptions. Requests alone have no drafts."""
    chance = random.Random(seed)
    options = draw_options(chance)
    slots, others = 1 + seed % 3, random.Random(~seed)  # slots for adapters: fewer than there are
    crowd, digests = Simulation(options, chance, indices, slots), dict[str, bytes]()
    roots = [[chance.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    requests: dict[str, AddRequest] = {}
    aborted: set[str] = set()
    for number in range(chance.randrange(1, 16)):
        for _ in range(chance.randrange(3)):
            if not (chance.random() < 0.6 and crowd.submit()):
                crowd.process()
        change_adapters(crowd, others)
        add = draw_request(chance, f"r{number}", roots, options)
        name = others.choice((None, *ADAPTERS))
        if name is not None and name in crowd.adapters:
            add.params = msgspec.structs.replace(add.params, adapter=name)
            adapter = crowd.adapters.named(name)
            assert adapter is not None
            digests[add.request_id] = adapter.file.digest
        try:
            crowd.scheduler.add(add)
        except (PromptTooLong, CapacityError):
            continue
        requests[add.request_id] = add
        if chance.random() < 0.1:
            name = chance.choice(list(requests))
            if name in crowd.scheduler.open_ids:
                aborted.add(name)
            crowd.scheduler.abort(name)
        crowd.scheduler.check()
    crowd.finish()
    crowd.scheduler.check()
    crowd.close()
    for scheduler in crowd.schedulers:
        assert scheduler.pool.referenced == 0
        assert scheduler.pool.available == options.num_blocks

    for name, add in requests.items():
        alone = Simulation(replace(options, max_drafts=0), random.Random(seed))
        if name in digests:
            alone.load(str(add.params.adapter), digests[name])
        alone.scheduler.add(add)
        alone.finish()
        alone.close()
        answer = crowd.answers.get(name, Answer())
        if name in aborted:
            assert answer.finish_reason is None
            assert answer.tokens == alone.answers[name].tokens[: len(answer.tokens)], name
        else:
            assert answer == alone.answers[name], name
    return crowd.steps, crowd.scheduler.stats().preemptions


@pytest.mark.parametrize("indices", [1, 2, 3])
def test_a_request_gets_the_same_answer_in_a_crowd_as_alone(indices: int) -> None:
    steps = preemptions = 0
    with fuzz_seeds(10, tests=3) as seeds:
        for seed in seeds:
            more_steps, more_preemptions = check_schedule(seed, indices)
            steps, preemptions = steps + more_steps, preemptions + more_preemptions
    print(f"{seeds.count} schedules: {steps} steps, {preemptions} preemptions")
