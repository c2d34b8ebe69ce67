# SPDX-License-Identifier: Apache-2.0
"""A tuning table: which strategy runs at which size on one machine, by ranges of tokens and hidden sizes.

Every size has an answer: inside the measured ranges from the table, outside from the seed. The answer names its source.

There are sections for each kind of caller (`message.Caller`). Where a caller that allows more has no section, or the section says
AUTO, the section of the next caller answers, which allows one thing less.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Seed
from phalanx.tables.strategy import SEQUENCE_PARALLEL, Choice, Strategy, choices

MAX_SIZE = 2**31 - 1
HAND_OVER = Choice(Strategy.AUTO)
"""In a section of GEMM: the GEMM's output is handed over as a tensor, and the section of SHARDED answers."""
Source = Literal["table", "seed", "estimated"]
_MAX_CACHED = 65_536


@dataclass(frozen=True, slots=True)
class Entry:
    """The answer for one size. fused: the fusion runs in the collective's own kernel. source: "table" where the size was measured,
    else "seed"; "estimated" where that seed is not of this class of machine."""

    strategy: Strategy
    fused: bool
    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class Span:
    """first..last tokens, inclusive. gain: by which factor it is faster than the incumbent (geometric mean of the cells), which is
    NCCL, or in a section of GEMM what runs if the output is handed over; None where times are unknown."""

    first: int
    last: int
    choice: Choice
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class HiddenRange:
    """first..last hidden sizes, inclusive, and their spans by rising tokens; a gap between spans is unmeasured."""

    first: int
    last: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One dtype, fusion and kind of caller: ranges of rising hidden sizes; a gap between them is unmeasured."""

    dtype: str
    fusion: Fusion
    hidden_ranges: tuple[HiddenRange, ...]
    caller: Caller = Caller.REPLICATED


@dataclass(frozen=True)
class Table:
    """The measurements of one machine. provenance: facts for people (versions, date, commit), not part of the digest.

    Raises TableError where ranges overlap, decrease or leave 1 .. 2^31-1, and where a section names a strategy that its caller does
    not allow.
    """

    fingerprint: Fingerprint
    sections: tuple[Section, ...]
    seed: Seed
    provenance: dict[str, str] = field(default_factory=dict, compare=False)
    _answers: dict[tuple[str, Fusion, int, int, Caller], Entry] = field(default_factory=dict, init=False, repr=False, compare=False)
    _indices: dict[tuple[str, Fusion, Caller], _Index | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys = [(section.dtype, section.fusion, section.caller) for section in self.sections]
        if len(set(keys)) != len(keys):
            raise TableError(f"the table of {self.fingerprint} has two sections of one dtype, fusion and caller")
        for section in self.sections:
            where = f"{self.fingerprint} {section.dtype} {section.fusion.name}"
            _check_choices(section, where)
            if section.dtype not in DTYPES:
                raise TableError(f"{where}: unknown dtype", next=f"use one of {', '.join(DTYPES)}")
            check_ranges([(row.first, row.last) for row in section.hidden_ranges], f"{where}: hidden sizes")
            for row in section.hidden_ranges:
                check_ranges([(span.first, span.last) for span in row.spans], f"{where} hidden {row.first}: tokens")

    def lookup(
        self, dtype: str, fusion: Fusion, tokens: int, hidden: int, caller: Caller = Caller.REPLICATED
    ) -> Entry:  # fmt: skip
        """What to run for a tensor [tokens, hidden] per rank. Pure: equal tables give equal answers on every rank.

        Raises ValueError unless tokens and hidden are at least 1, KeyError for an unknown dtype.
        """
        try:
            return self._answers[dtype, fusion, tokens, hidden, caller]
        except KeyError:
            entry = self._answer(dtype, fusion, tokens, hidden, caller)
        if len(self._answers) >= _MAX_CACHED:
            self._answers.clear()
        self._answers[dtype, fusion, tokens, hidden, caller] = entry
        return entry

    def gemm_rs_min_bytes(self) -> int | None:
        """Bytes of the shortest message of 2-byte elements that may run GEMM_RS; None where none does."""
        seed = self.seed.sequence_parallel
        sizes = [] if seed.rs_norm_ag_min_tokens is None or seed.gemm_rs_min_bytes is None else [seed.gemm_rs_min_bytes]
        for section in self.sections:
            for row in section.hidden_ranges:
                sizes += [2 * span.first * row.first for span in row.spans if span.choice.strategy is Strategy.GEMM_RS]
        return min(sizes, default=None)

    def section_for(self, dtype: str, fusion: Fusion, caller: Caller = Caller.REPLICATED) -> Section | None:
        """The section of a caller that answers for a dtype and fusion: its own, else that of the other 2-byte dtype (the same bytes
        on the wire), else that of the substitute fusion."""
        sections = {(section.dtype, section.fusion): section for section in self.sections if section.caller is caller}
        twin = {"bf16": "fp16", "fp16": "bf16"}.get(dtype)
        for candidate in (fusion, *caller.stand_ins(fusion)):
            for name in (dtype, twin):
                if name is not None and (name, candidate) in sections:
                    return sections[name, candidate]
        return None

    @property
    def digest(self) -> str:
        """sha256 over everything that decides (fingerprint, ranges, seed) in canonical form. Ranks compare it at start."""
        return digest_of(self.deciding())

    def deciding(self) -> dict[str, Any]:
        """Everything that decides, as plain data: the file without `provenance`."""
        fingerprint = {"sm": self.fingerprint.sm, "link": self.fingerprint.link, "world": self.fingerprint.world}
        sharded = self.seed.sequence_parallel
        seed = {
            "origin": self.seed.origin,
            "estimated": self.seed.estimated,
            "sequence_parallel": {
                "origin": sharded.origin,
                "estimated": sharded.estimated,
                "rs_norm_ag_min_tokens": sharded.rs_norm_ag_min_tokens,
                "gemm_rs_min_bytes": sharded.gemm_rs_min_bytes,
            },
            "models": {f.name: {str(c): list(m) for c, m in models.items()} for f, models in self.seed.models.items()},
            # Ties are broken by order, which a JSON object loses when its keys are sorted.
            "order": {f.name: [str(c) for c in models] for f, models in self.seed.models.items()},
        }
        sections = [
            {
                "dtype": section.dtype,
                "fusion": section.fusion.name,
                "caller": section.caller.label,
                "rows": [
                    {"hidden": [row.first, row.last], "spans": [[s.first, s.last, str(s.choice), s.gain] for s in row.spans]}
                    for row in section.hidden_ranges
                ],
            }
            for section in self.sections
        ]
        return {"fingerprint": fingerprint, "sections": sections, "seed": seed}

    def _answer(self, dtype: str, fusion: Fusion, tokens: int, hidden: int, caller: Caller) -> Entry:
        if tokens < 1 or hidden < 1:
            raise ValueError(f"no message has {tokens} tokens of hidden size {hidden}")
        if dtype not in DTYPES:
            raise KeyError(dtype)
        caller = caller if fusion.shards else Caller.REPLICATED
        if (dtype, fusion, caller) not in self._indices:
            section = self.section_for(dtype, fusion, caller)
            index = None if section is None else _Index(section, dtype, fusion, self.fingerprint)
            self._indices[dtype, fusion, caller] = index
        index = self._indices[dtype, fusion, caller]
        entry = None if index is None else index.find(tokens, hidden)
        if entry is not None and entry.strategy is not HAND_OVER.strategy:
            return entry
        if caller is Caller.REPLICATED:
            return entry or self._seed_entry(dtype, fusion, tokens, hidden, measured=index is not None)
        if entry is None:
            sharded = self.seed.sequence_parallel
            strategy = sharded.choose(fusion, tokens, tokens * hidden * DTYPES[dtype].itemsize, caller)
            # Where the section of SHARDED has this size, it decides between RS_NORM_AG and the others.
            if strategy is Strategy.GEMM_RS or (strategy is not None and caller is Caller.SHARDED):
                return Entry(strategy, True, "estimated" if sharded.estimated else "seed", sharded.reason(strategy))
        return self.lookup(dtype, fusion, tokens, hidden, caller.less)

    def _seed_entry(self, dtype: str, fusion: Fusion, tokens: int, hidden: int, *, measured: bool) -> Entry:
        """measured: other sizes of this dtype and fusion were."""
        choice, us = self.seed.choose(dtype, fusion, tokens, hidden)
        what = "not measured at this size" if measured else "this dtype and fusion were not measured"
        reason = f"{what}: the seed ({self.seed.origin}) expects {us:.1f} us of {choice.name(self.fingerprint.sm)}"
        return Entry(choice.strategy, choice.fuses(fusion), "estimated" if self.seed.estimated else "seed", reason)


def digest_of(deciding: dict[str, Any]) -> str:
    """sha256 of what decides, as `Table.deciding` gives it."""
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class _Index:
    """A section prepared for bisection, with its answers."""

    def __init__(self, section: Section, dtype: str, fusion: Fusion, fingerprint: Fingerprint) -> None:
        self._firsts = [row.first for row in section.hidden_ranges]
        self._ends = [row.last for row in section.hidden_ranges]
        self._spans = [[span.first for span in row.spans] for row in section.hidden_ranges]
        self._span_ends = [[span.last for span in row.spans] for row in section.hidden_ranges]
        proxy = "" if (section.dtype, section.fusion) == (dtype, fusion) else f" with {section.dtype} {section.fusion.name}"

        def entry(span: Span) -> Entry:
            name = Choice(Strategy.NCCL).name(fingerprint.sm)
            if section.caller is Caller.GEMM:
                name = "a GEMM and then an all-reduce"
            if span.choice.strategy is Strategy.NCCL:
                gain = ": nothing is faster by more than the noise"
            else:
                gain = "" if span.gain is None else f": {span.gain:.2f}x the speed of {name}"
            reason = f"table of {fingerprint}{proxy}, {span.first}..{span.last} tokens{gain}"
            return Entry(span.choice.strategy, span.choice.fuses(fusion), "table", reason)

        self._entries = [[entry(span) for span in row.spans] for row in section.hidden_ranges]

    def find(self, tokens: int, hidden: int) -> Entry | None:
        row = bisect_right(self._firsts, hidden) - 1
        if row < 0 or hidden > self._ends[row]:
            return None
        span = bisect_right(self._spans[row], tokens) - 1
        if span < 0 or tokens > self._span_ends[row][span]:
            return None
        return self._entries[row][span]


def _check_choices(section: Section, where: str) -> None:
    """Raise TableError where the section names sequence parallelism that its caller or fusion does not allow, or AUTO outside of a
    section of GEMM, whose only choices are AUTO and GEMM_RS."""
    allowed = {choice.strategy for choice in choices(section.fusion, section.caller)}
    for row in section.hidden_ranges:
        for span in row.spans:
            strategy = span.choice.strategy
            if section.caller is Caller.GEMM:
                wrong = strategy not in (HAND_OVER.strategy, Strategy.GEMM_RS) or Strategy.GEMM_RS not in allowed
            else:
                wrong = strategy in SEQUENCE_PARALLEL and strategy not in allowed
            if wrong:
                kind = f"{where}, caller {section.caller.label}"
                raise TableError(f"{kind}: {span.choice} cannot run there", next="tune again, or correct the file")


def check_ranges(ranges: list[tuple[int, int]], where: str) -> None:
    """Raise TableError unless the ranges rise, do not overlap, and lie within 1 .. MAX_SIZE; and for no ranges."""
    before = 0
    for first, last in ranges:
        if not before < first <= last <= MAX_SIZE:
            raise TableError(
                f"{where}: the range {first}..{last} does not rise from {before}", next="tune again, or correct the file"
            )
        before = last
    if not ranges:
        raise TableError(f"{where}: no ranges at all", next="leave the section out")
