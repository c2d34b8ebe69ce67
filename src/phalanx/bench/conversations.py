# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns with a running server: `phalanx bench serve --num_conversations N`.

Each prompt is everything that was said before and new tokens: a user's message, or the output of a tool that an answer has called.
So most of a prompt has been seen, and the report tells how long its first token took by turn, and where its beginning was found.

An answer comes as text. It goes into the next prompt as the server's tokenizer reads it, as a client of the chat API would send it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from phalanx.bench import load, prefix_hits, report
from phalanx.bench.streaming_client import ApiEndpoint, Sample, body_of, send
from phalanx.errors import OptionError, RequestError
from phalanx.hardware import provenance

_FIRST_ID = 3  # below it lie the ids that mark beginnings and ends


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: what is new in its prompt, and the seconds that pass before it."""

    tokens: list[int]
    wait: float


@dataclass(frozen=True)
class Conversations:
    """num_conversations, of num_turns messages each, those of the user and the answers together, as vLLM's benchmark counts them.

    input_len, output_len: tokens of a message and of an answer. common_prefix_num_tokens: with which all conversations begin, as
    with a system prompt; prefix_num_tokens: that each has of its own before the first message. tool_calls: behind each message;
    each has an output of tool_num_tokens and an answer. think_time: seconds between an answer and the user's next message, on
    average; tool_time: that a tool takes; both are drawn from exponential distributions. max_active_conversations: that go on at
    once; None: all. rate: conversations that begin in a second, as a Poisson process; None: as soon as they may. concurrency:
    requests that are open at once; None: no bound. Others: as of `load.Load`.
    """

    num_conversations: int
    num_turns: int = 8
    input_len: int = 128
    output_len: int = 128
    common_prefix_num_tokens: int = 0
    prefix_num_tokens: int = 0
    tool_calls: int = 0
    tool_num_tokens: int = 256
    tool_time: float = 0.0
    think_time: float = 0.0
    max_active_conversations: int | None = None
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0
    vocab_size: int = 256
    timeout: float = 600.0
    model: str | None = None

    def __post_init__(self) -> None:
        if self.num_turns < 2 or self.num_turns % 2:
            raise OptionError(
                f"num_turns={self.num_turns} is not an even number of messages", why="each message of a user has an answer",
                next="2: one message and its answer",
            )  # fmt: skip
        if self.rate is not None and not self.rate > 0:
            raise OptionError(f"rate={self.rate} is not above 0", next="give conversations per second, or inf")
        if self.vocab_size <= _FIRST_ID:
            raise OptionError(f"vocab_size={self.vocab_size} leaves no token ids", why=f"ids below {_FIRST_ID} are not used")

    @property
    def requests_each(self) -> int:
        """Requests of one conversation."""
        return self.num_turns // 2 * (1 + self.tool_calls)

    def turns(self, number: int) -> Iterator[Turn]:
        """Those of one conversation, the same for the same seed."""
        common, own = random.Random(f"{self.seed} common"), random.Random(f"{self.seed} {number}")

        def tokens(chance: random.Random, count: int) -> list[int]:
            return [chance.randrange(_FIRST_ID, self.vocab_size) for _ in range(count)]

        def wait(mean: float) -> float:
            return own.expovariate(1 / mean) if mean else 0.0

        before = tokens(common, self.common_prefix_num_tokens) + tokens(own, self.prefix_num_tokens)
        for message in range(self.num_turns // 2):
            yield Turn(before + tokens(own, self.input_len), wait(self.think_time) if message else 0.0)
            before = []
            for _ in range(self.tool_calls):
                yield Turn(tokens(own, self.tool_num_tokens), wait(self.tool_time))


Answered = Callable[[str], Awaitable[list[int]]]
"""The tokens of an answer's text."""


def run(url: str, key: str | None, conversations: Conversations, commit: str | None = None) -> report.Document:
    """Hold the conversations; returns the report. Raises EngineError when no server answers at `url`, RequestError when every
    request failed."""
    endpoint = ApiEndpoint.of(url, key)
    with asyncio.Runner(loop_factory=load.loop_factory()) as runner:
        model, samples, hits = runner.run(_drive(endpoint, conversations))
    everything = [sample for each in samples for sample in each]
    figures = load.require_some(load.summary(everything), endpoint)
    wanted = {name: value for name, value in vars(conversations).items() if value is not None}
    if conversations.rate is not None:
        wanted["rate"] = load.rate_as_json(conversations.rate)
    unsent = conversations.num_conversations * conversations.requests_each - len(everything)
    return {
        "about": provenance.collect(commit).as_json(),
        "asked": wanted | {"url": endpoint.base, "model": model},
        "results": {**figures, "unsent": unsent, "turns": by_turn(samples), "prefix_cache": hits},
    }


async def _drive(endpoint: ApiEndpoint, wanted: Conversations) -> tuple[str, list[list[Sample]], prefix_hits.Hits | None]:
    """The server's name of the model, the samples of each conversation, and what was found of the prompts."""
    model = wanted.model or await load.model_of(endpoint)
    limit = asyncio.Semaphore(wanted.concurrency or wanted.num_conversations)
    async with httpx.AsyncClient(base_url=endpoint.base, headers=endpoint.headers, timeout=wanted.timeout) as client:
        answered = partial(_tokens_of, client, model)
        await answered("a")  # a server without /tokenize is found before it is loaded

        active = wanted.max_active_conversations or wanted.num_conversations
        going = asyncio.Semaphore(active)

        async def one(number: int, _: float) -> list[Sample]:
            async with going:
                return await _converse(endpoint, model, wanted, number, limit, answered)

        before = await prefix_hits.read(client)
        if wanted.rate is None:
            samples = await load.closed_loop(one, wanted.num_conversations, active)
        else:
            samples = await load.open_loop(one, load.arrival_times(wanted.rate, wanted.num_conversations, wanted.seed))
        return model, samples, prefix_hits.between(before, await prefix_hits.read(client))


async def _converse(
    endpoint: ApiEndpoint, model: str, wanted: Conversations, number: int, limit: asyncio.Semaphore, answered: Answered
) -> list[Sample]:  # fmt: skip
    """The samples of one conversation, up to the first that failed."""
    text, samples = list[int](), list[Sample]()
    for turn in wanted.turns(number):
        await asyncio.sleep(turn.wait)
        text += turn.tokens
        body = body_of(model, text, wanted.output_len)
        async with limit:
            sample = await send(
                endpoint, body, due=time.perf_counter(), expected=wanted.output_len, timeout=wanted.timeout, keep_text=True
            )
        samples.append(sample)
        if not sample.ok:
            break
        try:
            answer = (await answered("".join(sample.texts)))[: wanted.output_len]
        except (httpx.HTTPError, RequestError) as error:
            samples.append(Sample(time.perf_counter(), error="its last answer was not tokenized", message=str(error)))
            break
        text += answer + [_FIRST_ID] * (wanted.output_len - len(answer))  # a text may be fewer tokens than it was made of
    return samples


async def _tokens_of(client: httpx.AsyncClient, model: str, text: str) -> list[int]:
    """Raises RequestError where the server has no /tokenize."""
    answer = await client.post("/tokenize", json={"model": model, "prompt": text, "add_special_tokens": False})
    try:
        return [int(token) for token in answer.raise_for_status().json()["tokens"]]
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise RequestError(
            "the server does not tokenize answers, so that no conversation can go on",
            held=f"POST {str(client.base_url).rstrip('/')}/tokenize", why=str(error).splitlines()[0],
            next="servers of Phalanx and vLLM do; give the URL that /v1 follows",
        ) from None  # fmt: skip


# ---- evaluation ------------------------------------------------------------------------------------------------------


def by_turn(samples: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
    """Of the requests with the same number in their conversations: how many were answered, their prompts' tokens and those of these
    that were found, as the server counts them (None where it does not say), and the time to their first token in ms."""
    rows = []
    for number in range(max((len(each) for each in samples), default=0)):
        good = [each[number] for each in samples if len(each) > number and each[number].ok and each[number].arrivals]
        cached = [sample.cached_tokens for sample in good]
        rows.append({
            "turn": number + 1, "completed": len(good), "prompt_tokens": sum(sample.prompt_tokens for sample in good),
            "cached_tokens": None if None in cached else sum(each or 0 for each in cached),
            "ttft_ms": load.percentiles([sample.arrivals[0] - sample.begin for sample in good]),
        })  # fmt: skip
    return rows


def tables(document: report.Document) -> list[Any]:
    """By turn, and of all requests."""
    settings, results = document["asked"], document["results"]
    tools = f", {settings['tool_calls']} calls of tools behind each message" if settings["tool_calls"] else ""
    title = f"{settings['num_conversations']} conversations of {settings['num_turns']} messages{tools}; first token by turn, ms"
    names = ["mean", *(f"p{percent}" for percent in load.PERCENTS), "max"]
    rows = []
    for each in results["turns"]:
        has_figure = each["cached_tokens"] is not None and each["prompt_tokens"]
        part = f"{each['cached_tokens'] / each['prompt_tokens']:.1%}" if has_figure else "-"
        mean = each["prompt_tokens"] / max(each["completed"], 1)
        figures = [f"{each['ttft_ms'][name]:.2f}" if each["ttft_ms"] else "-" for name in names]
        rows.append([str(each["turn"]), str(each["completed"]), f"{mean:,.0f}", part, *figures])
    unsent = f"{results['unsent']} requests were not sent, since one before them failed; " if results["unsent"] else ""
    caption = f"{unsent}{prefix_hits.text(results['prefix_cache'])}"
    work = f"{results['completed'] + results['failed']} requests of conversations, {settings['output_len']} out"
    return [
        report.table(title, ["turn", "requests", "prompt tokens", "found", *names], rows, caption),
        load.latency_table(document, work),
    ]
