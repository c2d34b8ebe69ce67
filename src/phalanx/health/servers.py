# SPDX-License-Identifier: Apache-2.0
"""A running server, over HTTP alone: /live, /ready, /version, /v1/models and /metrics, as plain data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from phalanx.config.sources import client_api_key

TIMEOUT = 5.0
_USAGE = "kv_cache_usage_perc"
_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper bound in seconds, as Prometheus has them."""

    buckets: tuple[tuple[float, float], ...]
    total: float
    sum: float

    def since(self, before: Histogram | None) -> Histogram:
        """What was observed after `before`; all of it where that is None, or the server has restarted since."""
        if before is None or self.total < before.total:
            return self
        counts = dict(before.buckets)
        return Histogram(
            tuple((bound, count - counts.get(bound, 0.0)) for bound, count in self.buckets),
            self.total - before.total,
            self.sum - before.sum,
        )

    def quantile(self, q: float) -> float | None:
        """As PromQL's histogram_quantile: linear inside a bucket, the last finite bound beyond; None for no observation."""
        if not self.total:
            return None
        rank, lower, below = q * self.total, 0.0, 0.0
        for bound, count in self.buckets:
            if count >= rank:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (rank - below) / (count - below) if count > below else bound
            lower, below = bound, count
        return lower


@dataclass(frozen=True)
class Scrape:
    """One reading of /metrics. values: stem -> labels beside model_name and engine -> value. at: monotonic seconds."""

    at: float
    prefix: str
    model: str
    values: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    def value(self, stem: str, **labels: str) -> float | None:
        """The sum over the series that have these labels; None where there is none."""
        chosen = [value for key, value in self.values.get(stem, {}).items() if labels.items() <= dict(key).items()]
        return sum(chosen) if chosen else None

    def by(self, stem: str, *names: str) -> dict[tuple[str, ...], float]:
        """Sums by the values of these labels."""
        sums: dict[tuple[str, ...], float] = {}
        for key, value in self.values.get(stem, {}).items():
            labels = dict(key)
            place = tuple(labels.get(name, "") for name in names)
            sums[place] = sums.get(place, 0.0) + value
        return sums


def parse(text: str, at: float) -> Scrape:
    """Read an exposition of /metrics; the prefix is whatever stands before the colon. Raises ValueError for what is none."""
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    buckets: dict[str, dict[float, float]] = {}
    totals: dict[str, dict[str, float]] = {}
    engines: set[str] = set()
    prefix = model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            head, colon, stem = sample.name.partition(":")
            if not colon:
                stem = sample.name
            else:
                prefix, model = head, model or sample.labels.get("model_name", "")
            base, _, end = stem.rpartition("_")
            if base in _LATENCIES and end in ("bucket", "count", "sum"):
                if end == "bucket":
                    bound = float(sample.labels["le"])
                    per = buckets.setdefault(base, {})
                    per[bound] = per.get(bound, 0.0) + sample.value
                else:
                    part = totals.setdefault(base, {})
                    part[end] = part.get(end, 0.0) + sample.value
                continue
            labels = {name: text for name, text in sample.labels.items() if name not in ("model_name", "engine")}
            engine = sample.labels.get("engine", "0")
            engines.add(engine)
            if "rank" in labels and engine != "0":
                labels["rank"] = f"{engine}.{labels['rank']}"  # of a replica
            key = tuple(sorted(labels.items()))
            series = values.setdefault(stem, {})
            series[key] = series.get(key, 0.0) + sample.value
    for key in values.get(_USAGE, {}):
        values[_USAGE][key] /= len(engines)  # a share of each replica's cache
    histograms = {
        name: Histogram(tuple(sorted(per.items())), totals.get(name, {}).get("count", 0.0), totals.get(name, {}).get("sum", 0.0))
        for name, per in buckets.items()
    }
    return Scrape(at, prefix, model, values, histograms)


@dataclass(frozen=True)
class Server:
    """What a URL answered. failure: why it did not, "" where it did. skew: seconds by which its clock is ahead of ours."""

    url: str
    failure: str = ""
    status: str = ""
    reason: str = ""
    version: str = ""
    skew: float | None = None
    scrapes: tuple[Scrape, ...] = ()

    @property
    def latest(self) -> Scrape | None:
        return self.scrapes[-1] if self.scrapes else None

    def rise(self, stem: str, **labels: str) -> float | None:
        """By how much a counter rose between the first scrape and the last; None with fewer than two."""
        if len(self.scrapes) < 2:
            return None
        first, last = self.scrapes[0].value(stem, **labels), self.scrapes[-1].value(stem, **labels)
        return None if first is None or last is None else last - first if last >= first else last


def visit(url: str, *, interval: float = 1.0, scrapes: int = 2, client: httpx.Client | None = None) -> Server:
    """Ask a server about itself, with the key of the environment if there is one. With scrapes > 1 its metrics are read that often,
    `interval` seconds apart."""
    base = normal(url)
    with client or httpx.Client(timeout=TIMEOUT, trust_env=False, headers=authorization()) as http:
        try:
            ready = http.get(f"{base}/ready")
            skew = _skew(ready.headers.get("date"))
            body = _json(ready)
            version = str(_json(http.get(f"{base}/version")).get("version", ""))
            readings: list[Scrape] = []
            for number in range(scrapes):
                if number:
                    time.sleep(interval)
                answer = http.get(f"{base}/metrics")
                answer.raise_for_status()
                readings.append(parse(answer.text, time.monotonic()))
        except (httpx.HTTPError, ValueError) as error:
            return Server(base, failure=failure_text(error))
    status = str(body.get("status", f"HTTP {ready.status_code}"))
    return Server(base, "", status, str(body.get("reason") or ""), version, skew, tuple(readings))


def failure_text(error: httpx.HTTPError | ValueError) -> str:
    """Why a reading of a server failed, in one line."""
    if not isinstance(error, httpx.HTTPStatusError):
        return f"{type(error).__name__}: {error}"
    answer = error.response
    text = f"{answer.request.url.path} gives {answer.status_code} {answer.reason_phrase}"
    return f"{text}; set PHALANX_API_KEY to a key of the server" if answer.status_code == 401 else text


def authorization() -> dict[str, str]:
    """The header with the key of PHALANX_API_KEY or PHALANX_API_KEY_FILE, which a server with keys asks for its metrics."""
    key = client_api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def normal(url: str) -> str:
    """A base URL: http:// where no scheme is named, without /v1 and without a slash at its end."""
    text = url if "://" in url else f"http://{url}"
    return text.rstrip("/").removesuffix("/v1").removesuffix("/metrics").rstrip("/")


def is_url(text: str) -> bool:
    """Whether an argument names a server rather than a model: it has a scheme, or reads host:port."""
    host, colon, port = text.partition(":")
    return "://" in text or (bool(colon) and port.split("/")[0].isdigit() and bool(host) and "/" not in host)


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _skew(date: str | None) -> float | None:
    if not date:
        return None
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return None


def urls_of(texts: Iterable[str]) -> list[str]:
    return [normal(text) for text in texts]
