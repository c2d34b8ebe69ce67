# SPDX-License-Identifier: Apache-2.0
"""From CSVs to tables, and from tables to C++. Everything is decided first; then each file is written completely or not at all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.tables import cpp_lookup
from phalanx.tables.message import Caller
from phalanx.tables.shipped import file_name
from phalanx.tables.table import Table
from phalanx.tables.table_file import dumps, write_whole
from phalanx.tune.decide import decide
from phalanx.tune.fit import fit_seed, regret
from phalanx.tune.records import Benchmark

LOOKUP = Path("gen_heuristic_code") / "generated_lookup_table.cpp"
TABLES = Path("tables")


@dataclass(frozen=True)
class DecidedBenchmark:
    """A benchmark and its tables. expressible: the table among the choices that TensorRT-LLM's C++ can express."""

    bench: Benchmark
    table: Table
    expressible: Table


def decide_benchmarks(benches: list[Benchmark], link: str | None = None) -> list[DecidedBenchmark]:
    """Decide each benchmark. link: of CSVs without a sidecar. Raises TableError for a benchmark without usable times."""
    results = []
    for bench in benches:
        fingerprint = bench.fingerprint(link)
        seed = fit_seed(bench.times, fingerprint)
        provenance = dict(bench.facts)
        table = decide(bench.times, fingerprint, samples=bench.samples, skips=bench.skips, seed=seed)
        for name, value in (
            ("regret of the table", regret(bench.times, table)),
            ("regret of the table in layers", regret(bench.times, table, (Caller.SHARDED, Caller.GEMM))),
            ("regret of the seed", regret(bench.times, seed)),
        ):
            if value is not None:
                provenance[name] = str(value)
        table = Table(fingerprint, table.sections, seed, provenance)
        plain = decide(bench.times, fingerprint, samples=bench.samples, seed=seed, expressible=True)
        results.append(DecidedBenchmark(bench, table, plain))
    return results


def write_tables(results: list[DecidedBenchmark], folder: Path) -> list[Path]:
    """`tables/{fingerprint}.json` for each."""
    texts = {folder / TABLES / file_name(one.table.fingerprint): dumps(one.table) for one in results}
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def write_code(tables: list[Table], folder: Path, expressible: list[Table] | None = None) -> list[Path]:
    """Write TensorRT-LLM's look-up table, one for each SM version, under `folder`.

    Raises TableError for no tables, and for two of one SM version and TP size over different links, as the look-up table cannot
    hold both.
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
    by_sm_expressible: dict[int, dict[int, Table]] = defaultdict(dict)
    for table in expressible or []:
        by_sm_expressible[table.fingerprint.sm][table.fingerprint.world] = table
    lookups = [cpp_lookup.sample(sm, own, _dtype(own), by_sm_expressible[sm]) for sm, own in by_sm.items()]
    write_whole(folder / LOOKUP, cpp_lookup.emit(lookups))
    return [folder / LOOKUP]


def _dtype(tables: dict[int, Table]) -> str:
    """The dtype for the look-up table, which has none: bf16 where it was measured, else the one that was."""
    measured = {section.dtype for table in tables.values() for section in table.sections}
    return next((name for name in DTYPES if name in measured), "bf16")


def generate(benches: list[Benchmark], folder: Path, link: str | None = None) -> tuple[list[DecidedBenchmark], list[Path]]:
    """Write tables and C++ of these benchmarks below `folder`; (the decided benchmarks, the paths written)."""
    results = decide_benchmarks(benches, link)
    paths = write_tables(results, folder)
    paths += write_code([one.table for one in results], folder, [one.expressible for one in results])
    return results, paths
