# SPDX-License-Identifier: Apache-2.0
"""Made-up tables for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from phalanx.config.dtypes import DTYPES
from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import MAX_A, MAX_B, MAX_BYTES, MAX_C, MAX_TOKENS, Latency, Seed, SequenceParallelSeed
from phalanx.tables.strategy import Choice, Strategy, choices
from phalanx.tables.table import HAND_OVER, MAX_SIZE, HiddenRange, Section, Span, Table


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
    some = st.one_of(st.integers(1, 4096), st.integers(1, MAX_TOKENS))
    sharded = SequenceParallelSeed(
        draw(st.none() | some), draw(st.none() | some | st.integers(1, MAX_BYTES)), draw(st.text(max_size=8)), draw(st.booleans())
    )
    return Seed(draw(st.text(max_size=8)), models, draw(st.booleans()), sharded)


@st.composite
def tables(draw, fingerprint: Fingerprint | None = None) -> Table:
    if fingerprint is None:
        fingerprint = Fingerprint(
            draw(st.sampled_from([0, 80, 90, 100])), draw(st.sampled_from(sorted(LINKS))), draw(st.integers(2, 8))
        )
    key = st.tuples(st.sampled_from(sorted(DTYPES)), st.sampled_from(list(Fusion)), st.sampled_from(list(Caller)))
    keys = draw(st.lists(key.filter(lambda key: key[2] is Caller.REPLICATED or key[1].shards), unique=True, max_size=6))
    sections = []
    for dtype, fusion, caller in keys:
        named = choices(fusion, caller) if caller is not Caller.GEMM else (HAND_OVER, Choice(Strategy.GEMM_RS))
        rows = []
        for first, last in draw(ranges(3)):
            spans = [Span(a, b, draw(st.sampled_from(named)), draw(st.none() | st.floats(0.5, 9.0))) for a, b in draw(ranges(4))]
            rows.append(HiddenRange(first, last, tuple(spans)))
        sections.append(Section(dtype, fusion, tuple(rows), caller))
    return Table(fingerprint, tuple(sections), draw(seeds()), {"by": draw(st.text(max_size=8))})


def edges(table: Table) -> list[tuple[str, Fusion, int, int, Caller]]:
    """(dtype, fusion, tokens, hidden, caller) on and beside every edge of the table and of its seed, and far beyond."""
    far = [1, 7, 128, 16384, 2**28, 2**31 - 1, 2**31, 2**40, 2**62]
    sizes = [(dtype, fusion, value, 1 + value // 3) for dtype in DTYPES for fusion in Fusion for value in far]
    for section in table.sections:
        for row in section.hidden_ranges:
            for hidden in {row.first - 1, row.first, row.last, row.last + 1}:
                for span in row.spans:
                    for tokens in {span.first - 1, span.first, (span.first + span.last) // 2, span.last, span.last + 1}:
                        if tokens > 0 and hidden > 0:
                            sizes.append((section.dtype, section.fusion, tokens, hidden))
    first, least = table.seed.sequence_parallel.rs_norm_ag_min_tokens, table.seed.sequence_parallel.gemm_rs_min_bytes
    for tokens in {1, 64, first or 64, (first or 64) - 1} - {0}:
        hidden = max((least or 1 << 20) // (2 * tokens), 1)
        sizes += [("bf16", Fusion.RESIDUAL_RMS_NORM, tokens, beside) for beside in (hidden, hidden + 1)]
    return [(*size, caller) for size in sizes for caller in Caller]


def one_span(fingerprint: Fingerprint, seed: Seed, choice: Choice, gain: float | None = 2.0) -> Table:
    """1..64 tokens of hidden 128..8192, bf16 NONE."""
    return Table(fingerprint, (Section("bf16", Fusion.NONE, (HiddenRange(128, 8192, (Span(1, 64, choice, gain),)),)),), seed)
