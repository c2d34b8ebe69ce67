# SPDX-License-Identifier: Apache-2.0
"""When requests come and how long they are: public traces, a file of one's own, or a Poisson process.

poisson:RATE     requests a second, with --isl and --osl
burst            all at once
FILE.csv         Azure's form: TIMESTAMP,ContextTokens,GeneratedTokens
FILE.jsonl       Mooncake's form: timestamp (ms), input_length, output_length, hash_ids of 512 prompt tokens each
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from phalanx.errors import OptionError

HASHED = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. at: seconds from the first one; input_len, output_len: tokens. content: a number for each HASHED tokens of the
    prompt, equal for equal beginnings; empty where nothing is known of it, so that it shares nothing."""

    at: float
    input_len: int
    output_len: int
    content: tuple[int, ...] = ()

    def tokens(self, number: int) -> list[int]:
        """Token ids that are equal where the content is; `number`: of the request, for those that share nothing."""
        if not self.content:
            return [number + 1] * self.input_len
        ids: list[int] = []
        for block in self.content:
            ids += [block + 1] * HASHED
        del ids[self.input_len :]
        return ids


def of(source: str, *, isl: int, osl: int, requests: int, seed: int = 0) -> list[Arrival]:
    """The arrivals that a name stands for, by rising time. requests: of a Poisson process or a burst; the first so many of a trace,
    0 for all. Raises OptionError."""
    if source == "burst":
        return [Arrival(0.0, isl, osl) for _ in range(requests or 512)]
    if source.startswith("poisson:"):
        return _poisson(source, isl, osl, requests or 1000, seed)
    path = Path(source)
    if not path.is_file():
        raise OptionError(f"trace {source!r} is not a file", next="name a .csv or .jsonl file, poisson:RATE, or burst")
    if path.suffix not in (".csv", ".jsonl"):
        raise OptionError(f"trace {source!r} has an unknown form", next="a .csv as Azure's or a .jsonl as Mooncake's")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            arrivals = _azure(lines) if path.suffix == ".csv" else _mooncake(lines)
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"trace {source!r} cannot be read",
            why=f"{type(error).__name__}: {error}",
            next="a .csv as Azure's or a .jsonl as Mooncake's",
        ) from None
    if not arrivals:
        raise OptionError(f"trace {source!r} holds no requests")
    arrivals.sort(key=lambda each: each.at)
    return arrivals[:requests] if requests else arrivals


def _poisson(source: str, isl: int, osl: int, requests: int, seed: int) -> list[Arrival]:
    try:
        rate = float(source.removeprefix("poisson:"))
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise OptionError(f"arrivals {source!r} have no rate", next="write requests a second, as poisson:2.5")
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        arrivals.append(Arrival(at, isl, osl))
        at += draw.expovariate(rate)
    return arrivals


def _azure(lines: Iterable[str]) -> list[Arrival]:
    arrivals, first = [], None
    for row in csv.DictReader(lines):
        text, _, part = row["TIMESTAMP"].partition(".")
        stamp = datetime.fromisoformat(text).timestamp() + float(f"0.{part or 0}")
        first = stamp if first is None else first
        arrivals.append(Arrival(stamp - first, int(row["ContextTokens"]), max(int(row["GeneratedTokens"]), 1)))
    return arrivals


def _mooncake(lines: Iterable[str]) -> list[Arrival]:
    arrivals = []
    for line in lines:
        if not line.strip():
            continue
        row = json.loads(line)
        length, blocks = int(row["input_length"]), tuple(int(block) for block in row["hash_ids"])
        if len(blocks) != -(-length // HASHED):
            raise ValueError(f"{len(blocks)} hash ids for {length} tokens")
        arrivals.append(Arrival(float(row["timestamp"]) / 1e3, length, max(int(row["output_length"]), 1), blocks))
    return arrivals


def paced(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same requests, so many times as fast."""
    return [replace(arrival, at=arrival.at / speed) for arrival in arrivals]
