# SPDX-License-Identifier: Apache-2.0
"""From times of the exchanges of expert parallel to their table, and the table in words.

`benchmarks.comm.expert_exchange` measures dispatch and combine; its JSON file is read here. The challenger must beat ALL_GATHER by
more than the noise.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from phalanx.errors import OptionError, TableError
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.exchange import (
    CHALLENGER,
    INCUMBENT,
    PAYLOADS,
    ExchangeRow,
    ExchangeSpan,
    ExchangeTable,
    machine_name,
)
from phalanx.tune.decide import UNSAMPLED, middle, ranges

_BRIDGED_TOKENS, _BRIDGED_HIDDEN = 16, 4
"""Between points further apart than these factors nothing is decided."""
_MAX_TOKENS = 32_768


class MeasuredSize(NamedTuple):
    """What was measured: tokens of each index, sent by ONE_SIDED as `payload` says."""

    payload: str
    hidden: int
    tokens: int


Times = Mapping[str, float]
"""Exchange -> microseconds of a dispatch and a combine."""


def read(path: Path) -> tuple[Fingerprint, dict[MeasuredSize, Times], dict[str, str]]:
    """(machine, times, facts for people) of a file of `benchmarks.comm.expert_exchange`. Raises TableError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        fingerprint, about = Fingerprint.parse(data["machine"]), data["about"]
        times: dict[MeasuredSize, dict[str, float]] = {}
        for row in data["rows"]:
            if not row["cuda_graph"] or row["exchange"] not in (INCUMBENT, CHALLENGER):
                continue
            # ALL_GATHER sends 16 bit, whatever ONE_SIDED would send.
            for payload in PAYLOADS if row["exchange"] == INCUMBENT else (_PAYLOAD_OF[row["payload"]],):
                times.setdefault(MeasuredSize(payload, row["hidden"], row["tokens"]), {})[row["exchange"]] = float(row["us"])
        facts = {key: str(about[key]) for key in ("date", "commit", "command") if key in about}
    except OSError as error:
        raise TableError(f"{path} cannot be read", why=str(error), next="check the path") from None
    except (KeyError, TypeError, ValueError, OptionError) as error:
        cure = "give a file that `python -m benchmarks.comm.expert_exchange --out FILE` wrote, in a checkout of the sources"
        raise TableError(f"{path} holds no times of exchanges", why=f"{type(error).__name__}: {error}", next=cure) from None
    return fingerprint, {size: each for size, each in times.items() if INCUMBENT in each and CHALLENGER in each}, facts


_PAYLOAD_OF = {"bf16": "16 bit", "e4m3": "e4m3"}


def decide(
    times: Mapping[MeasuredSize, Times], fingerprint: Fingerprint, provenance: dict[str, str] | None = None
) -> ExchangeTable:
    """The table of one machine. Raises TableError where no time is left."""
    if not times:
        raise TableError(f"no times of {machine_name(fingerprint)} to decide by", next="measure ALL_GATHER and ONE_SIDED")
    rows = []
    for payload in sorted({size.payload for size in times}, key=PAYLOADS.index):
        sizes = sorted({size.hidden for size in times if size.payload == payload})
        for (first, last), hidden in zip(ranges(sizes, _BRIDGED_HIDDEN, middle), sizes, strict=True):
            own = {size.tokens: each for size, each in times.items() if (size.payload, size.hidden) == (payload, hidden)}
            rows.append(ExchangeRow(payload, first, last, _spans(own)))
    return ExchangeTable(fingerprint, tuple(rows), provenance or {})


def _spans(times: Mapping[int, Times]) -> tuple[ExchangeSpan, ...]:
    points, spans, gains = sorted(times), list[ExchangeSpan](), list[float]()
    for (first, last), tokens in zip(ranges(points, _BRIDGED_TOKENS, middle), points, strict=True):
        incumbent, challenger = times[tokens][INCUMBENT], times[tokens][CHALLENGER]
        exchange = CHALLENGER if challenger < incumbent * (1 - UNSAMPLED) else INCUMBENT
        if spans and spans[-1].exchange == exchange and spans[-1].last + 1 == first:
            first = spans.pop().first
        else:
            gains = []
        gains.append(incumbent / challenger if exchange == CHALLENGER else 1.0)
        gain = round(math.exp(statistics.fmean(map(math.log, gains))), 3)
        spans.append(ExchangeSpan(first, last, exchange, gain))
    return tuple(spans)


def lines(table: ExchangeTable, hidden: int) -> Iterator[str]:
    """The machine; then for each payload a line for each range of tokens."""
    machine = table.fingerprint
    yield f"{machine_name(machine)}: {LINKS[machine.link]}; {machine.world} ranks that exchange tokens for their experts"
    if not machine.peers_reach:
        yield f"{INCUMBENT} always: the ranks do not reach each other's memory"
        return
    yield f"table sha256:{table.digest[:16]}..." if table.rows else "no table: everything is estimated"
    yield from (f"  {name}: {text}" for name, text in table.provenance.items())
    for payload in PAYLOADS:
        yield f"hidden {hidden}, experts that take tokens in {payload}"
        edges = {1, _MAX_TOKENS}
        edges |= {edge for row in table.rows for span in row.spans for edge in (span.first, span.last + 1)}
        firsts = sorted(edge for edge in edges if edge <= _MAX_TOKENS)
        changes = [
            first for before, first in pairwise([0, *firsts])
            if not before or table.lookup(payload, first, hidden) != table.lookup(payload, before, hidden)
        ]  # fmt: skip
        for first, end in pairwise([*changes, _MAX_TOKENS + 1]):
            entry = table.lookup(payload, first, hidden)
            upto = f"to {end - 1}" if end <= _MAX_TOKENS else "or more"
            yield f"  {first:>6} {upto:<9} tokens of each index: {entry.exchange:<10} {entry.source}: {entry.reason}"
