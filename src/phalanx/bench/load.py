# SPDX-License-Identifier: Apache-2.0
"""A running OpenAI-compatible server under load: `phalanx bench serve`.

At a rate (open loop) requests are due at the times of a Poisson process, whatever the server does, and their times count from then,
so that a server that holds up its clients does not look fast. At a concurrency (closed loop) each stream sends its next request
when its last has ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from phalanx.bench import report
from phalanx.bench.streaming_client import Endpoint, Sample, body_of, refusal, send
from phalanx.errors import EngineError, OptionError, RequestError
from phalanx.hardware import provenance

PERCENTS = (50, 90, 95, 99)
_WARM_TOKENS = 8
_FIRST_ID = 3  # below it lie the ids that mark beginnings and ends

_NO_ROOF = "roof: not known over HTTP; --offline takes a report of `phalanx bench throughput` on the same machine"

_KEY = "give the server's key by --api_key"

One = Callable[[int, float], Awaitable[Sample]]


@dataclass(frozen=True)
class Load:
    """What the server is asked for. rate: requests per second, inf for all at once; concurrency: streams; one of them is given.

    vocab_size: prompts are random ids from 3 up to it; every server's vocabulary holds a few hundred. timeout: seconds of one
    request. model: as the server calls it; None: its first.
    """

    requests: int
    input_len: int
    output_len: int
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0
    vocab_size: int = 256
    warmup: int = 1
    timeout: float = 600.0
    model: str | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise OptionError(
                f"rate={self.rate} and concurrency={self.concurrency} were asked for",
                why="one of them says when requests are sent", next="give --rate or --concurrency",
            )  # fmt: skip
        if self.rate is not None and not self.rate > 0:
            raise OptionError(f"rate={self.rate} was asked for", why="it is a number of requests per second above 0, or inf")
        if self.vocab_size <= _FIRST_ID:
            raise OptionError(f"vocab_size={self.vocab_size} was asked for", why=f"ids below {_FIRST_ID} are left out")

    def prompts(self) -> list[list[int]]:
        chance = random.Random(self.seed)
        return [[chance.randrange(_FIRST_ID, self.vocab_size) for _ in range(self.input_len)] for _ in range(self.requests)]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the begin at which `count` requests are due: a Poisson process of this rate, the first at 0."""
    if math.isinf(rate):
        return [0.0] * count
    chance, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += chance.expovariate(rate)
    return found


def run(url: str, key: str | None, load: Load, offline_file: Path | None = None, commit: str | None = None) -> report.Document:
    """Drive the server, and report.

    offline_file: a report of `phalanx bench throughput` or `all` with the same numbers of requests and tokens; its figure and its
    roof are what the server's throughput is set against. (Over HTTP nobody knows the layout, and so the roof.)
    Raises EngineError when nobody answers at `url`, RequestError when nothing was answered well, OptionError for a bad file.
    """
    endpoint = Endpoint.of(url, key)
    offline = None if offline_file is None else offline_row(offline_file, load)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        model, samples = runner.run(_drive(endpoint, load))
    figures = summary(samples)
    if not figures["completed"]:
        said = {error: f": {words}" for error, words in figures["said"].items()}
        errors = ", ".join(f"{error} ({count}){said.get(error, '')}" for error, count in figures["errors"].items())
        raise RequestError(
            f"{load.requests} requests were sent to {endpoint.base}", held="none was answered", why=errors,
            next=_KEY if {"status 401", "status 403"} & figures["errors"].keys() else "",
        )  # fmt: skip
    asked = {name: value for name, value in vars(load).items() if value is not None} | {"url": endpoint.base, "model": model}
    if load.rate is not None:
        asked["rate"] = "inf" if math.isinf(load.rate) else load.rate
    return {
        "about": provenance.collect(commit).as_json(),
        "asked": asked,
        "results": {**figures, **relative_throughput(figures["output_tok_s"], offline)},
    }


def offline_row(path: Path, load: Load) -> dict[str, Any]:
    """The row of an offline report that did the same work. Raises OptionError."""
    workload = f"batch-{load.requests}x{load.input_len}x{load.output_len}"
    asked = f"the offline report {path} was asked for"
    cure = f"make one with `phalanx bench throughput --workload {workload} --json FILE`"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]
        found = [
            row for row in rows
            if (row["requests"], row["input_len"], row["output_len"]) == (load.requests, load.input_len, load.output_len)
            and "roof_tok_s" in row
        ]  # fmt: skip
    except OSError as error:
        raise OptionError(asked, why=error.strerror or str(error), next=cure) from None
    except (ValueError, LookupError, TypeError):
        raise OptionError(asked, held="that is no report of `phalanx bench throughput` or `all`", next=cure) from None
    if not found:
        raise OptionError(asked, held=f"it has no {workload}", next=cure)
    row: dict[str, Any] = found[0]
    return row


def relative_throughput(rate: float, offline: dict[str, Any] | None) -> dict[str, float | None]:
    """The server's throughput as fractions of the offline figure and of its roof; None where they are not known."""
    offline_rate = offline["output_tok_s"] if offline else None
    roof = offline["roof_tok_s"] if offline else None
    return {"fraction_of_offline": rate / offline_rate if offline_rate else None, "fraction_of_roof": rate / roof if roof else None}


async def _drive(endpoint: Endpoint, load: Load) -> tuple[str, list[Sample]]:
    model = load.model or await _model_of(endpoint)
    prompts = load.prompts()

    async def one(number: int, due: float, tokens: int = load.output_len) -> Sample:
        body = body_of(model, prompts[number], tokens)
        return await send(endpoint, body, due=due, expected=tokens, timeout=load.timeout)

    warm = range(min(load.warmup, load.requests))
    await asyncio.gather(*(one(number, time.perf_counter(), min(_WARM_TOKENS, load.output_len)) for number in warm))
    if load.rate is not None:
        return model, await open_loop(one, arrival_times(load.rate, load.requests, load.seed))
    assert load.concurrency is not None
    return model, await closed_loop(one, load.requests, load.concurrency)


async def open_loop(one: One, due: Sequence[float]) -> list[Sample]:
    begin = time.perf_counter()

    async def at(number: int) -> Sample:
        await asyncio.sleep(max(0.0, begin + due[number] - time.perf_counter()))
        return await one(number, begin + due[number])

    return await asyncio.gather(*(at(number) for number in range(len(due))))


async def closed_loop(one: One, requests: int, concurrency: int) -> list[Sample]:
    numbers, samples = iter(range(requests)), []

    async def stream() -> None:
        for number in numbers:
            samples.append(await one(number, time.perf_counter()))

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return samples


async def _model_of(endpoint: Endpoint) -> str:
    """The first model that the server names. Raises EngineError where nobody answers, RequestError where it names none."""
    asked = f"{endpoint.base} was asked for its models"
    try:
        async with httpx.AsyncClient(base_url=endpoint.base, headers=endpoint.headers, timeout=10.0) as client:
            answer = await client.get("/v1/models")
    except httpx.TransportError as error:
        raise EngineError(asked, held=f"{type(error).__name__}: {error}", next="start it with `phalanx serve`") from None
    name = "name the model by --model, and the URL that /v1 follows"
    if answer.status_code != 200:
        next_move = _KEY if answer.status_code in (401, 403) else name
        raise RequestError(asked, held=f"it answered with status {answer.status_code}", why=refusal(answer.content), next=next_move)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RequestError(asked, held="its answer names none", why=refusal(answer.content), next=name) from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# ---- what it means ---------------------------------------------------------------------------------------------------


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Percentiles over the requests that were answered whole; the others are counted by what went wrong with them.

    ttft: due to first event. itl: between events of one stream, over all streams. tpot: per request, last event less first, over
    the tokens after the first. e2e: due to end. All in ms. output_tok_s: tokens of whole answers, over first due to last end.
    said: for what went wrong, the server's words about it, where it has any; those of the first such request.
    """
    good = [sample for sample in samples if sample.ok and sample.arrivals]
    errors = Counter(sample.error or "no tokens" for sample in samples if not (sample.ok and sample.arrivals))
    said = {str(sample.error): sample.said for sample in reversed(samples) if sample.said}
    span = max((s.end for s in samples), default=0.0) - min((s.begin for s in samples), default=0.0)
    tokens = sum(sample.completion_tokens for sample in good)
    times = {
        "ttft_ms": [sample.arrivals[0] - sample.begin for sample in good],
        "itl_ms": [later - earlier for sample in good for earlier, later in pairwise(sample.arrivals)],
        "tpot_ms": [
            (sample.arrivals[-1] - sample.arrivals[0]) / (sample.completion_tokens - 1)
            for sample in good
            if sample.completion_tokens > 1
        ],
        "e2e_ms": [sample.end - sample.begin for sample in good],
    }
    return {
        "completed": len(good), "failed": len(samples) - len(good), "errors": dict(errors.most_common()),
        "said": {error: said[error] for error in errors if error in said}, "seconds": span,
        "output_tok_s": tokens / span if span > 0 else 0.0, "requests_s": len(good) / span if span > 0 else 0.0,
        "output_tokens": tokens, **{name: spread(values) for name, values in times.items()},
    }  # fmt: skip


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in ms; None of nothing."""
    if not seconds:
        return None
    found = {"mean": sum(seconds) / len(seconds), **{f"p{p}": report.percentile(seconds, p) for p in PERCENTS}, "max": max(seconds)}
    return {name: 1e3 * value for name, value in found.items()}


def table(document: report.Document) -> Any:
    asked, figures = document["asked"], document["results"]
    names = ["mean", *(f"p{p}" for p in PERCENTS), "max"]
    words = {"ttft_ms": "first token", "itl_ms": "between events", "tpot_ms": "per token, of a request", "e2e_ms": "whole request"}
    rows = [
        [text, *(f"{figures[name][column]:.2f}" if figures[name] else "-" for column in names)] for name, text in words.items()
    ]  # fmt: skip
    how = f"{asked['rate']} requests/s" if asked.get("rate") is not None else f"{asked['concurrency']} streams"
    title = (
        f"{asked['model']} at {asked['url']}: {asked['requests']} x {asked['input_len']} in / {asked['output_len']} out, {how}; ms"
    )
    errors = "".join(f"; {count} x {error}" for error, count in figures["errors"].items())
    said = "".join(f"\n{error}: {words}" for error, words in figures["said"].items())
    shares = [figures["fraction_of_offline"], figures["fraction_of_roof"]]
    roof = "of the offline figure {}, of its roof {}".format(*map(report.percent_text, shares)) if shares[0] else _NO_ROOF
    caption = (
        f"{figures['output_tok_s']:,.0f} output tok/s, {figures['requests_s']:.2f} requests/s over {figures['seconds']:.1f} s; "
        f"{figures['completed']} whole, {figures['failed']} failed{errors}{said}\n{roof}"
    )
    return report.table(title, ["", *names], rows, caption)
