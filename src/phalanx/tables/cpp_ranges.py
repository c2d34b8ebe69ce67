# SPDX-License-Identifier: Apache-2.0
"""The C++ header of Phalanx: the tables by ranges, and a `lookup` that gives the answers of `Table.lookup` for every size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import MAX_BYTES, MAX_TOKENS
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import HAND_OVER, Section, Table

_NEVER = 2**63 - 1

_HEAD = """\
// SPDX-License-Identifier: Apache-2.0
// All-reduce tables by ranges of tokens and hidden sizes, written by `phalanx allreduce codegen`: tune again rather than edit.
// lookup() answers like phalanx.tables.Table.lookup in Python on every size; a test compiles this and compares.
{digests}
#ifndef PHALANX_ALLREDUCE_TABLES_HPP
#define PHALANX_ALLREDUCE_TABLES_HPP

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace phalanx {{
namespace allreduce {{

enum Dtype {{ {dtypes} }};
// What the caller allows: every rank gets the whole residual; the new residual may stay sharded over the ranks; and the sum is of a
// GEMM's output, which the GEMM can write straight to other ranks.
enum Caller {{ {callers} }};
// strategy: TensorRT-LLM's number, or 64 (RS_NORM_AG) or 65 (GEMM_RS).
// fused: the fusion runs in the collective's own kernel. measured: false where the seed answers.
struct Answer {{ int strategy; bool fused; bool measured; }};
struct Span {{ std::int64_t first, last; int strategy; bool fused; }};
struct Row {{ std::int64_t first, last; const Span* spans; int count; }};
struct Section {{ const Row* rows; int count; }};
struct Model {{ int strategy; bool fused; std::uint64_t a, b, c; }};
struct Seed {{ const Model* models; int count; }};
struct Table {{
    int sm; const char* link; int world; const char* digest;
    std::int64_t rs_norm_ag_min_tokens, gemm_rs_min_bytes;  // of the seed; the largest number: never
    Section sections[{caller_count}][{dtype_count}][{fusion_count}]; Seed seeds[{fusion_count}];
}};

"""

_TAIL = """
// The table of a machine (its link class as Python names it, for example "nvlink"), or nullptr.
inline const Table* find(int sm, const char* link, int world) {{
    for (const Table& table : kTables)
        if (table.sm == sm && table.world == world && std::strcmp(table.link, link) == 0) return &table;
    return nullptr;
}}

// A fusion's place in the tables, by its number. Throws for a number that is none.
inline int fusion_place(int fusion) {{
    switch (fusion) {{
{places}
    }}
    throw std::invalid_argument("unknown fusion");
}}

// Whether sequence parallelism has a fusion, by its place.
inline bool shards(int place) {{
    constexpr bool kShards[] = {{{shards}}};
    return kShards[place];
}}

template <typename Range>
const Range* holding(const Range* ranges, int count, std::int64_t value) {{
    const auto before = [](std::int64_t v, const Range& range) {{ return v < range.first; }};
    const Range* after = std::upper_bound(ranges, ranges + count, value, before);
    return after == ranges || value > (after - 1)->last ? nullptr : after - 1;
}}

// What to run for a tensor [tokens, hidden] of `dtype` per rank. Throws unless tokens and hidden are at least 1.
inline Answer lookup(const Table& table, Dtype dtype, int fusion, std::int64_t tokens, std::int64_t hidden,
                     Caller caller = REPLICATED) {{
    if (tokens < 1 || hidden < 1) throw std::invalid_argument("no message has fewer than 1 token or hidden size");
    const int place = fusion_place(fusion);
    constexpr std::int64_t kMaxBytes = {max_bytes}LL, kMaxTokens = {max_tokens}LL;
    constexpr std::int64_t kItem[] = {{{items}}};
    const std::int64_t t = std::min(tokens, kMaxBytes), h = std::min(hidden, kMaxBytes);
    const std::int64_t bytes = h > kMaxBytes / t ? kMaxBytes : std::min(t * h * kItem[dtype], kMaxBytes);
    for (int who = shards(place) ? caller : REPLICATED; who >= REPLICATED; --who) {{
        const Section& section = table.sections[who][dtype][place];
        const Row* row = holding(section.rows, section.count, hidden);
        const Span* span = row ? holding(row->spans, row->count, tokens) : nullptr;
        if (span && span->strategy != {auto_number}) return {{span->strategy, span->fused, true}};
        if (span || who == REPLICATED || tokens < table.rs_norm_ag_min_tokens) continue;
        if (who == GEMM && bytes >= table.gemm_rs_min_bytes) return {{{gemm_rs}, true, false}};
        if (who == SHARDED) return {{{rs_norm_ag}, true, false}};
    }}
    const Seed& seed = table.seeds[place];
    const Model* best = nullptr;
    std::uint64_t least = 0;
    for (const Model* model = seed.models; model != seed.models + seed.count; ++model) {{
        const std::uint64_t time = model->a + model->b * static_cast<std::uint64_t>(bytes)
            + model->c * static_cast<std::uint64_t>(std::min(tokens, kMaxTokens));
        if (!best || time < least) {{ best = model; least = time; }}
    }}
    return {{best->strategy, best->fused, false}};
}}

}}  // namespace allreduce
}}  // namespace phalanx

#endif  // PHALANX_ALLREDUCE_TABLES_HPP
"""


def emit(tables: Sequence[Table]) -> str:
    """The header for these tables, at least one, of any machines."""
    if not tables:
        raise TableError("no table to write", next="measure one with `phalanx allreduce tune`")
    ordered = sorted(tables, key=lambda table: (table.fingerprint.sm, table.fingerprint.link, table.fingerprint.world))
    lines: list[str] = []
    places = [_table(table, number, lines) for number, table in enumerate(ordered)]
    lines += ["static constexpr Table kTables[] = {", *places, "};"]
    head = _HEAD.format(
        digests="\n".join(f"// {table.fingerprint} sha256:{table.digest}" for table in ordered),
        dtypes=", ".join(DTYPES),
        callers=", ".join(caller.name for caller in Caller),
        caller_count=len(Caller),
        dtype_count=len(DTYPES),
        fusion_count=len(Fusion),
    )
    tail = _TAIL.format(
        places="\n".join(f"        case {int(fusion)}: return {place};  // {fusion.name}" for place, fusion in enumerate(Fusion)),
        shards=", ".join(_bool(fusion.shards) for fusion in Fusion),
        auto_number=int(HAND_OVER.strategy),
        rs_norm_ag=int(Strategy.RS_NORM_AG),
        gemm_rs=int(Strategy.GEMM_RS),
        max_bytes=MAX_BYTES,
        max_tokens=MAX_TOKENS,
        items=", ".join(map(str, (dtype.itemsize for dtype in DTYPES.values()))),
    )
    return head + "\n".join(lines) + tail


def _table(table: Table, number: int, lines: list[str]) -> str:
    """Write the arrays of one table to `lines`; returns its entry of the array of tables."""
    written: dict[tuple[str, Fusion, Caller], str] = {}
    sections = []
    for caller, dtype, fusion in product(Caller, DTYPES, Fusion):
        section = table.section_for(dtype, fusion, caller) if caller is Caller.REPLICATED or fusion.shards else None
        if section is None:
            sections.append("{nullptr, 0}")
            continue
        key = section.dtype, section.fusion, caller
        if key not in written:
            name = f"k{number}_{section.dtype}_{int(section.fusion)}" + (f"_{caller.label}" if caller else "")
            written[key] = _section(section, name, lines)
        sections.append(written[key])
    seeds = []
    for fusion in Fusion:
        name = f"k{number}_seed_{int(fusion)}"
        models = [
            f"{{{int(choice.strategy)}, {_bool(choice.fuses(fusion))}, {a}ULL, {b}ULL, {c}ULL}}"
            for choice, (a, b, c) in table.seed.models[fusion].items()
        ]
        lines.append(f"static constexpr Model {name}[] = {{{', '.join(models)}}};")
        seeds.append(f"{{{name}, {len(models)}}}")
    machine = table.fingerprint
    rows = [_braces(sections[start : start + len(Fusion)]) for start in range(0, len(sections), len(Fusion))]
    by_caller = ",\n      ".join(_braces(rows[start : start + len(DTYPES)]) for start in range(0, len(rows), len(DTYPES)))
    sharded = table.seed.sequence_parallel
    thresholds = ", ".join(
        f"{_NEVER if value is None else value}LL" for value in (sharded.rs_norm_ag_min_tokens, sharded.gemm_rs_min_bytes)
    )
    head = f'{machine.sm}, "{machine.link}", {machine.world}, "{table.digest}"'
    return f"    {{{head}, {thresholds},\n     {{{by_caller}}},\n     {{{', '.join(seeds)}}}}},"


def _section(section: Section, name: str, lines: list[str]) -> str:
    rows = []
    for index, row in enumerate(section.hidden_ranges):
        spans = [
            f"{{{span.first}, {span.last}, {int(span.choice.strategy)}, {_bool(span.choice.fuses(section.fusion))}}}"
            for span in row.spans
        ]
        lines.append(f"static constexpr Span {name}_{index}[] = {{{', '.join(spans)}}};")
        rows.append(f"{{{row.first}, {row.last}, {name}_{index}, {len(spans)}}}")
    lines.append(f"static constexpr Row {name}[] = {{{', '.join(rows)}}};")
    return f"{{{name}, {len(rows)}}}"


def _braces(items: Sequence[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _bool(value: bool) -> str:
    return "true" if value else "false"
