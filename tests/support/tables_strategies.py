# SPDX-License-Identifier: Apache-2.0
"""Made-up tables for the tests of this room."""

from __future__ import annotations

from hypothesis import strategies as st

from phalanx.config.dtypes import DTYPES
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.seed import MAX_A, MAX_B, MAX_C, Latency, Seed
from phalanx.tables.strategy import Choice, choices
from phalanx.tables.table import MAX_SIZE, HiddenRange, Section, Span, Table


@st.composite
def ranges(draw, most: int) -> list[tuple[int, int]]:
    """Rising ranges, some of them next to each other, some of one value, some with gaps between."""
    points = draw(st.lists(st.one_of(st.integers(1, 40), st.integers(1, MAX_SIZE)), unique=True, min_size=2, max_size=2 * most))
    points.sort()
    found_ranges = []
    while len(points) >= 2:
        first, last = points.pop(0), points.pop(0)
        found_ranges.append((first, last))
        if points and draw(st.booleans()):
            points.insert(0, last + 1)
            points = sorted(set(points))
    return found_ranges


@st.composite
def seeds(draw) -> Seed:
    latency = st.builds(Latency, st.integers(0, MAX_A), st.integers(0, MAX_B), st.integers(0, MAX_C))
    models = {}
    for fusion in Fusion:
        chosen = draw(st.lists(st.sampled_from(choices(fusion)), unique=True, min_size=1))
        models[fusion] = {choice: draw(latency) for choice in chosen}
    return Seed(draw(st.text(max_size=8)), models)


@st.composite
def tables(draw, fingerprint: Fingerprint | None = None) -> Table:
    if fingerprint is None:
        fingerprint = Fingerprint(
            draw(st.sampled_from([0, 80, 90, 100])), draw(st.sampled_from(sorted(LINKS))), draw(st.integers(2, 8))
        )
    keys = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.sampled_from(list(Fusion))), unique=True, max_size=4))
    sections = []
    for dtype, fusion in keys:
        rows = []
        for first, last in draw(ranges(3)):
            spans = [
                Span(a, b, draw(st.sampled_from(choices(fusion))), draw(st.none() | st.floats(0.5, 9.0)))
                for a, b in draw(ranges(4))
            ]
            rows.append(HiddenRange(first, last, tuple(spans)))
        sections.append(Section(dtype, fusion, tuple(rows)))
    return Table(fingerprint, tuple(sections), draw(seeds()), {"by": draw(st.text(max_size=8))})


def edges(table: Table) -> list[tuple[str, Fusion, int, int]]:
    """(dtype, fusion, tokens, hidden) on and beside every edge of the table, and far beyond."""
    far = [1, 7, 128, 16384, 2**28, 2**31 - 1, 2**31, 2**40, 2**62]
    sizes = [(dtype, fusion, value, 1 + value // 3) for dtype in DTYPES for fusion in Fusion for value in far]
    for section in table.sections:
        for row in section.hidden_ranges:
            for hidden in {row.first - 1, row.first, row.last, row.last + 1}:
                for span in row.spans:
                    for tokens in {span.first - 1, span.first, (span.first + span.last) // 2, span.last, span.last + 1}:
                        if tokens > 0 and hidden > 0:
                            sizes.append((section.dtype, section.fusion, tokens, hidden))
    return sizes


def one_span(fingerprint: Fingerprint, seed: Seed, choice: Choice, gain: float | None = 2.0) -> Table:
    """1..64 tokens of hidden 128..8192, bf16 NONE."""
    return Table(fingerprint, (Section("bf16", Fusion.NONE, (HiddenRange(128, 8192, (Span(1, 64, choice, gain),)),)),), seed)
