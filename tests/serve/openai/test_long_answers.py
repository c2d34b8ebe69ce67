# SPDX-License-Identifier: Apache-2.0
"""What has many entries: encoded in parts, never joined, and freed in parts on the thread."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from typing import ClassVar

import pytest

from phalanx.engine.messages import TokenLogprobs
from phalanx.serve.app import SWITCH_INTERVAL_SECONDS
from phalanx.serve.openai.logprobs import prompt_logprobs
from phalanx.serve.openai.long_answers import (
    PART,
    JsonParts,
    _thread,
    discard,
    encode_json,
    encode_parts,
    encode_small,
    entries_of,
)

TOP = [{"token": "b", "logprob": -2.0, "bytes": [98, 99]}] * 20


def body_of(count: int) -> dict:
    content = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": TOP}] * count
    scores = [None] + [{str(i): {"logprob": -1.0, "rank": i} for i in range(20)}] * count
    choices = [{"index": i, "text": 'x"', "logprobs": {"content": content, "text_offset": list(range(count))}} for i in range(3)]
    return {"id": "x", "choices": choices, "empty": [], "none": {}, "prompt_logprobs": scores, "usage": None}


@pytest.mark.parametrize("count", [0, 1, PART, PART + 1, 3 * PART + 5])
def test_a_long_answer_is_encoded_in_short_parts(count):
    body = body_of(count)
    parts = encode_parts(body)
    assert b"".join(parts) == encode_json(body) == encode_small(body)
    assert max(map(len, parts)) < 2 * PART * max(len(encode_small(TOP)), 64)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 3 * PART])
def test_scores_of_a_prompt_are_never_one_text(count):
    scores = [None, *(TokenLogprobs(i, -1.0, 1, [(i, -1.0), (7, -2.0)]) for i in range(count))]
    encoded = prompt_logprobs(scores, str)
    assert entries_of({"prompt_logprobs": encoded}) == entries_of(encoded) == count + 1
    body = {"id": "x", "prompt_logprobs": encoded, "last": 1}
    text = b"".join(encode_parts(body))
    assert text == encode_json(body) == encode_small(body)
    assert len(json.loads(text)["prompt_logprobs"]) == count + 1
    assert json.loads(b"".join(prompt_logprobs([], str).parts)) == []
    if count > PART:  # the parts themselves, and not a copy
        assert {id(part) for part in encoded.parts} <= {id(part) for part in encode_parts(body)}
    assert max(map(len, encoded.parts)) < 64 * 150


def test_what_is_no_json_is_an_error():
    with pytest.raises(NotImplementedError, match="object has no JSON"):
        encode_small(object())


class Counted:
    """Counts the objects that live, and notes on which threads they end."""

    ended_on: ClassVar[set[str]] = set()
    alive: ClassVar[int] = 0

    def __init__(self) -> None:
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1
        Counted.ended_on.add(threading.current_thread().name)


@pytest.mark.parametrize("nested", [False, True])
def test_a_long_answer_is_freed_on_the_thread(nested):
    Counted.ended_on, Counted.alive = set(), 0
    entries = [{"top": Counted()} for _ in range(5 * PART)]
    value = {"choices": [{"logprobs": {"content": entries[: 2 * PART]}}, {"logprobs": {"content": entries[2 * PART :]}}]}
    if not nested:
        value = {"content": entries, "part": JsonParts([b"1"], 1)}
    del entries
    discard(value)
    del value
    _thread.submit(int).result(30)
    gc.collect()
    assert Counted.alive == 0
    assert all(name.startswith("long answers") for name in Counted.ended_on)


def test_short_answers_and_none_are_left_alone():
    short = {"content": [1, 2, 3]}
    discard(short)
    discard(None)
    _thread.submit(int).result(30)
    assert short == {"content": [1, 2, 3]}


def test_freeing_gives_way():
    """Another thread gets the interpreter lock while half a million objects are freed. At once it takes 30 ms of a core."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        turns = turns_while_freed()
    finally:
        sys.setswitchinterval(interval)
    assert turns > 20


def turns_while_freed() -> int:
    scores = [TokenLogprobs(i, -1.0, 1, [(k + 1000 * i, -float(k)) for k in range(20)]) for i in range(20_000)]
    done: list[int] = []
    discard(scores)
    future = _thread.submit(done.append, 1)
    turns = 0
    while not done:
        turns += 1
        time.sleep(1e-5)  # gives up the lock
    future.result(30)
    assert scores == []
    return turns
