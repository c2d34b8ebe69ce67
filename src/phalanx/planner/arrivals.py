# SPDX-License-Identifier: Apache-2.0
"""When requests come and how long they are: public traces, a file of one's own, or a Poisson process.

poisson:RATE     requests a second, with --isl and --osl
burst            all at once
FILE.csv         Azure's form: TIMESTAMP,ContextTokens,GeneratedTokens; a time without an offset is UTC
FILE.jsonl       Mooncake's form: timestamp (ms), input_length, output_length, hash_ids of 512 prompt tokens each
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError

HASHED = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""
MOST_TOKENS = 1 << 24
"""Of a prompt or an output, above the positions of every model: a prompt is kept as a list of tokens."""
LEAST_RATE = 1e-6
"""Requests a second of a Poisson process; below it, the times of a long one would lose the length of a step in rounding."""
MOST_MS = 1e15
"""Of a timestamp; beyond it, steps of less than 0.1 ms would be lost in rounding."""

_TIME = re.compile(r"(?P<second>[^.]+?:\d\d)(?:\.(?P<part>\d+))?(?P<zone>Z|[+-]\d\d:?\d\d|[+-]\d\d)?")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. at: seconds from the first one; input_len, output_len: tokens. content: a number for each `hashed` tokens of the
    prompt, equal for equal beginnings; empty where nothing is known of it, so that it shares nothing."""

    at: float
    input_len: int
    output_len: int
    content: tuple[int, ...] = ()
    hashed: int = HASHED

    def tokens(self, number: int) -> list[int]:
        """Token ids that are equal where the content is; `number`: of the request, for those that share nothing."""
        if not self.content:
            return [number + 1] * self.input_len
        ids: list[int] = []
        for block in self.content:
            ids += [block + 1] * self.hashed
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
        with path.open(encoding="utf-8-sig", newline="") as lines:
            arrivals = _azure(lines) if path.suffix == ".csv" else _mooncake(lines)
    except (ValueError, csv.Error) as error:
        raise OptionError(
            f"trace {source!r} cannot be read",
            why=str(error),
            next="a .csv as Azure's or a .jsonl as Mooncake's",
        ) from None
    if not arrivals:
        raise OptionError(f"trace {source!r} holds no requests")
    arrivals.sort(key=lambda each: each.at)
    begin = arrivals[0].at
    return [replace(each, at=each.at - begin) for each in (arrivals[:requests] if requests else arrivals)]


def _poisson(source: str, isl: int, osl: int, requests: int, seed: int) -> list[Arrival]:
    try:
        rate = float(source.removeprefix("poisson:"))
    except ValueError:
        rate = math.nan
    if not LEAST_RATE <= rate < math.inf:
        example = f"write requests a second, as poisson:2.5, at least {LEAST_RATE}"
        raise OptionError(f"arrivals {source!r} have no rate", next=example)
    draw, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        arrivals.append(Arrival(at, isl, osl))
        at += draw.expovariate(rate)
    return arrivals


def _azure(lines: Iterable[str]) -> list[Arrival]:
    """Rows of Azure's form, at seconds of an epoch. Raises ValueError with line and field."""
    arrivals, rows = [], csv.DictReader(lines)
    for row in rows:
        at = _moment(row, rows.line_num)
        length, generated = (_tokens(row, name, rows.line_num) for name in ("ContextTokens", "GeneratedTokens"))
        arrivals.append(Arrival(at, length, max(generated, 1)))
    return arrivals


def _mooncake(lines: Iterable[str]) -> list[Arrival]:
    """Rows of Mooncake's form, at seconds of its clock. Raises ValueError with line and field."""
    arrivals = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not an object")
        at = row.get("timestamp")
        if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) < MOST_MS:
            raise _fault(number, "timestamp", at, "a finite number of ms")
        length, generated = (_tokens(row, name, number) for name in ("input_length", "output_length"))
        blocks = row.get("hash_ids")
        if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
            raise _fault(number, "hash_ids", blocks, "a list of whole numbers")
        if len(blocks) != -(-length // HASHED):
            raise ValueError(f"line {number}: {len(blocks)} hash ids for {length} tokens")
        arrivals.append(Arrival(at / 1e3, length, max(generated, 1), tuple(blocks)))
    return arrivals


def _moment(row: Mapping[str, Any], line: int) -> float:
    """Seconds of an epoch. A time without an offset is UTC, so that no host's time zone moves a request."""
    text = row.get("TIMESTAMP") or ""
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        moment = datetime.fromisoformat(match["second"] + (match["zone"] or "+00:00").replace("Z", "+00:00"))
    except ValueError:
        raise _fault(line, "TIMESTAMP", row.get("TIMESTAMP"), "a time as 2023-11-16 18:15:46.6805900") from None
    return moment.timestamp() + float(f"0.{match['part'] or 0}")


def _tokens(row: Mapping[str, Any], name: str, line: int) -> int:
    """A number of tokens, of JSON or text."""
    value = row.get(name)
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,12}\s*", value) else value
    if type(number) is not int or not 0 <= number <= MOST_TOKENS:
        raise _fault(line, name, value, f"a whole number of tokens, 0 to {MOST_TOKENS:,}")
    return number


def _fault(line: int, name: str, value: object, wanted: str) -> ValueError:
    shown = "missing" if value is None else repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}.."
    return ValueError(f"line {line}: {name} is {shown}; it must be {wanted}")


def shortened(arrivals: Sequence[Arrival], factor: int) -> list[Arrival]:
    """The same requests with so many times fewer tokens, where what was equal in the prompts is. Raises OptionError where HASHED is
    not a multiple of the factor."""
    if factor < 1 or HASHED % factor:
        raise OptionError(
            f"a trace cannot be {factor} times shorter", held=f"it tells contents by {HASHED} tokens", next="give 1, 2, 4, 8 ..",
        )  # fmt: skip
    return [
        replace(each, input_len=-(-each.input_len // factor), output_len=-(-each.output_len // factor), hashed=HASHED // factor)
        for each in arrivals
    ]


def paced(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same requests, so many times as fast."""
    return [replace(arrival, at=arrival.at / speed) for arrival in arrivals]
