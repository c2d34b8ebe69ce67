# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's C++ tables move both ways; the published SM90 table comes back as it went in."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import cpp_lookup
from phalanx.tables.cpp_lookup import CppLookupTable
from phalanx.tables.grid import HIDDEN, LOOKUP_FUSIONS, TOKENS, TP_SIZES
from phalanx.tables.message import Fusion
from phalanx.tables.seed import Latency, Seed, default
from phalanx.tables.strategy import Choice, Strategy, choices
from phalanx.tables.table import HiddenRange, Section, Span, Table
from tests.support.tables_strategies import tables

# The published rows of SM90, fusion NONE: value x how many tokens, by TP size and hidden size.
PUBLISHED = {
    2: ["4x12,0x3", "4x13,0x2", "4x13,0x2", "4x12,0x3", "4x12,0x3", "4x12,0x3", "4x12,0x3"],
    4: ["4x12,0x3", "4x12,0x3", "4x12,0x3", "4x10,5x2,0x3", "4x9,5x3,0x3", "4x8,5x3,0x4", "4x8,5x1,0x6"],
    8: [
        "4x11,0x4", "4x11,0x4", "4x10,5x2,0x3", "4x9,0x1,5x3,0x2", "4x8,0x1,5x3,0x3", "4x7,0x1,5x2,0x5", "4x6,0x1,5x2,0x6",
    ],
}  # fmt: skip


def unrolled(text: str) -> tuple[int, ...]:
    runs = [part.split("x") for part in text.split(",")]
    return tuple(int(value) for value, count in runs for _ in range(int(count)))


def published() -> CppLookupTable:
    zeros = tuple((0,) * len(TOKENS) for _ in HIDDEN)
    values = tuple((tuple(map(unrolled, PUBLISHED[tp])), zeros, zeros, zeros) for tp in TP_SIZES)
    return CppLookupTable(90, values)


def body(text: str) -> list[str]:
    return text.splitlines()[text.splitlines().index(next(x for x in text.splitlines() if x.startswith("inline"))) :]


def test_the_published_table_round_trips():
    first = cpp_lookup.emit([published()])
    assert first.splitlines()[:2] == [
        "// AllReduce lookup: [tp][fusion][hidden][tokens] = strategy",
        "// TP:[2, 4, 8] Fusion:['NONE', 'RESIDUAL_RMS_NORM', 'RESIDUAL_RMS_NORM_QUANT_FP8', 'RESIDUAL_RMS_NORM_QUANT_NVFP4']",
    ]
    assert body(first)[:6] == [
        "inline AllReduceBestStrategyTableType AllReduceBestStrategyTableSM90 = {",
        "    {",
        "        // TP=2",
        "        { // Fusion=NONE",
        "            {4,4,4,4,4,4,4,4,4,4,4,4,0,0,0}, // hidden_size=128",
        "            {4,4,4,4,4,4,4,4,4,4,4,4,4,0,0}, // hidden_size=256",
    ]
    (read,) = cpp_lookup.parse(first)
    assert read == published()
    ours = cpp_lookup.tables_of(read, "nvlink")
    again = cpp_lookup.emit([cpp_lookup.sample(90, ours)])
    assert body(again) == body(first)
    assert all(f"// TP={tp}: digest sha256:{ours[tp].digest}" in again for tp in TP_SIZES)
    (third,) = cpp_lookup.parse(again)
    assert cpp_lookup.emit([cpp_lookup.sample(90, cpp_lookup.tables_of(third, "nvlink"))]) == again


def test_every_point_and_what_lies_between():
    table = cpp_lookup.tables_of(published(), "nvlink")[8]
    for hidden, row in zip(HIDDEN, PUBLISHED[8], strict=True):
        for tokens, value in zip(TOKENS, unrolled(row), strict=True):
            entry = table.lookup("bf16", Fusion.NONE, tokens, hidden)
            assert (int(entry.strategy), entry.source) == (value, "table")
    assert table.lookup("bf16", Fusion.NONE, 64, 5120).strategy == 4  # as 4096, the nearer one
    assert table.lookup("bf16", Fusion.NONE, 64, 6000).strategy == 0
    for tokens, hidden in [(1, 127), (1, 8193), (16385, 8192)]:
        assert table.lookup("bf16", Fusion.NONE, tokens, hidden).source == "estimated"


def test_a_header_in_their_formatting():
    rows = "{4, 4, 0}, {4, 5, 0}"
    text = f"""
    // TP:[2, 4]
    // Fusion:['NONE', 'RESIDUAL_RMS_NORM']
    // Hidden:[512, 1024] Tokens:[1, 8, 64]
    using AllReduceBestStrategyTableType = std::vector<std::vector<std::vector<std::vector<int>>>>;
    inline AllReduceBestStrategyTableType AllReduceBestStrategyTableSM100
        = {{{{    // TP=2 {{
           {{{rows}}}, {{/* }} */ {rows}}}}}, {{ {{{rows}}},\n {{{rows}}}, }} }};
    inline const std::unordered_map<int, T> AllReduceBestStrategyTable = {{ {{100, AllReduceBestStrategyTableSM100}}, }};
    """
    (read,) = cpp_lookup.parse(text)
    assert (read.sm, read.tp_sizes, read.hidden, read.tokens) == (100, (2, 4), (512, 1024), (1, 8, 64))
    assert read.fusions == LOOKUP_FUSIONS[:2]
    assert read.values[1][0] == ((4, 4, 0), (4, 5, 0))
    table = cpp_lookup.tables_of(read, "nvlink")[2]
    assert table.lookup("bf16", Fusion.NONE, 8, 1024).strategy is Strategy.TWOSHOT


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: "", "holds no"),
        (lambda text: text[: len(text) // 2], "never closed"),
        (lambda text: text.replace("{4,4,4,4,4,4,4,4,4,4,4,4,0,0,0},", "{4,4},", 1), "different lengths"),
        (lambda text: text.replace("0,0,0}", "0,0,77}", 1), "77 is not a strategy's number"),
        (lambda text: text.replace("0,0,0}", "0,0,kNone}", 1), "not a table of numbers"),
        (lambda text: text.replace("0,0,0}", "0,0}").replace("0,0,0}", "0,0}"), "different lengths"),
    ],
)
def test_faulty_text(damage, says):
    with pytest.raises(TableError, match=says):
        cpp_lookup.parse(damage(cpp_lookup.emit([published()])), "x.cpp")


def test_an_unmeasured_size_is_filled_from_the_seed_and_marked():
    here = Fingerprint(90, "nvlink", 4)
    lookup = cpp_lookup.sample(90, {4: Table(here, (), default(here))})
    text = cpp_lookup.emit([lookup])
    assert "// TP=8: not measured; every value is the seed's (scaled from sm90.nvlink.tp4)" in text
    assert "// TP=4: digest sha256:" in text
    assert lookup.values[2][0][0][0] == 4
    with pytest.raises(TableError, match="no table"):
        cpp_lookup.sample(90, {})


def test_unfused_exports_as_the_best_that_can_be_said():
    here, norm = Fingerprint(90, "nvlink", 2), Fusion.RESIDUAL_RMS_NORM
    unfused = Choice(Strategy.ONESHOT, unfused=True)

    def table(choice: Choice) -> Table:
        rows = (HiddenRange(128, 8192, (Span(1, 16384, choice),)),)
        costs = {Choice(Strategy.NCCL): 9, Choice(Strategy.ONESHOT): 8, Choice(Strategy.TWOSHOT): 7, unfused: 1}
        models = {f: {c: Latency(costs[c], 0, 0) for c in choices(f) if c in costs} for f in Fusion}
        return Table(here, (Section("bf16", norm, rows),), Seed("", models))

    place = LOOKUP_FUSIONS.index(norm)
    by_seed = cpp_lookup.sample(90, {2: table(unfused)})
    assert by_seed.values[0][place][0][:2] == (4, 5)  # TWOSHOT needs a token for each of the two ranks
    by_measure = cpp_lookup.sample(90, {2: table(unfused)}, expressible={2: table(Choice(Strategy.NCCL))})
    assert by_measure.values[0][place][0][0] == 0
    assert cpp_lookup.sample(90, {2: table(Choice(Strategy.ONESHOT))}).values[0][place][0][0] == 4


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(
    "strategy", ["MNNVL", "SYMM_MEM", "UB", "MIN_LATENCY", "LOWPRECISION", "AUTO", "TWOSHOT", "NCCL_SYMMETRIC", "ONESHOT", "NCCL"]
)
def test_only_what_its_generator_writes(strategy, world):
    """TensorRT-LLM's generator considers four strategies, and its benchmark leaves TWOSHOT out below a token for each rank."""
    here, norm = Fingerprint(90, "nvlink", world), Fusion.RESIDUAL_RMS_NORM
    rows = (HiddenRange(128, 8192, (Span(1, 16384, Choice(Strategy[strategy])),)),)
    table = Table(here, (Section("bf16", norm, rows),), default(here))
    values = cpp_lookup.sample(90, {world: table}).values[TP_SIZES.index(world)][LOOKUP_FUSIONS.index(norm)]
    for row in values:
        for tokens, value in zip(TOKENS, row, strict=True):
            assert value in (0, 4, 5, 8)
            assert value != 5 or tokens >= world
            if strategy in ("TWOSHOT", "NCCL_SYMMETRIC", "ONESHOT", "NCCL") and tokens >= world:
                assert value == Strategy[strategy]


@given(tables(Fingerprint(90, "nvlink", 4)))
@settings(max_examples=8, deadline=None)
def test_samples_are_lookups(table):
    lookup = cpp_lookup.sample(90, {4: table})
    (read,) = cpp_lookup.parse(cpp_lookup.emit([lookup]))
    assert read.values == lookup.values
    for h, hidden in enumerate(HIDDEN):
        for t, tokens in enumerate(TOKENS):
            choice = Choice(table.lookup("bf16", Fusion.NONE, tokens, hidden).strategy)
            value = lookup.values[1][0][h][t]
            assert cpp_lookup.holds(Choice(Strategy(value)), tokens, 4)
            assert value == choice.strategy or not cpp_lookup.holds(choice, tokens, 4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="not run: needs g++")
def test_it_compiles_with_several_versions_in_one_file(tmp_path):
    here = Fingerprint(0, "shm", 2)
    off_gpu = cpp_lookup.sample(0, {2: Table(here, (), default(here))})
    (tmp_path / "generated_lookup_table.cpp").write_text(cpp_lookup.emit([published(), off_gpu]), encoding="utf-8")
    main = """
    #include <vector>
    #include <cstdio>
    using AllReduceBestStrategyTableType = std::vector<std::vector<std::vector<std::vector<int>>>>;
    #include "generated_lookup_table.cpp"
    int main() {
        for (auto& table : {AllReduceBestStrategyTableSM0, AllReduceBestStrategyTableSM90})
            for (auto& tp : table) for (auto& fusion : tp) for (auto& row : fusion) for (int value : row) std::printf("%d ", value);
    }
    """
    (tmp_path / "main.cpp").write_text(main, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", "-o", "dump", "main.cpp"], cwd=tmp_path, check=True)
    dumped = subprocess.run(["./dump"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    expected = [v for x in (off_gpu, published()) for tp in x.values for fusion in tp for row in fusion for v in row]
    assert list(map(int, dumped.split())) == expected
