# SPDX-License-Identifier: Apache-2.0
"""One request: its tokens, when it ends and why, and its prompt's log-probabilities through chunks and recomputation."""

from __future__ import annotations

import pytest

from phalanx.config import SamplingParams
from phalanx.engine.messages import AddRequest, RowResult, TokenLogprobs
from phalanx.engine.request import Request


def request(*, limit: int = 100, **params: object) -> Request:
    return Request(
        AddRequest("a", [1, 2, 3], SamplingParams(**params), stop_token_ids=[7, 8], eos_token_ids=[8]),
        seed=1, limit=limit, matcher=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "params", "limit", "reason", "stop_reason"),
    [
        ([4, 5], {}, 100, None, None),
        ([4, 7], {}, 100, "stop", 7),
        ([4, 8], {}, 100, "stop", None),
        ([4, 5], {}, 5, "length", None),
        ([4, 7], {}, 5, "stop", 7),
        ([7, 7, 7], {"min_tokens": 2}, 100, "stop", 7),
        ([7, 7], {"min_tokens": 2}, 100, None, None),
    ],
)
def test_when_a_request_ends_and_why(
    tokens: list[int], params: dict[str, object], limit: int, reason: str | None, stop_reason: int | None
) -> None:
    pending = request(limit=limit, **params)
    updates = [pending.take_tokens(RowResult([token])) for token in tokens]
    assert [update.finish_reason for update in updates[:-1]] == [None] * (len(tokens) - 1)
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == (reason, stop_reason)
    assert pending.ended == (reason is not None)
    assert pending.tokens == [1, 2, 3, *tokens]


def test_prompt_logprobs_come_whole_and_once() -> None:
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in (2, 3)]
    pending = request(prompt_logprobs=0)
    pending.take_prompt_logprobs(0, logprobs[:1])
    pending.take_prompt_logprobs(0, logprobs[:1])  # preempted, and computed again
    pending.take_prompt_logprobs(1, logprobs[1:])
    pending.take_prompt_logprobs(0, logprobs)
    assert pending.take_tokens(RowResult([4])).prompt_logprobs == [None, *logprobs]
    assert pending.take_tokens(RowResult([4])).prompt_logprobs is None


def test_logprobs_come_with_their_token() -> None:
    of_token = TokenLogprobs(4, -1.0, 1)
    assert request().take_tokens(RowResult([4], [of_token])).logprobs == [of_token]


def test_an_admission_does_not_change_when_tokens_come() -> None:
    pending = request(min_tokens=1)
    pending.slot = 3
    assignment = pending.assignment()
    pending.take_tokens(RowResult([4]))
    assert (assignment.slot, assignment.token_ids, assignment.prompt_length, assignment.stop_token_ids) == (3, [1, 2, 3], 3, [7, 8])


def test_the_asker_keeps_its_list() -> None:
    prompt = [1, 2]
    pending = Request(AddRequest("a", prompt, SamplingParams()), seed=0, limit=9, matcher=None)
    pending.take_tokens(RowResult([4]))
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("sampled", "tokens", "reason", "accepted"),
    [
        ([4, 5, 6], [4, 5, 6], None, 2),
        ([4, 7, 6], [4, 7], "stop", 2),
        ([8], [8], "stop", 0),
        ([4, 5, 6, 9, 9], [4, 5, 6, 9], "length", 4),
        ([4, 5, 6, 7], [4, 5, 6, 7], "stop", 3),
    ],
)
def test_tokens_behind_the_one_that_ends_are_dropped(
    sampled: list[int], tokens: list[int], reason: str | None, accepted: int
) -> None:
    pending = request(limit=7)
    logprobs = [TokenLogprobs(token, -1.0, 1) for token in sampled]
    update = pending.take_tokens(RowResult(sampled, logprobs, drafted=len(sampled) - 1))
    assert update.rejected == len(sampled) - 1 - accepted
    assert (update.tokens, update.finish_reason, update.accepted) == (tokens, reason, accepted)
    assert [entry.token for entry in update.logprobs] == tokens
    assert pending.tokens == [1, 2, 3, *tokens]
