# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM's look-up table as C++ text: written from tables of Phalanx, and read into them.

[tp][fusion][hidden][tokens] = strategy number. It has powers of two only, no unfused strategies, and no sequence parallelism: its
callers need the whole residual.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import seed as seeds
from phalanx.tables.grid import HIDDEN, LOOKUP_FUSIONS, TOKENS, TP_SIZES
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import GENERATED, INCUMBENT, TENSORRT_LLM, Choice, Strategy
from phalanx.tables.table import HiddenRange, Section, Span, Table

_TYPE = "AllReduceBestStrategyTableType"
_NAME = re.compile(r"\bAllReduceBestStrategyTableSM(\d+)\s*=\s*(?=\{)")
_AXES = re.compile(r"\b(TP|Hidden|Tokens):\s*(\[[\d,\s]*\])")

Values = tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


@dataclass(frozen=True)
class CppLookupTable:
    """The table of one SM version: values[tp][fusion][hidden][tokens]. notes: the source of each TP size, for the comment."""

    sm: int
    values: Values
    notes: tuple[str, ...] = ()
    tp_sizes: tuple[int, ...] = TP_SIZES
    fusions: tuple[Fusion, ...] = LOOKUP_FUSIONS
    hidden: tuple[int, ...] = HIDDEN
    tokens: tuple[int, ...] = TOKENS


def sample(
    sm: int, tables: Mapping[int, Table], dtype: str = "bf16", expressible: Mapping[int, Table] | None = None
) -> CppLookupTable:
    """The tables of one SM version (by TP size, at least one) at the points of the grid.

    A missing TP size is filled from the seed of the nearest one. Where the table's choice is none that a look-up table `holds`, the
    `expressible` table answers, which was decided without such choices; then the seed among those that it holds.
    """
    if not tables:
        raise TableError(f"no table of sm{sm} to write", next="measure one with `phalanx allreduce tune`")
    values, notes = [], []
    for tp in TP_SIZES:
        table = tables.get(tp)
        if table is None:
            near = tables[min(tables, key=lambda world: (abs(math.log(world / tp)), world))]
            fingerprint = Fingerprint(sm, near.fingerprint.link, tp)
            seed = near.seed.scaled(near.fingerprint.world, tp, f"scaled from {near.fingerprint}")
            table = Table(fingerprint, (), seed)
            notes.append(f"not measured; every value is the seed's ({seed.origin})")
        else:
            notes.append(f"digest sha256:{table.digest}")
        substitute = (expressible or {}).get(tp)
        cells = [
            [[_value(table, substitute, dtype, fusion, t, h) for t in TOKENS] for h in HIDDEN] for fusion in LOOKUP_FUSIONS
        ]  # fmt: skip
        values.append(tuple(tuple(tuple(row) for row in rows) for rows in cells))
    return CppLookupTable(sm, tuple(values), tuple(notes))


def holds(choice: Choice, tokens: int, world: int) -> bool:
    """Whether a cell of TensorRT-LLM's table can hold a choice: its dispatcher takes the strategies of its generator, runs every
    fusion of ONESHOT and TWOSHOT in the same kernel, and TWOSHOT with a token for each rank."""
    enough = choice.strategy is not Strategy.TWOSHOT or tokens >= world
    return choice.strategy in GENERATED and not choice.unfused and enough


def _value(table: Table, substitute: Table | None, dtype: str, fusion: Fusion, tokens: int, hidden: int) -> int:
    world = table.fingerprint.world
    for one in (table, substitute) if substitute is not None else (table,):
        entry = one.lookup(dtype, fusion, tokens, hidden)
        # In both projects, NCCL's number means the collective and then a kernel.
        choice = Choice(entry.strategy, unfused=not entry.fused and Choice(entry.strategy).fuses(fusion))
        if holds(choice, tokens, world):
            return int(choice.strategy)
    nbytes = tokens * hidden * DTYPES[dtype].itemsize
    models = {choice: model for choice, model in table.seed.models[fusion].items() if holds(choice, tokens, world)}
    return int(min(models, key=lambda choice: models[choice].fs(tokens, nbytes), default=INCUMBENT).strategy)


def emit(lookups: Sequence[CppLookupTable]) -> str:
    """The text of generated_lookup_table.cpp: one table for each SM version, rising."""
    return "\n".join(_emit_one(lookup) for lookup in sorted(lookups, key=lambda lookup: lookup.sm))


def _emit_one(lookup: CppLookupTable) -> str:
    fusions = [fusion.name for fusion in lookup.fusions]
    lines = [
        "// AllReduce lookup: [tp][fusion][hidden][tokens] = strategy",
        f"// TP:{list(lookup.tp_sizes)} Fusion:{fusions}",
        f"// Hidden:{list(lookup.hidden)} Tokens:{list(lookup.tokens)}",
    ]
    lines += [f"// TP={tp}: {note}" for tp, note in zip(lookup.tp_sizes, lookup.notes, strict=False)]
    lines.append(f"inline {_TYPE} AllReduceBestStrategyTableSM{lookup.sm} = {{")
    for tp, by_fusion in zip(lookup.tp_sizes, lookup.values, strict=True):
        lines += ["    {", f"        // TP={tp}"]
        for fusion, rows in zip(lookup.fusions, by_fusion, strict=True):
            lines.append(f"        {{ // Fusion={fusion.name}")
            for hidden, row in zip(lookup.hidden, rows, strict=True):
                comma = "," if hidden != lookup.hidden[-1] else ""
                lines.append(f"            {{{','.join(map(str, row))}}}{comma} // hidden_size={hidden}")
            lines.append("        }" + ("," if fusion is not lookup.fusions[-1] else ""))
        lines.append("    }" + ("," if tp != lookup.tp_sizes[-1] else ""))
    return "\n".join([*lines, "};", ""])


def parse(text: str, source: str = "the C++ text") -> list[CppLookupTable]:
    """Every table in a file of TensorRT-LLM, complete headers included. Raises TableError for a file without a table, a ragged
    shape, unknown axes, or a number that is not a strategy's."""
    lookups = []
    for match in _NAME.finditer(text):
        where = f"{source}: AllReduceBestStrategyTableSM{match[1]}"
        lookups.append(_lookup(int(match[1]), _braces(text[match.end() :], where), text[: match.start()], where))
    if not lookups:
        raise TableError(f"{source} holds no AllReduceBestStrategyTableSM<version> = {{...}}", next="give a generated table")
    return lookups


def _braces(text: str, where: str) -> list[object]:
    """The nested lists of a C++ initializer at the beginning of `text`."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    depth, end = 0, -1
    for index, letter in enumerate(plain):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            end = index + 1
            break
    if end < 0:
        raise TableError(f"{where}: a brace is never closed", next="the file is truncated; restore it")
    body = re.sub(r",\s*\]", "]", plain[:end].replace("{", "[").replace("}", "]"))
    try:
        read = json.loads(body)
    except json.JSONDecodeError as error:
        raise TableError(f"{where}: not a table of numbers", why=str(error), next="restore the file") from None
    assert isinstance(read, list)
    return read


def _lookup(sm: int, read: list[object], before: str, where: str) -> CppLookupTable:
    shape: list[int] = []
    level: list[object] = [read]
    while level and all(isinstance(item, list) for item in level):
        counts = {len(item) for item in level if isinstance(item, list)}
        if len(counts) != 1 or 0 in counts:
            raise TableError(
                f"{where}: rows of different lengths {sorted(counts)}",
                next="[tp][fusion][hidden][tokens] needs rows of equal length",
            )
        shape.append(counts.pop())
        level = [cell for item in level if isinstance(item, list) for cell in item]
    if len(shape) != 4:
        raise TableError(f"{where}: {len(shape)} dimensions", next="[tp][fusion][hidden][tokens] has four")
    known = {int(strategy) for strategy in TENSORRT_LLM}
    for cell in level:
        if not isinstance(cell, int) or cell not in known:
            raise TableError(f"{where}: {cell!r} is not a strategy's number", next=f"use one of {sorted(known)}")
    axes = {name: tuple(json.loads(values)) for name, values in _AXES.findall(before)}
    tp_sizes = _axis("TP", shape[0], axes, TP_SIZES, where)
    hidden = _axis("Hidden", shape[2], axes, HIDDEN, where)
    tokens = _axis("Tokens", shape[3], axes, TOKENS, where)
    if shape[1] > len(LOOKUP_FUSIONS):
        raise TableError(f"{where}: {shape[1]} fusions", next=f"at most {[fusion.name for fusion in LOOKUP_FUSIONS]}")
    cells = iter(level)
    values = tuple(
        tuple(tuple(tuple(int(str(next(cells))) for _ in tokens) for _ in hidden) for _ in range(shape[1])) for _ in tp_sizes
    )
    return CppLookupTable(sm, values, (), tp_sizes, LOOKUP_FUSIONS[: shape[1]], hidden, tokens)


def _axis(name: str, length: int, axes: dict[str, tuple[int, ...]], usual: tuple[int, ...], where: str) -> tuple[int, ...]:
    """The axis that the comment names if it fits the table (TensorRT-LLM's comments do not always), else the usual one."""
    stated = axes.get(name, ())
    if len(stated) == length and list(stated) == sorted(set(stated)) and stated[0] > 0:
        return stated
    if len(usual) == length:
        return usual
    raise TableError(
        f"{where}: {length} values along {name}", held=f"known: {list(usual)}", next="name the axis in a comment above"
    )


def tables_of(lookup: CppLookupTable, link: str, dtype: str = "bf16") -> dict[int, Table]:
    """One table for each TP size. Between two points the nearer one (by ratio) answers, outside them the seed."""
    provenance = {"by": f"imported from a look-up table of sm{lookup.sm}"}
    hidden, tokens = _ranges(lookup.hidden), _ranges(lookup.tokens)
    tables = {}
    for tp, by_fusion in zip(lookup.tp_sizes, lookup.values, strict=True):
        sections = []
        for fusion, rows in zip(lookup.fusions, by_fusion, strict=True):
            ranged = (HiddenRange(*ends, _spans(row, tokens)) for ends, row in zip(hidden, rows, strict=True))
            sections.append(Section(dtype, fusion, tuple(ranged)))
        fingerprint = Fingerprint(lookup.sm, link, tp)
        tables[tp] = Table(fingerprint, tuple(sections), seeds.default(fingerprint), provenance)
    return tables


def _ranges(points: Sequence[int]) -> list[tuple[int, int]]:
    """The range of each point: up to the geometric mean with the next one. The outermost points end their ranges."""
    ends = [max(math.isqrt(a * b), a) for a, b in pairwise(points)]
    firsts = [points[0], *(end + 1 for end in ends)]
    return list(zip(firsts, [*ends, points[-1]], strict=True))


def _spans(row: Sequence[int], ranges: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for (first, last), number in zip(ranges, row, strict=True):
        choice = Choice(Strategy(number))
        if spans and spans[-1].choice == choice:
            first = spans.pop().first
        spans.append(Span(first, last, choice))
    return tuple(spans)
