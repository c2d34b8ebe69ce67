# SPDX-License-Identifier: Apache-2.0
"""A running OpenAI-compatible server under load: `phalanx bench serve`.

With a rate (open loop), requests are due at the times of a Poisson process, whatever the server does, and with a trace at those of
the trace. Their latencies count from then, so that a server that blocks its clients does not look fast. With a concurrency (closed
loop), each stream sends its next request when its last one has ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx

from phalanx.bench import prefix_hits, report
from phalanx.bench.streaming_client import ApiEndpoint, Sample, body_of, refusal, send
from phalanx.errors import EngineError, OptionError, RequestError
from phalanx.hardware import provenance
from phalanx.planner import arrivals
from phalanx.planner.arrivals import Arrival
from phalanx.planner.scenario import percentile
from phalanx.progress import OnProgress

PERCENTS = (50, 90, 95, 99)
_WARM_TOKENS = 8
_FIRST_ID = 3  # below it lie the ids that mark beginnings and ends

_NO_ROOFLINE = "roofline: unknown over HTTP; --offline takes a report of `phalanx bench throughput` on the same machine"

_KEY = "give the server's key with --api_key"

T = TypeVar("T")
SendOne = Callable[[int, float], Awaitable[T]]
"""Of a request or a conversation: its number, and when it is due -> what came of it."""


@dataclass(frozen=True)
class Load:
    """The load. rate: requests per second, inf for all at once. concurrency: streams. trace: a file as of `planner.arrivals`, whose
    first requests are sent. Exactly one of them is given, or a trace and a concurrency, which then counts instead of its times.

    speed: how many times as fast as in the trace requests come. shorten: how many times fewer tokens they have.

    length_range: prompts and outputs have a random number of tokens each, uniform from this part of input_len and output_len up to
    all of it; 1: all have as many. skip_first: requests that are sent first and count for throughput only: in a closed loop streams
    begin together, and come out of step by and by. vocab_size: prompts are random token ids from 3 up to it; every server's
    vocabulary has a few hundred. timeout: seconds of one request. model: by the server's name for it; None: the server's first
    model.
    """

    requests: int
    input_len: int
    output_len: int
    rate: float | None = None
    concurrency: int | None = None
    length_range: float = 1.0
    skip_first: int = 0
    seed: int = 0
    vocab_size: int = 256
    warmup: int = 1
    timeout: float = 600.0
    model: str | None = None
    trace: str | None = None
    speed: float = 1.0
    shorten: int = 1

    def __post_init__(self) -> None:
        if self.trace is not None:
            self._require_suits_trace()
        elif (self.rate is None) == (self.concurrency is None):
            raise OptionError(
                f"rate={self.rate} and concurrency={self.concurrency} do not say when requests are sent",
                why="exactly one of them is needed", next="give --rate or --concurrency, or a --trace",
            )  # fmt: skip
        if self.rate is not None and not self.rate > 0:
            raise OptionError(f"rate={self.rate} is not above 0", next="give requests per second, or inf")
        if not 0 < self.length_range <= 1:
            raise OptionError(f"length_range={self.length_range} is not above 0 and at most 1", next="0.8: from 80 to 100 percent")
        if self.skip_first >= self.requests:
            raise OptionError(
                f"skip_first={self.skip_first} leaves none of {self.requests} requests to measure", next="send more requests"
            )  # fmt: skip
        if self.vocab_size <= _FIRST_ID:
            raise OptionError(f"vocab_size={self.vocab_size} leaves no token ids", why=f"ids below {_FIRST_ID} are not used")

    def _require_suits_trace(self) -> None:
        if self.rate is not None or self.length_range != 1:
            raise OptionError(
                f"rate={self.rate} and length_range={self.length_range} do not apply to a trace",
                held=f"{self.trace} tells when requests come and how long they are", next="leave them out; --speed makes it faster",
            )  # fmt: skip
        if not 0 < self.speed < math.inf:
            raise OptionError(f"speed={self.speed} is not above 0", next="2: twice as fast as in the trace")

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """The requests of the trace; empty without one."""
        if self.trace is None:
            return []
        rows = arrivals.of(self.trace, isl=self.input_len, osl=self.output_len, requests=self.requests, seed=self.seed)
        return arrivals.shortened(arrivals.paced(rows, self.speed), self.shorten)

    def due(self) -> list[float] | None:
        """Seconds from the start at which requests are due; None in a closed loop."""
        if self.concurrency is not None:
            return None
        if self.trace is not None:
            return [each.at for each in self.arrivals]
        return arrival_times(self.rate or math.inf, self.requests, self.seed)

    def as_json(self) -> dict[str, Any]:
        """What was asked for; requests and lengths as the trace has them."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) is not None}
        if self.rate is not None:
            settings["rate"] = rate_as_json(self.rate)
        if self.trace is not None:
            longest = {name: max(getattr(each, name) for each in self.arrivals) for name in ("input_len", "output_len")}
            settings |= {"requests": len(self.arrivals), **longest}
        return settings

    def _of_content(self, arrival: Arrival, number: int) -> list[int]:
        """The token ids of a prompt of the trace: equal where its contents are."""
        contents = arrival.content or [f"request {number}"]
        length = arrival.hashed if arrival.content else arrival.input_len
        ids: list[int] = []
        for content in contents:
            ids += _random_tokens(f"{self.seed} {content}", length, self.vocab_size)
        return ids[: arrival.input_len]

    def prompts(self) -> list[list[int]]:
        if self.trace is not None:
            return [self._of_content(arrival, number) for number, arrival in enumerate(self.arrivals)]
        rng = random.Random(self.seed)
        lengths = self._lengths(self.input_len, "prompts")
        return [[rng.randrange(_FIRST_ID, self.vocab_size) for _ in range(length)] for length in lengths]

    def output_lens(self) -> list[int]:
        if self.trace is not None:
            return [arrival.output_len for arrival in self.arrivals]
        return self._lengths(self.output_len, "outputs")

    def _lengths(self, most: int, what: str) -> list[int]:
        rng = random.Random(f"{self.seed} {what}")
        return [rng.randint(max(1, round(self.length_range * most)), most) for _ in range(self.requests)]


@lru_cache(maxsize=4096)
def _random_tokens(seed: str, count: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(_FIRST_ID, vocab_size) for _ in range(count)]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which `count` requests are due: a Poisson process of this rate, the first at 0."""
    if math.isinf(rate):
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def run(
    url: str, key: str | None, load: Load, offline_file: Path | None = None, commit: str | None = None,
    on_progress: OnProgress | None = None,
) -> report.Document:  # fmt: skip
    """Drive the server; returns the report.

    offline_file: a report of `phalanx bench throughput` or `all` with the same numbers of requests and tokens. The server's
    throughput is compared with its figure and its roofline. (Over HTTP the layout is unknown, and so is the roofline.)
    Raises EngineError when no server answers at `url`, RequestError when every request failed, OptionError for a bad file.
    """
    endpoint = ApiEndpoint.of(url, key)
    offline = None if offline_file is None else offline_row(offline_file, load)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        model, samples, hits = runner.run(_drive(endpoint, load, on_progress))
    figures = require_some(summary(samples, load.skip_first), endpoint)
    return {
        "about": provenance.collect(commit).as_json(),
        "asked": load.as_json() | {"url": endpoint.base, "model": model},
        "results": {**figures, **relative_throughput(figures["output_tok_s"], offline), "prefix_cache": hits},
    }


def rate_as_json(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate


def require_some(figures: dict[str, Any], endpoint: ApiEndpoint) -> dict[str, Any]:
    """The figures of `summary`. Raises RequestError when every request failed."""
    if not figures["completed"]:
        messages = {error: f": {message}" for error, message in figures["said"].items()}
        errors = ", ".join(f"{error} ({count}){messages.get(error, '')}" for error, count in figures["errors"].items())
        raise RequestError(
            f"all {figures['failed']} requests to {endpoint.base} failed", why=errors,
            next=_KEY if {"status 401", "status 403"} & figures["errors"].keys() else "",
        )  # fmt: skip
    return figures


def offline_row(path: Path, load: Load) -> dict[str, Any]:
    """The row of an offline report with the same work. Raises OptionError."""
    workload = f"batch-{load.requests}x{load.input_len}x{load.output_len}"
    failure = f"the offline report {path} cannot be used"
    if load.trace is not None:
        raise OptionError(failure, why="the requests of a trace have lengths of their own", next="leave out --offline or --trace")
    if load.length_range < 1:
        raise OptionError(failure, why="its requests all have as many tokens", next="leave out --offline or --length_range")
    cure = f"make one with `phalanx bench throughput --workload {workload} --json FILE`"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["results"]
        matching = [
            row for row in rows
            if (row["requests"], row["input_len"], row["output_len"]) == (load.requests, load.input_len, load.output_len)
            and "roof_tok_s" in row
        ]  # fmt: skip
    except OSError as error:
        raise OptionError(failure, why=error.strerror or str(error), next=cure) from None
    except (ValueError, LookupError, TypeError):
        raise OptionError(failure, held="it is not a report of `phalanx bench throughput` or `all`", next=cure) from None
    if not matching:
        raise OptionError(failure, held=f"it has no {workload}", next=cure)
    row: dict[str, Any] = matching[0]
    return row


def relative_throughput(rate: float, offline: dict[str, Any] | None) -> dict[str, float | None]:
    """The server's throughput as fractions of the offline figure and of its roofline; None where they are unknown."""
    offline_rate = offline["output_tok_s"] if offline else None
    roofline_rate = offline["roof_tok_s"] if offline else None
    return {
        "fraction_of_offline": rate / offline_rate if offline_rate else None,
        "fraction_of_roof": rate / roofline_rate if roofline_rate else None,
    }


async def _drive(
    endpoint: ApiEndpoint, load: Load, on_progress: OnProgress | None
) -> tuple[str, list[Sample], prefix_hits.Hits | None]:
    model = load.model or await model_of(endpoint)
    prompts, output_lens = load.prompts(), load.output_lens()

    async def one(number: int, due: float, most: int = 1 << 62) -> Sample:
        tokens = min(most, output_lens[number])
        body = body_of(model, prompts[number], tokens)
        return await send(endpoint, body, due=due, expected=tokens, timeout=load.timeout)

    ended = 0

    async def counted(number: int, due: float) -> Sample:
        nonlocal ended
        sample = await one(number, due)
        ended += 1
        if on_progress is not None:
            on_progress(ended, len(prompts), "requests")
        return sample

    warm = range(min(load.warmup, len(prompts)))
    await asyncio.gather(*(one(number, time.perf_counter(), _WARM_TOKENS) for number in warm))
    async with httpx.AsyncClient(base_url=endpoint.base, headers=endpoint.headers, timeout=10.0) as client:
        before, due = await prefix_hits.read(client), load.due()
        if due is None:
            samples = await closed_loop(counted, len(prompts), load.concurrency or 1)
        else:
            samples = await open_loop(counted, due)
        return model, samples, prefix_hits.between(before, await prefix_hits.read(client))


async def open_loop(one: SendOne[T], due: Sequence[float]) -> list[T]:
    begin = time.perf_counter()

    async def at(number: int) -> T:
        await asyncio.sleep(max(0.0, begin + due[number] - time.perf_counter()))
        return await one(number, begin + due[number])

    return await asyncio.gather(*(at(number) for number in range(len(due))))


async def closed_loop(one: SendOne[T], requests: int, concurrency: int) -> list[T]:
    """The samples in the order in which requests were sent."""
    numbers, samples = iter(range(requests)), dict[int, T]()

    async def stream() -> None:
        for number in numbers:
            samples[number] = await one(number, time.perf_counter())

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return [samples[number] for number in range(requests)]


async def model_of(endpoint: ApiEndpoint) -> str:
    """The first model that the server names. Raises EngineError where no server answers, RequestError where it names none."""
    try:
        async with httpx.AsyncClient(base_url=endpoint.base, headers=endpoint.headers, timeout=10.0) as client:
            answer = await client.get("/v1/models")
    except httpx.TransportError as error:
        failure = f"no server answers at {endpoint.base}"
        raise EngineError(failure, why=f"{type(error).__name__}: {error}", next="start it with `phalanx serve`") from None
    failure = f"{endpoint.base} does not list its models"
    cure = "name the model with --model, and give the URL that /v1 follows"
    if answer.status_code != 200:
        cure = _KEY if answer.status_code in (401, 403) else cure
        raise RequestError(failure, held=f"it answered with status {answer.status_code}", why=refusal(answer.content), next=cure)
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise RequestError(failure, held="its answer names none", why=refusal(answer.content), next=cure) from None


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# ---- evaluation ------------------------------------------------------------------------------------------------------


def summary(samples: Sequence[Sample], skip: int = 0) -> dict[str, Any]:
    """Percentiles over the requests that were answered completely, without the first `skip`; the others are counted by error.

    ttft: due to first event. itl: between events of one stream, over all streams. tpot: per request, last event less first, over
    the tokens after the first. e2e: due to end. All in ms. output_tok_s: tokens of complete answers, over first due to last end.
    said: by error, the server's message for the first such request, where there is one.
    """
    good = [sample for sample in samples if sample.ok and sample.arrivals]
    errors = Counter(sample.error or "no tokens" for sample in samples if not (sample.ok and sample.arrivals))
    messages = {str(sample.error): sample.message for sample in reversed(samples) if sample.message}
    span = max((s.end for s in samples), default=0.0) - min((s.begin for s in samples), default=0.0)
    tokens = sum(sample.completion_tokens for sample in good)
    timed = [sample for sample in samples[skip:] if sample.ok and sample.arrivals]
    times = {
        "ttft_ms": [sample.arrivals[0] - sample.begin for sample in timed],
        "itl_ms": [later - earlier for sample in timed for earlier, later in pairwise(sample.arrivals)],
        "tpot_ms": [
            (sample.arrivals[-1] - sample.arrivals[0]) / (sample.completion_tokens - 1)
            for sample in timed
            if sample.completion_tokens > 1
        ],
        "e2e_ms": [sample.end - sample.begin for sample in timed],
    }
    return {
        "completed": len(good), "failed": len(samples) - len(good), "errors": dict(errors.most_common()),
        "said": {error: messages[error] for error in errors if error in messages}, "seconds": span,
        "output_tok_s": tokens / span if span > 0 else 0.0, "requests_s": len(good) / span if span > 0 else 0.0,
        "output_tokens": tokens, **{name: percentiles(values) for name, values in times.items()},
    }  # fmt: skip


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in ms; None for no values."""
    if not seconds:
        return None
    figures = {
        "mean": sum(seconds) / len(seconds),
        **{f"p{p}": percentile(seconds, p / 100) for p in PERCENTS},
        "max": max(seconds),
    }
    return {name: 1e3 * value for name, value in figures.items()}


def table(document: report.Document) -> Any:
    load, figures = document["asked"], document["results"]
    if load.get("rate") is not None:
        how = f"{load['rate']} requests/s"
    else:
        how = f"{load['concurrency']} streams" if load.get("concurrency") is not None else f"times {load['speed']:g} the trace's"
    part = load.get("length_range", 1.0)
    lengths = "" if part == 1 else f", each {part:.0%} to 100% of that"
    skipped = f", latencies without the first {load['skip_first']}" if load.get("skip_first") else ""
    longest = f", at most, of {load['trace']}" if load.get("trace") is not None else ""
    work = f"{load['requests']} x {load['input_len']} in / {load['output_len']} out{longest}{lengths}{skipped}"
    fractions = [figures["fraction_of_offline"], figures["fraction_of_roof"]]
    shown = "of the offline figure {}, of its roofline {}".format(*map(report.percent_text, fractions))
    captions = [prefix_hits.text(figures["prefix_cache"]), shown if fractions[0] else _NO_ROOFLINE]
    return latency_table(document, f"{work}, {how}", "\n".join(captions))


def latency_table(document: report.Document, work: str, caption: str = "") -> Any:
    """The latencies of `summary`, and its figures with more of a caption."""
    figures = document["results"]
    names = ["mean", *(f"p{p}" for p in PERCENTS), "max"]
    titles = {"ttft_ms": "first token", "itl_ms": "between events", "tpot_ms": "per token, of a request", "e2e_ms": "whole request"}
    rows = [
        [text, *(f"{figures[name][column]:.2f}" if figures[name] else "-" for column in names)] for name, text in titles.items()
    ]  # fmt: skip
    errors = "".join(f"; {count} x {error}" for error, count in figures["errors"].items())
    messages = "".join(f"\n{error}: {message}" for error, message in figures["said"].items())
    total = (
        f"{figures['output_tok_s']:,.0f} output tok/s, {figures['requests_s']:.2f} requests/s over {figures['seconds']:.1f} s; "
        f"{figures['completed']} complete, {figures['failed']} failed{errors}{messages}"
    )
    title = f"{document['asked']['model']} at {document['asked']['url']}: {work}; ms"
    return report.table(title, ["", *names], rows, f"{total}\n{caption}" if caption else total)
