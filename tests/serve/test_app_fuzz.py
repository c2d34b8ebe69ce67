# SPDX-License-Identifier: Apache-2.0
"""Random requests, differentially: the same body gets the same answer alone, in a crowd, and as a stream; a bad one gets a 4xx.

A failure prints the seed of its crowd.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fuzz import fuzz_seeds
from tests.support.serve_processes import MODEL, fake_server

pytestmark = pytest.mark.usefixtures("forked_python")

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e9,
    -1e9,
    2**70,
    "",
    "a" * 5000,
    [],
    [[]],
    {},
    {"a": 1},
    [None],
    "\x00",
    0.5,
    [-1],
    [2**40],
)


def draw_body(chance: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL, "prompt": [chance.randrange(3, 250) for _ in range(chance.choice([1, 5, 40, 200]))],
        "max_tokens": chance.randrange(1, 40), "seed": chance.randrange(-9, 9), "temperature": chance.choice([0, 0.7, 2]),
    }  # fmt: skip
    choices: dict[str, Any] = {
        "n": chance.choice([2, 3]), "logprobs": chance.choice([0, 3]), "stop": chance.choice(["e", ["a", "xx"]]), "echo": True,
        "ignore_eos": True, "min_tokens": 1, "top_p": 0.5, "top_k": 5, "stop_token_ids": [chance.randrange(3, 250)],
        "guided_regex": chance.choice(["[ab]{3,9}c", "(yes|no)"]), "include_stop_str_in_output": True,
    }  # fmt: skip
    return body | {name: value for name, value in choices.items() if chance.random() < 0.2}


def answer_of(reply: dict[str, Any]) -> list[Any]:
    choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    return [(choice["text"], choice["finish_reason"], choice.get("stop_reason")) for choice in choices]


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any] | None:
    """The answer; None where the body is refused."""
    reply = await client.post("/v1/completions", json=body)
    if reply.status_code == 200:
        return answer_of(reply.json())
    assert 400 <= reply.status_code < 500, (reply.status_code, reply.text)
    assert reply.json()["error"]["message"]
    return None


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    texts: dict[int, str] = {}
    ends: dict[int, tuple[Any, Any]] = {}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] = (choice["finish_reason"], choice.get("stop_reason"))
    return [(texts[index], *ends[index]) for index in sorted(texts)]


async def check_crowd(client: httpx.AsyncClient, seed: int) -> tuple[int, int]:
    """Some requests alone, then all at once in two ways, with bad ones between; returns how many were answered and refused."""
    chance = random.Random(seed)
    bodies = [draw_body(chance) for _ in range(8)]
    bad = [{**body, chance.choice(list(body)): chance.choice(WRONG)} for body in bodies]
    alone = [await post(client, body) for body in bodies]
    good = [(body, answer) for body, answer in zip(bodies, alone, strict=True) if answer is not None]
    crowd = await asyncio.gather(
        *(post(client, body) for body, _ in good),
        *(stream(client, body) for body, _ in good),
        *(post(client, body) for body in bad),
    )
    for number, (body, answer) in enumerate(good):
        assert crowd[number] == answer, body
        assert crowd[len(good) + number] == answer, body
    return len(good), len(bodies) - len(good) + crowd.count(None)


def test_the_same_request_gets_the_same_answer(tmp_path: Path, tiny_model: Path) -> None:
    with fake_server(tmp_path, tiny_model, fake={"num_blocks": 400}, engine={"max_seq_len": 300}) as served:
        served.wait_ready()

        async def fuzz() -> str:
            answered = refused = 0
            async with httpx.AsyncClient(base_url=served.url, timeout=300, trust_env=False) as client:
                with fuzz_seeds(5) as seeds:
                    for seed in seeds:
                        more_answered, more_refused = await check_crowd(client, seed)
                        answered, refused = answered + more_answered, refused + more_refused
            return f"{seeds.count} crowds: {answered} requests answered in three ways each, {refused} refused"

        print(asyncio.run(fuzz()))
        assert "Traceback" not in served.log
        assert served.metric("num_requests_running") == 0
