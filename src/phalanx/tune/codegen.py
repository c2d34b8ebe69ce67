# SPDX-License-Identifier: Apache-2.0
"""From a folder of CSVs to tables, and from those to C++: everything is decided first, then each file is written whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.tables import cpp_lookup, cpp_ranges
from phalanx.tables.shipped import file_name
from phalanx.tables.table import Table
from phalanx.tables.table_file import dumps, write_whole
from phalanx.tune.decide import decide
from phalanx.tune.fit import fit_seed, regret
from phalanx.tune.records import Benchmark

LOOKUP = Path("gen_heuristic_code") / "generated_lookup_table.cpp"
HEADER = Path("gen_heuristic_code") / "allreduce_tables.hpp"
TABLES = Path("tables")


@dataclass(frozen=True)
class DecidedBenchmark:
    """One benchmark and what came of it. expressible: the table among choices that TensorRT-LLM's C++ can say."""

    bench: Benchmark
    table: Table
    expressible: Table


def decide_benchmarks(benches: list[Benchmark], link: str | None = None) -> list[DecidedBenchmark]:
    """Decide each benchmark. link: of CSVs that do not say. Raises TableError for one with nothing to decide by."""
    found = []
    for bench in benches:
        fingerprint = bench.fingerprint(link)
        seed = fit_seed(bench.times, fingerprint)
        provenance = dict(bench.facts)
        table = decide(bench.times, fingerprint, samples=bench.samples, seed=seed)
        for name, held in (("regret of the table", regret(bench.times, table)), ("regret of the seed", regret(bench.times, seed))):
            if held is not None:
                provenance[name] = str(held)
        table = Table(fingerprint, table.sections, seed, provenance)
        plain = decide(bench.times, fingerprint, samples=bench.samples, seed=seed, expressible=True)
        found.append(DecidedBenchmark(bench, table, plain))
    return found


def write_tables(found: list[DecidedBenchmark], folder: Path) -> list[Path]:
    """`tables/{fingerprint}.json` for each."""
    texts = {folder / TABLES / file_name(one.table.fingerprint): dumps(one.table) for one in found}
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def write_code(tables: list[Table], folder: Path, expressible: list[Table] | None = None) -> list[Path]:
    """TensorRT-LLM's look-up table, one for each SM version, and our header with every table, under `folder`.

    Raises TableError: no tables, or two of one SM version and TP size (over different links) for the former, which has no place
    for both.
    """
    if not tables:
        raise TableError("no tables to write as C++", next="measure with `phalanx allreduce tune`")
    by_sm: dict[int, dict[int, Table]] = defaultdict(dict)
    for table in tables:
        sm, world = table.fingerprint.sm, table.fingerprint.world
        if world in by_sm[sm]:
            raise TableError(
                f"two tables of sm{sm} and tp{world}: {by_sm[sm][world].fingerprint} and {table.fingerprint}",
                why="the look-up table's key has no link class",
                next="give one of them",
            )
        by_sm[sm][world] = table
    plainer: dict[int, dict[int, Table]] = defaultdict(dict)
    for table in expressible or []:
        plainer[table.fingerprint.sm][table.fingerprint.world] = table
    lookups = [cpp_lookup.sample(sm, held, _dtype(held), plainer[sm]) for sm, held in by_sm.items()]
    texts = {folder / LOOKUP: cpp_lookup.emit(lookups), folder / HEADER: cpp_ranges.emit(tables)}
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def _dtype(tables: dict[int, Table]) -> str:
    """The look-up table has no dtype: bf16 where it was measured, else what was."""
    measured = {section.dtype for table in tables.values() for section in table.sections}
    return next((name for name in DTYPES if name in measured), "bf16")


def generate(benches: list[Benchmark], folder: Path, link: str | None = None) -> tuple[list[DecidedBenchmark], list[Path]]:
    """Tables and C++ of a folder's benchmarks, written below it."""
    found = decide_benchmarks(benches, link)
    paths = write_tables(found, folder)
    paths += write_code([one.table for one in found], folder, [one.expressible for one in found])
    return found, paths
