# SPDX-License-Identifier: Apache-2.0
"""`phalanx monitor`: running servers as `top` shows a machine, from their /metrics alone.

A frame is data made of two scrapes; `render` draws it. Rates and quantiles are those of the time between the two, but for first
tokens: few come in two seconds, so theirs are of the last minute. `monitor_live` draws frames again and again, and reads keys.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.health.check import size
from phalanx.health.servers import TIMEOUT, Histogram, Scrape, authorization, failure_text, parse

LOW_UTILIZATION = 50.0
"""Percent under load: below it, GPUs wait."""
IDLE_NVLINK = 1e9
"""Bytes per second in both directions, below which NVLink counts as idle while all-reduces run."""
UNEVEN_MEMORY = 0.25
UNEVEN_EXPERTS = 2.0
FULL_KV = 0.95
FULL_QUEUE = 0.8
MIN_STEPS = 20
FIRST_TOKENS = "time_to_first_token_seconds"
MINUTE = 60.0
"""Seconds over which the times of first tokens are shown."""
HISTORY = 60
"""Readings whose tokens per second are drawn."""
_BARS = "▁▂▃▄▅▆▇█"
_HOT = {"thermal", "hardware_thermal"}
"""Reasons of NVML for a lower clock."""


@dataclass(frozen=True)
class Warned:
    """Something to act on, and the remedy."""

    what: str
    remedy: str


@dataclass(frozen=True)
class RankView:
    """One rank and its device. memory: bytes by kind. None: the server does not export it (no GPU, or NVML refuses)."""

    rank: str
    memory: dict[str, int]
    utilization: float | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    clock: float | None = None
    nvlink: dict[str, float] = field(default_factory=dict)
    slowed_by: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        return sum(count for kind, count in self.memory.items() if kind not in ("total", "capacity"))


@dataclass(frozen=True)
class ServerView:
    """One server. Rates are per second; latencies in seconds; None where nothing happened, or the series is missing.

    ttft: of the last minute. history: `generated_per_s` of the last readings, the newest one last.
    """

    url: str
    failure: str = ""
    model: str = ""
    generated_per_s: float | None = None
    prompted_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    queued: float | None = None
    queue_limit: float | None = None
    kv_used: float | None = None
    prefix_hits: float | None = None
    preempted_per_s: float | None = None
    refused_per_s: float | None = None
    ttft: dict[str, float] = field(default_factory=dict)
    tpot: dict[str, float] = field(default_factory=dict)
    strategies: dict[str, float] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    experts: float | None = None
    ranks: tuple[RankView, ...] = ()
    warnings: tuple[Warned, ...] = ()
    history: tuple[float, ...] = ()

    @property
    def queue_used(self) -> float | None:
        return (self.queued or 0.0) / self.queue_limit if self.queue_limit else None


@dataclass(frozen=True)
class Frame:
    """What is shown at one time."""

    servers: tuple[ServerView, ...]
    seconds: float

    @property
    def generated_per_s(self) -> float:
        return sum(server.generated_per_s or 0.0 for server in self.servers)


class ServerWatch:
    """Reads servers again and again. Of each it keeps the last two readings, the first tokens of a minute, and past rates."""

    def __init__(self, urls: Sequence[str], *, client: httpx.Client | None = None) -> None:
        self.urls = list(urls)
        self._client = client or httpx.Client(timeout=TIMEOUT, trust_env=False, headers=authorization())
        self._scrapes: dict[str, list[Scrape]] = {url: [] for url in self.urls}
        self._failures: dict[str, str] = {}
        self._first_tokens: dict[str, deque[tuple[float, Histogram]]] = {url: deque() for url in self.urls}
        self._history: dict[str, deque[float]] = {url: deque(maxlen=HISTORY) for url in self.urls}

    @property
    def reached(self) -> bool:
        """Whether every server answered the last time."""
        return not self._failures

    def __enter__(self) -> ServerWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def read(self) -> None:
        """One scrape of each server. A server that does not answer is shown as such."""
        for url in self.urls:
            try:
                answer = self._client.get(f"{url}/metrics")
                answer.raise_for_status()
                scrape = parse(answer.text, time.monotonic())
            except (httpx.HTTPError, ValueError) as error:
                self._failures[url] = failure_text(error)
                self._scrapes[url] = []
                self._first_tokens[url].clear()
            else:
                self._failures.pop(url, None)
                self._keep(url, scrape)

    def _keep(self, url: str, scrape: Scrape) -> None:
        scrapes = self._scrapes[url] = [*self._scrapes[url][-1:], scrape]
        rate = _rate(scrapes[0], scrape, "generation_tokens_total", scrape.at - scrapes[0].at)
        if rate is not None:
            self._history[url].append(rate)
        tokens = self._first_tokens[url]
        if FIRST_TOKENS in scrape.histograms:
            tokens.append((scrape.at, scrape.histograms[FIRST_TOKENS]))
        while len(tokens) > 1 and tokens[1][0] <= scrape.at - MINUTE:
            tokens.popleft()

    def frame(self) -> Frame:
        views = []
        seconds = 0.0
        for url in self.urls:
            scrapes = self._scrapes[url]
            if url in self._failures or not scrapes:
                views.append(ServerView(url, self._failures.get(url, "not read yet")))
                continue
            seconds = max(seconds, scrapes[-1].at - scrapes[0].at)
            try:
                minute_ago = next((histogram for _, histogram in self._first_tokens[url]), None)
                server = view(url, scrapes[0], scrapes[-1], minute_ago)
                views.append(dataclasses.replace(server, history=tuple(self._history[url])))
            except (ValueError, ArithmeticError) as error:  # of this server alone: the others are shown
                views.append(ServerView(url, f"its metrics are not understood: {type(error).__name__}: {error}"))
        return Frame(tuple(views), seconds)


def view(url: str, first: Scrape, last: Scrape, minute_ago: Histogram | None = None) -> ServerView:
    """A server between two scrapes; the same one twice gives gauges and no rates. minute_ago: the first tokens until then; None:
    those of `first`."""
    seconds = last.at - first.at
    looked_up = _rise(first, last, "prefix_cache_queries_total")
    hits = _rise(first, last, "prefix_cache_hits_total")
    calls = {
        strategy: _rise(first, last, "allreduce_calls_total", strategy=strategy) or 0.0
        for (strategy,) in last.by("allreduce_calls_total", "strategy")
    }
    steps = {kind: _rise(first, last, "steps_total", kind=kind) or 0.0 for (kind,) in last.by("steps_total", "kind")}
    server = ServerView(
        url,
        "",
        last.model,
        _rate(first, last, "generation_tokens_total", seconds),
        _rate(first, last, "prompt_tokens_total", seconds),
        last.value("num_requests_running"),
        last.value("num_requests_waiting"),
        last.value("num_requests_queued"),
        last.value("queue_limit", kind="requests"),
        last.value("kv_cache_usage_perc"),
        hits / looked_up if looked_up and hits is not None else None,
        _rate(first, last, "num_preemptions_total", seconds),
        _rate(first, last, "request_refused_total", seconds),
        _latency(first, last, FIRST_TOKENS, minute_ago),
        _latency(first, last, "inter_token_latency_seconds"),
        _shares(calls),
        steps,
        _expert_imbalance(first, last),
        _ranks(first, last, seconds),
    )
    return dataclasses.replace(server, warnings=tuple(warnings_of(server, calls)))


def _rise(first: Scrape, last: Scrape, stem: str, **labels: str) -> float | None:
    """By how much a counter rose; all of it where the server was restarted in between; None where there is no such series."""
    before, after = first.value(stem, **labels), last.value(stem, **labels)
    if after is None or first is last:
        return None
    return after - before if before is not None and after >= before else after


def _rate(first: Scrape, last: Scrape, stem: str, seconds: float, **labels: str) -> float | None:
    rise = _rise(first, last, stem, **labels)
    return None if rise is None or seconds <= 0 else rise / seconds


def _latency(first: Scrape, last: Scrape, name: str, before: Histogram | None = None) -> dict[str, float]:
    """Quantiles of what came after `before`, or after the first scrape."""
    histogram = last.histograms.get(name)
    if histogram is None or first is last:
        return {}
    between = histogram.since(before or first.histograms.get(name))
    quantiles = {"p50": between.quantile(0.5), "p90": between.quantile(0.9), "p99": between.quantile(0.99)}
    return {label: value for label, value in quantiles.items() if value is not None}


def _shares(calls: dict[str, float]) -> dict[str, float]:
    total = sum(calls.values())
    return {name: count / total for name, count in calls.items() if count} if total else {}


def _expert_imbalance(first: Scrape, last: Scrape) -> float | None:
    """Tokens of the busiest expert over the mean; None for a model without experts."""
    rises = [
        _rise(first, last, "expert_tokens_total", expert=expert) or 0.0 for (expert,) in last.by("expert_tokens_total", "expert")
    ]
    return max(rises) * len(rises) / sum(rises) if rises and sum(rises) else None


def _ranks(first: Scrape, last: Scrape, seconds: float) -> tuple[RankView, ...]:
    memory: dict[str, dict[str, int]] = {}
    for (rank, kind), count in last.by("rank_memory_bytes", "rank", "kind").items():
        memory.setdefault(rank, {})[kind] = int(count)
    views = []
    for rank in sorted(memory, key=_place):
        nvlink = {way: _rate(first, last, "rank_nvlink_bytes_total", seconds, rank=rank, direction=way) for way in ("tx", "rx")}
        slowed = tuple(
            reason
            for (number, reason), on in sorted(last.by("rank_clock_reason", "rank", "reason").items())
            if number == rank and on
        )
        views.append(
            RankView(
                rank,
                memory[rank],
                last.value("rank_gpu_utilization_perc", rank=rank),
                last.value("rank_power_watts", rank=rank),
                last.value("rank_power_limit_watts", rank=rank),
                last.value("rank_temperature_celsius", rank=rank),
                last.value("rank_sm_clock_mhz", rank=rank),
                {way: rate for way, rate in nvlink.items() if rate is not None},
                slowed,
            )
        )
    return tuple(views)


def _place(rank: str) -> list[tuple[int, str]]:
    """The order of ranks: 2 before 10, and those of the first engine before "1.0", which is rank 0 of engine 1."""
    numbers = rank.split(".")
    return [(len(numbers), ""), *((int(part), "") if part.isdecimal() else (0, part) for part in numbers)]


def warnings_of(server: ServerView, calls: dict[str, float]) -> list[Warned]:
    """Pure: what a view shows that somebody should act on."""
    warned = []
    used = {rank.rank: rank.used for rank in server.ranks}
    if len(used) > 1 and max(used.values()) - min(used.values()) > UNEVEN_MEMORY * max(used.values()):
        fullest, emptiest = max(used, key=lambda rank: used[rank]), min(used, key=lambda rank: used[rank])
        what = f"memory is uneven: rank {fullest} has {size(used[fullest])}, rank {emptiest} {size(used[emptiest])}"
        warned.append(Warned(what, "check tp_size and pp_size, then restart"))
    if server.preempted_per_s:
        warned.append(
            Warned(
                f"{server.preempted_per_s:.1f} sequences a second are preempted",
                "more KV memory: kv_cache_dtype=fp8, or a smaller max_batch_size",
            )
        )
    elif (server.kv_used or 0) >= FULL_KV and server.waiting:
        warned.append(
            Warned(
                f"the KV cache is {server.kv_used:.0%} full, and {server.waiting:.0f} requests wait",
                "kv_cache_dtype=fp8, more GPUs, or a replica",
            )
        )
    if server.refused_per_s:
        warned.append(
            Warned(f"{server.refused_per_s:.1f} requests a second are refused", "add a replica, or raise max_num_queued_reqs")
        )
    elif (server.queue_used or 0.0) >= FULL_QUEUE:
        warned.append(Warned(f"{server.queued:.0f} of {server.queue_limit:.0f} places of the queue are taken", "add a replica"))
    if sum(server.steps.values()) >= MIN_STEPS:
        warned += _warnings_of_devices(server, calls)
    if server.experts is not None and server.experts > UNEVEN_EXPERTS:
        warned.append(
            Warned(
                f"the busiest expert gets {server.experts:.1f} times the mean",
                "see `phalanx experts URL`, and move experts: POST /experts/rebalance",
            )
        )
    return warned


def _warnings_of_devices(server: ServerView, calls: dict[str, float]) -> list[Warned]:
    """Of a server that computes: an idle one has idle devices."""
    warned = []
    idle = [rank.rank for rank in server.ranks if _waits(server, rank)]
    if idle:
        what = f"rank {', '.join(idle)} is used below {LOW_UTILIZATION:.0f} percent, and {server.waiting:.0f} requests wait"
        warned.append(Warned(what, "look at cores for the ranks and the server: `phalanx doctor URL`"))
    silent = [rank.rank for rank in server.ranks if rank.nvlink and sum(rank.nvlink.values()) < IDLE_NVLINK]
    if sum(calls.values()) and silent and len(silent) == len(server.ranks):
        warned.append(
            Warned("NVLink is idle while all-reduces run", "they go over PCIe: `phalanx topo`, `nvidia-smi nvlink --status`")
        )
    for rank in server.ranks:
        if _HOT & set(rank.slowed_by):
            warned.append(
                Warned(
                    f"rank {rank.rank} is slowed down by heat ({rank.temperature or 0:.0f} degrees)", "look at fans and air flow"
                )
            )
        if "power_brake" in rank.slowed_by:
            warned.append(Warned(f"rank {rank.rank} is slowed down by its power supply", "look at the machine's supplies"))
    clocks = {rank.rank: rank.clock for rank in server.ranks if rank.clock is not None}
    if len(clocks) > 1 and min(clocks.values()) < 0.8 * max(clocks.values()):
        slowest = min(clocks, key=lambda rank: clocks[rank])
        warned.append(
            Warned(
                f"rank {slowest} runs at {clocks[slowest]:.0f} MHz, another at {max(clocks.values()):.0f}",
                "`phalanx doctor`: power limits, heat, clocks",
            )
        )
    if (eager := server.steps.get("eager", 0.0)) and any(rank.memory.get("graphs") for rank in server.ranks):
        share = eager / sum(server.steps.values())
        if share > 0.5:
            warned.append(Warned(f"{share:.0%} of the steps ran without a graph", "raise max_num_tokens for long prompts"))
    return warned


def render(frame: Frame) -> RenderableType:
    """Draw a frame: one table of servers, one of ranks, and the warnings."""
    parts: list[RenderableType] = [_server_table(frame)]
    for server in frame.servers:
        if server.ranks:
            parts.append(_rank_table(server))
        mix = [f"{name} {share:.0%}" for name, share in sorted(server.strategies.items(), key=lambda entry: -entry[1])]
        if mix:
            parts.append(Text(f"{_short(server.url)}: all-reduces {', '.join(mix)}"))
        if len(server.history) > 1:
            parts.append(_curve(server))
        if server.experts is not None:
            parts.append(Text(f"{_short(server.url)}: the busiest expert gets {server.experts:.2f} times the mean"))
    warned = [(server.url, entry) for server in frame.servers for entry in server.warnings]
    parts += [Text.assemble(("! ", "yellow"), f"{_short(url)}: {entry.what}: ", (entry.remedy, "cyan")) for url, entry in warned]
    total = f"; {frame.generated_per_s:,.0f} tokens/s over {len(frame.servers)} servers" if len(frame.servers) > 1 else ""
    parts.append(Text(f"over {frame.seconds:.1f} s, TTFT over a minute{total}", "dim"))
    return Group(*parts)


def _server_table(frame: Frame) -> Table:
    table = Table(
        "server",
        "model",
        "tokens/s",
        "prompt/s",
        "run",
        "wait",
        "queue",
        "KV",
        "hits",
        "TTFT p50/p99",
        "TPOT p50/p99",
        box=None,
        pad_edge=False,
    )
    for server in frame.servers:
        if server.failure:
            table.add_row(_short(server.url), Text(f"does not answer: {server.failure}", "red"))
            continue
        queue = _number(server.queued) + (f"/{server.queue_limit:.0f}" if server.queue_limit else "")
        table.add_row(
            _short(server.url),
            server.model,
            _number(server.generated_per_s),
            _number(server.prompted_per_s),
            _number(server.running),
            _number(server.waiting),
            Text(queue, _heat(server.queue_used, FULL_QUEUE)),
            Text(_percent(server.kv_used), _heat(server.kv_used, FULL_KV)),
            _percent(server.prefix_hits),
            _milliseconds(server.ttft),
            _milliseconds(server.tpot),
        )
    return table


def _rank_table(server: ServerView) -> Table:
    table = Table("rank", "util", "power", "clock", "heat", "NVLink tx/rx", "memory", box=None, pad_edge=False)
    for rank in server.ranks:
        capacity = rank.memory.get("capacity", 0)
        kinds = ", ".join(
            f"{kind} {size(count)}" for kind, count in rank.memory.items() if kind not in ("total", "capacity") and count
        )
        power = (
            _number(rank.power) + (f"/{rank.power_limit:.0f} W" if rank.power_limit else " W") if rank.power is not None else "-"
        )
        nvlink = "/".join(f"{rank.nvlink.get(way, 0.0) / 1e9:.1f}" for way in ("tx", "rx")) + " GB/s" if rank.nvlink else "-"
        table.add_row(
            rank.rank,
            Text("-" if rank.utilization is None else f"{rank.utilization:.0f} %", "yellow" if _waits(server, rank) else ""),
            power,
            "-" if rank.clock is None else f"{rank.clock:.0f} MHz",
            Text("-" if rank.temperature is None else f"{rank.temperature:.0f} C", "red" if _HOT & set(rank.slowed_by) else ""),
            nvlink,
            f"{kinds} of {size(capacity)}" if capacity else kinds,
        )
    return table


def _waits(server: ServerView, rank: RankView) -> bool:
    """Whether a GPU waits although requests do."""
    return bool(server.waiting) and rank.utilization is not None and rank.utilization < LOW_UTILIZATION


def _heat(share: float | None, full: float) -> str:
    """The colour of a share: yellow in the last quarter before `full`, red from there on."""
    return "" if share is None or share < 0.75 * full else "yellow" if share < full else "red"


def _curve(server: ServerView) -> Text:
    """The past tokens per second: a bar for each, from 0 to the highest one."""
    top = max(server.history)
    bars = "".join(_BARS[min(int(rate / (top or 1.0) * len(_BARS)), len(_BARS) - 1)] for rate in server.history)
    return Text.assemble(f"{_short(server.url)}: tokens/s ", (bars, "green"), f" at most {_number(top)}")


def _short(url: str) -> str:
    return url.partition("://")[2] or url


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _milliseconds(quantiles: dict[str, float]) -> str:
    return "/".join(f"{quantiles[label] * 1e3:.0f}" if label in quantiles else "-" for label in ("p50", "p99")) + (
        " ms" if quantiles else ""
    )


def document(frame: Frame) -> dict[str, Any]:
    """For scripts."""
    return {"seconds": frame.seconds, "servers": [asdict(server) for server in frame.servers]}


def dumps(frame: Frame) -> str:
    return json.dumps(document(frame), indent=2)
