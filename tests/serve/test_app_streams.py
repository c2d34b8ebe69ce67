# SPDX-License-Identifier: Apache-2.0
"""Many streams over an engine that is faster than its readers: nothing is lost, doubled or moved, however tokens are joined."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.serve import streams
from phalanx import LLM, SamplingParams
from phalanx.config.locate import DEMO
from phalanx.serve.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked_python")

STREAMS, TOKENS = 24, 150


@pytest.fixture(scope="module")
def port():
    with streams.server(0.5) as (_, port):
        yield port


@pytest.fixture(scope="module")
def expected():
    tokenizer = Tokenizer.load(DEMO)
    token_ids = tokenizer.encode(streams.TEXT, add_special_tokens=False)
    return tokenizer.decode((token_ids * TOKENS)[:TOKENS])


async def events_of(client, path, body):
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def together(port, one):
    async def every():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(one(client) for _ in range(STREAMS)))

    return asyncio.run(every())


ASK = {"model": "demo", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "fields", "text_of"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}, lambda choice: choice["text"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            lambda choice: choice["delta"].get("content", ""),
        ),
    ],
)
def test_joined_tokens_are_the_same_text(port, expected, path, fields, text_of):
    for events in together(port, lambda client: events_of(client, path, {**ASK, **fields})):
        choices = [event["choices"][0] for event in events if event["choices"]]
        assert "".join(map(text_of, choices)) == expected
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert events[-1]["usage"]["completion_tokens"] == TOKENS
        assert len({event["id"] for event in events}) == 1


def test_whole_answers_are_the_same_text(port, expected):
    async def one(client):
        fields = {**ASK, "prompt": [5, 6, 7], "stream": False, "stream_options": None}
        return (await client.post("/v1/completions", json=fields)).json()

    for answer in together(port, one):
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["phalanx moves"]}])
def test_offline_is_the_same_text(expected, more):
    """Where nobody looks before the end, tokens are joined as they come; a stop string is looked for all the same."""
    with streams.paced(0.5), LLM("demo", device="cpu") as llm:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **more)
        outputs = llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
    for completion in [completion for output in outputs for completion in output.outputs]:
        assert completion.text == expected
        assert (len(completion.token_ids), completion.finish_reason) == (TOKENS, "length")


def test_offline_stops_at_a_stop_string(expected):
    with streams.paced(0.5), LLM("demo", device="cpu") as llm:
        (completion,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=TOKENS, stop="layer"), use_tqdm=False).outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        expected[: expected.index("layer")],
        "stop",
        "layer",
    )
