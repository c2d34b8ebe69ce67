# SPDX-License-Identifier: Apache-2.0
"""A proposer that knows what requests are about to get, requests of every kind, and the comparison of answers with and without
drafts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.comm.local import LocalWorld
from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import NO_DRAFT, AddRequest, RequestUpdate, SlotAssignment, StepBatch
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.speculation.proposer import Proposer, SampledRows
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.worker_graphs import SLOTS, Stage, Steps, step_runner

K = 4


class KnownAnswers(Proposer):
    """Proposes what each request is about to get, if luck will have it."""

    def __init__(self, answers: dict[tuple[Any, ...], list[int]], luck: float, seed: int = 0) -> None:
        self._answers, self._luck, self._chance = answers, luck, random.Random(seed)
        self._of_slot: dict[int, list[int]] = {}
        self.taken: dict[int, list[int]] = {}

    def admit(self, assignment: SlotAssignment) -> None:
        prompt = assignment.token_ids[: assignment.prompt_length]
        self._of_slot[assignment.slot] = prompt + self._answers[key_of(prompt, assignment.params)]
        self.taken[assignment.slot] = list(assignment.token_ids)

    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        drafts = torch.full((len(rows.slots), count), NO_DRAFT)
        for row, (slot, length, sampled) in enumerate(
            zip(rows.slots.tolist(), rows.lengths.tolist(), rows.sampled.tolist(), strict=True)
        ):
            self.taken[slot] += [token for token in sampled[:-1] if token >= 0]
            assert len(self.taken[slot]) == length + 1
            for place, token in enumerate(self._of_slot[slot][length + 1 : length + 1 + count]):
                wrong = self._chance.choice([NO_DRAFT, (token + 1) % VOCAB_SIZE])
                drafts[row, place] = token if self._chance.random() < self._luck else wrong
        return drafts if count else None


def key_of(prompt: Sequence[int], params: SamplingParams) -> tuple[Any, ...]:
    """Ranks are not told of grammars."""
    return (tuple(prompt), repr(msgspec.structs.replace(params, structured_output=None)))


def answers_of(
    arrivals: Sequence[tuple[int, AddRequest]], updates: dict[str, list[RequestUpdate]]
) -> dict[tuple[Any, ...], list[int]]:
    """What requests got, for `KnownAnswers`."""
    return {
        key_of(add.token_ids, add.params): [token for update in updates[add.request_id] for token in update.tokens]
        for _, add in arrivals
    }


def joined(updates: Sequence[RequestUpdate]) -> tuple[list[Any], list[float]]:
    """What a client is told, however it is cut into updates; and the log probabilities."""
    entries = [entry for update in updates for entry in [*(update.prompt_logprobs or []), *update.logprobs] if entry is not None]
    tokens = [token for update in updates for token in update.tokens]
    last = updates[-1]
    return [tokens, [entry.token for entry in entries], last.finish_reason, last.stop_reason], [entry.logprob for entry in entries]


def require_alike(outputs: dict[str, list[RequestUpdate]], wanted: dict[str, list[RequestUpdate]]) -> None:
    for name, updates in wanted.items():
        (output, logprobs), (wanted_output, wanted_logprobs) = joined(outputs[name]), joined(updates)
        assert output == wanted_output, name
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-3)


class Remainders:
    """A grammar that is complete after `length` tokens. With n of them to go it takes tokens of the remainder n by 3: what is due
    at one place of one request is refused at the next one, and in most others."""

    def __init__(self, compiled: str) -> None:
        self.left = int(compiled)

    def mask(self) -> bytes:
        allowed = np.arange(-(-VOCAB_SIZE // 32) * 32) % 3 == self.left % 3
        return np.packbits(allowed, bitorder="little").tobytes()

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        ahead, masks = Remainders(str(self.left)), [self.mask()]
        for draft in drafts:
            if draft < 0 or draft % 3 != ahead.left % 3 or ahead.left <= 1:
                break
            ahead.accept(draft)
            masks.append(ahead.mask())
        return masks

    def accept(self, token: int) -> None:
        assert token % 3 == self.left % 3
        self.left -= 1

    @property
    def finished(self) -> bool:
        return self.left <= 0


def draw_requests(seed: int, count: int = 14) -> list[tuple[int, AddRequest]]:
    """(turn at which it comes, request), of every kind of sampling."""
    chance = random.Random(seed)
    words = [[chance.randrange(3, 380) for _ in range(24)] for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.0, "prompt_logprobs": 1}, {"temperature": 0.9, "seed": 7},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2}, {"temperature": 1.0, "seed": 3, "logprobs": 0},
        {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -100.0}, "min_tokens": 6},
        {"temperature": 0.8, "seed": 5, "top_p": 0.7, "min_p": 0.02, "top_k": 40, "frequency_penalty": 0.7},
        {"temperature": 0.0, "structured_output": StructuredOutputParams(regex="x", compiled=str(chance.randrange(3, 20)))},
        {"temperature": 0.7, "seed": 2, "logprobs": 1,
         "structured_output": StructuredOutputParams(regex="x", compiled=str(chance.randrange(3, 20)))},
    ]  # fmt: skip
    arrivals = []
    for number in range(count):
        prompt = [chance.randrange(3, 380) for _ in range(chance.randint(1, 30))]
        prompt = chance.choice(words)[: chance.choice((0, 9, 24))] + prompt * (2 if number == count // 2 else 1)
        params = SamplingParams(max_tokens=chance.randint(6, 40), **kinds[number % len(kinds)])
        stops = [chance.randrange(3, 380) for _ in range(30)] if params.min_tokens or chance.random() < 0.3 else [381]
        arrivals.append((chance.randrange(12), AddRequest(str(number), prompt, params, stop_token_ids=stops)))
    return sorted(arrivals, key=lambda each: each[0])


class Awaited:
    """The end of a `TokenReturn` in one process: what the last stage's state was after the step of so many stages ago."""

    size = 2

    def __init__(self, rank: int, states: list[Tensor], stages: int) -> None:
        self.rank, self._states, self._stages = rank, states, stages

    def receive(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self._states[-self._stages])

    def send(self, x: Tensor, to: int) -> None: ...


def pipeline_of(
    folder: Path, stages: Sequence[range], last: dict[str, Any], *, returns: bool, graphs: bool = True,
    inner_layers: tuple[int, ...] = (),
) -> list[ModelRunner]:  # fmt: skip
    """The runners of stages with these layers, in one process. last: of the last one. returns: drafts and tokens return on the
    device."""
    lanes: list[deque[Tensor]] = [deque() for _ in stages]
    states = [torch.full((2 + K, SLOTS), 3) for _ in stages]
    runners = []
    for stage, layers in enumerate(stages):
        more = {"inner_layers": inner_layers, **(last if stage == len(stages) - 1 else {"max_drafts": K})}
        if returns and stage in (0, len(stages) - 1):
            more = {**more, "ends": Awaited(min(stage, 1), states, len(stages))}
        runners.append(step_runner(folder, Steps() if graphs else None, layers, Stage(stage, lanes), **more))
    run = runners[-1].run

    def remembered(step: StepBatch) -> Any:
        output = run(step)
        states.append(runners[-1]._state.clone())
        return output

    runners[-1].run = remembered  # type: ignore[method-assign]
    return runners


class Together:
    """The ranks of one tensor-parallel group as one runner."""

    def __init__(self, world: LocalWorld, runners: list[ModelRunner]) -> None:
        self._world, self._runners = world, runners

    def run(self, step: StepBatch) -> Any:
        outputs = self._world.run(lambda group: self._runners[group.rank].run(step).results())
        assert len({crc for _, crc in outputs}) == 1

        class Results:
            def results(self) -> Any:
                return outputs[0]

        return Results()


class Staged:
    """The runners of a pipeline as one runner. Steps without rows follow each, so that its tokens have returned."""

    def __init__(self, runners: list[ModelRunner]) -> None:
        self._runners, self._state = runners, runners[-1]._state

    def run(self, step: StepBatch) -> Any:
        output = [runner.run(step) for runner in self._runners][-1]
        for _ in self._runners[1:]:
            for runner in self._runners:
                runner.run(StepBatch())
        return output
