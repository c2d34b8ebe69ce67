# SPDX-License-Identifier: Apache-2.0
"""Which exchange of expert parallel runs at which size on one machine: by ranges of hidden sizes and of tokens of each index.

As the table of all-reduces, it stands in a file that is written completely or not at all, and read strictly:

{"format": "phalanx-expert-exchange-table", "version": 1, "digest": sha256, "made": {fact: text}, "fingerprint": {sm, link, world},
 "rows": [{payload, hidden: [first, last], spans: [[first, last, exchange, gain or null]]}]}

Sizes that were not measured are answered by an estimate, which says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import OptionError, TableError
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.shipped import user_folder
from phalanx.tables.table import check_ranges, digest_of
from phalanx.tables.table_file import fields, values, write_whole

INCUMBENT, CHALLENGER = "ALL_GATHER", "ONE_SIDED"
PAYLOADS = ("16 bit", "e4m3")
"""How ONE_SIDED sends tokens: as they are, and quantized, where the experts' GEMMs do that anyway."""
_FORMAT, _VERSION = "phalanx-expert-exchange-table", 1
_SHIPPED = Path(__file__).parent / "data" / "exchange"
ESTIMATE = f"not measured: {CHALLENGER} is expected to be faster, as it sends fewer bytes in two kernels of its own"
NO_ESTIMATE = f"not measured: {CHALLENGER} was measured over NVLink alone"


@dataclass(frozen=True, slots=True)
class ExchangeEntry:
    """The answer for one size. source: "table" where it was measured, else "estimated"."""

    exchange: str
    source: Literal["table", "estimated"]
    reason: str


@dataclass(frozen=True, slots=True)
class ExchangeSpan:
    """first..last tokens of each index, inclusive. gain: by which factor it is faster than ALL_GATHER."""

    first: int
    last: int
    exchange: str
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class ExchangeRow:
    """first..last hidden sizes, inclusive, and their spans by rising tokens."""

    payload: str
    first: int
    last: int
    spans: tuple[ExchangeSpan, ...]


@dataclass(frozen=True)
class ExchangeTable:
    """The measurements of one machine, of whose ranks fingerprint.world exchange tokens. provenance: facts for people, not part of
    the digest. Raises TableError for ranges that overlap or decrease, and for an unknown exchange or payload."""

    fingerprint: Fingerprint
    rows: tuple[ExchangeRow, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for payload in {row.payload for row in self.rows}:
            if payload not in PAYLOADS:
                raise TableError(f"payload {payload!r} is unknown", next=f"use one of {', '.join(PAYLOADS)}")
            rows = [row for row in self.rows if row.payload == payload]
            check_ranges([(row.first, row.last) for row in rows], f"{self.fingerprint} {payload}: hidden sizes")
        for row in self.rows:
            check_ranges([(span.first, span.last) for span in row.spans], f"{self.fingerprint} hidden {row.first}: tokens")
            for span in row.spans:
                if span.exchange not in (INCUMBENT, CHALLENGER):
                    raise TableError(f"exchange {span.exchange!r} is unknown", next=f"use {INCUMBENT} or {CHALLENGER}")

    def lookup(self, payload: str, tokens: int, hidden: int) -> ExchangeEntry:
        """What runs for up to `tokens` tokens of each index. Pure: equal tables give equal answers on every rank."""
        for row in self.rows:
            if row.payload == payload and row.first <= hidden <= row.last:
                for span in row.spans:
                    if span.first <= tokens <= span.last:
                        return ExchangeEntry(span.exchange, "table", self._reason(span))
        if self._expects_challenger:
            return ExchangeEntry(CHALLENGER, "estimated", ESTIMATE)
        return ExchangeEntry(INCUMBENT, "estimated", NO_ESTIMATE)

    @property
    def _expects_challenger(self) -> bool:
        return self.fingerprint.link in ("nvlink", "nvlink_multicast")

    @property
    def has_one_sided(self) -> bool:
        """Whether ONE_SIDED is the answer for any size."""
        return self._expects_challenger or any(span.exchange == CHALLENGER for row in self.rows for span in row.spans)

    def _reason(self, span: ExchangeSpan) -> str:
        gain = "nothing is faster by more than the noise"
        if span.exchange != INCUMBENT and span.gain is not None:
            gain = f"{span.gain:.2f}x the speed of {INCUMBENT}"
        return f"table of {machine_name(self.fingerprint)}, {span.first}..{span.last} tokens: {gain}"

    @property
    def digest(self) -> str:
        """sha256 over everything that decides. Ranks compare it at start."""
        return digest_of(self.deciding())

    def deciding(self) -> dict[str, Any]:
        """Everything that decides, as plain data."""
        key = self.fingerprint
        rows = [
            {"payload": row.payload, "hidden": [row.first, row.last],
             "spans": [[span.first, span.last, span.exchange, span.gain] for span in row.spans]}
            for row in self.rows
        ]  # fmt: skip
        return {"fingerprint": {"sm": key.sm, "link": key.link, "world": key.world}, "rows": rows}


def machine_name(fingerprint: Fingerprint) -> str:
    """sm90.nvlink.ep2: as a fingerprint, of ranks that exchange tokens."""
    return f"sm{fingerprint.sm}.{fingerprint.link}.ep{fingerprint.world}"


def path_of(fingerprint: Fingerprint, folder: Path | None = None) -> Path:
    """The file of a machine's table in a folder of tables, by default the user's."""
    return (user_folder() if folder is None else folder) / "exchange" / f"{machine_name(fingerprint)}.json"


def table_for(fingerprint: Fingerprint, folder: Path | None = None) -> ExchangeTable:
    """The machine's table: first the one that was made on this host, then that of the package; without either, one that estimates.
    Raises TableError for a faulty file."""
    for path in (path_of(fingerprint, folder), _SHIPPED / f"{machine_name(fingerprint)}.json"):
        if path.is_file():
            return load(path)
    return ExchangeTable(fingerprint)


def dumps(table: ExchangeTable) -> str:
    """The text of the file, a row a line."""
    head = {"format": _FORMAT, "version": _VERSION, "digest": table.digest, "made": table.provenance}
    plain = table.deciding()
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in [*head.items(), ("fingerprint", plain["fingerprint"])]]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in plain["rows"])
    return "\n".join(["{", *lines, ' "rows": [', rows, " ]", "}"]) + "\n"


def save(table: ExchangeTable, path: Path) -> None:
    write_whole(path, dumps(table))


def load(path: Path) -> ExchangeTable:
    """Read a table. Raises TableError that names the file and the cure."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"table {path} cannot be read", why=str(error), next="check the path") from None
    except (TableError, OptionError) as error:
        cure = "restore the file, or measure again, in a checkout of the sources: python -m benchmarks.comm.expert_exchange"
        raise TableError(f"table {path} is faulty", why=str(error), next=cure) from None


def loads(text: str) -> ExchangeTable:
    """The inverse of dumps. Raises TableError."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TableError(f"not JSON: {error}") from None
    top = fields(data, "the file", format=str, version=int, digest=str, made=dict, fingerprint=dict, rows=list)
    if (top["format"], top["version"]) != (_FORMAT, _VERSION):
        raise TableError(f"format {top['format']!r} version {top['version']}", held=f"this reads {_FORMAT!r} version {_VERSION}")
    key = fields(top["fingerprint"], "fingerprint", sm=int, link=str, world=int)
    if key["link"] not in LINKS:
        raise TableError(f"link class {key['link']!r} is unknown")
    table = ExchangeTable(Fingerprint(key["sm"], key["link"], key["world"]), tuple(_row(row) for row in top["rows"]), top["made"])
    if table.digest != top["digest"]:
        raise TableError(f"the digest is {top['digest'][:16]}..., the content's {table.digest[:16]}...", why="the file was changed")
    return table


def _row(data: Any) -> ExchangeRow:
    row = fields(data, "a row", payload=str, hidden=list, spans=list)
    first, last = values(row["hidden"], "a row: hidden", int, int)
    spans = [ExchangeSpan(*values(span, "a span", int, int, str, float)) for span in row["spans"]]
    return ExchangeRow(row["payload"], first, last, tuple(spans))
