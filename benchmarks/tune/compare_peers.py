# SPDX-License-Identifier: Apache-2.0
"""Ours beside every peer, cell by cell, as Markdown: `python -m benchmarks.tune.compare_peers [--data_dir benchmarks/results]`.

Ours is what AUTO runs: the measured time of the table's choice (of the AUTO rows where the benchmark measured them). Peers come
from peers_allreduce_h200_nvlink.csv, whose origin its .json tells; NCCL stands twice, from there and from our own run. A cell is
met when ours is at most 2 percent above the best peer.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.dtypes import parse_dtype
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import INCUMBENT, Choice, Strategy
from phalanx.tables.table import Table
from phalanx.tune import records
from phalanx.tune.codegen import decide_benchmarks
from phalanx.tune.records import Benchmark
from phalanx.tune.sweep import Task

RESULTS = Path(__file__).resolve().parent.parent / "results"
PEERS = "peers_allreduce_h200_nvlink.csv"
MET = 1.02
Cell = tuple[int, Fusion, int]


@dataclass(frozen=True)
class Row:
    """One cell: our time and what ran, NCCL's in the same run, and each peer family's best."""

    tokens: int
    ours: float
    choice: str
    nccl: float | None
    peers: dict[str, tuple[float, str]]

    @property
    def best(self) -> tuple[float, str] | None:
        return min(self.peers.values()) if self.peers else None

    @property
    def met(self) -> bool:
        return self.best is None or self.ours <= MET * self.best[0]


def read_peers(paths: list[Path]) -> dict[Cell, dict[str, tuple[float, str]]]:
    """{(world, fusion, tokens): {family: (us, implementation)}}, the best of each family (the first word of its name); ours, which
    `comm/peers.py` timed beside them, left out."""
    found: dict[Cell, dict[str, tuple[float, str]]] = defaultdict(dict)
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                cell = int(line["world_size"]), Fusion.named(line["fusion"]), int(line["num_tokens"])
                name, us = line["implementation"], float(line["time (us)"])
                family = name.split()[0]
                if family != "Phalanx":
                    found[cell][family] = min(found[cell].get(family, (us, name)), (us, name))
    return found


def rows(bench: Benchmark, table: Table, peers: dict[Cell, dict[str, tuple[float, str]]], fusion: Fusion, hidden: int) -> list[Row]:
    """Every cell of a fusion that was measured here, by rising tokens."""
    dtype = parse_dtype("bf16")
    found = []
    for tokens in sorted({task.tokens for task in bench.times if task.cell == (dtype, fusion, task.tokens, hidden)}):
        entry = table.lookup(dtype, fusion, tokens, hidden)
        plain = Choice(entry.strategy)
        choice = plain if entry.fused or not plain.fuses(fusion) else Choice(entry.strategy, unfused=True)
        measured = bench.times.get(Task(dtype, fusion, tokens, hidden, choice))
        ours = bench.times.get(Task(dtype, fusion, tokens, hidden, Choice(Strategy.AUTO)), measured)
        if ours is None:
            continue
        nccl = bench.times.get(Task(dtype, fusion, tokens, hidden, INCUMBENT))
        found.append(Row(tokens, ours, choice.name(bench.sm), nccl, peers.get((bench.world, fusion, tokens), {})))
    return found


def markdown(title: str, found: list[Row], hidden: int) -> list[str]:
    families = sorted({family for row in found for family in row.peers})
    lines = [f"### {title}", ""]
    lines.append("| tokens | KiB | **ours** | runs | NCCL, same run | " + " | ".join(families) + " | ours / best peer |")
    lines.append("|" + "---|" * (6 + len(families)))
    for row in found:
        cells = [_us(row.peers[family][0]) if family in row.peers else "" for family in families]
        nccl = "" if row.nccl is None else _us(row.nccl)
        ratio = "" if row.best is None else f"{row.ours / row.best[0]:.2f}" + ("" if row.met else " miss")
        size = f"{row.tokens * hidden * 2 / 1024:.0f}"
        lines.append(f"| {row.tokens} | {size} | **{_us(row.ours)}** | {row.choice} | {nccl} | {' | '.join(cells)} | {ratio} |")
    return [*lines, ""]


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def compare(folder: Path, peers_paths: list[Path], hidden: int) -> str:
    """The whole text: a table for each TP size and fusion, then the misses."""
    peers = read_peers(peers_paths)
    lines = [f"Microseconds, bf16, hidden {hidden}. A peer's column is the fastest of its kinds.", ""]
    misses, cells = [], 0
    for one in decide_benchmarks([bench for bench in records.read_folder(folder) if bench.sm > 0]):
        for fusion in Fusion:
            found = rows(one.bench, one.table, peers, fusion, hidden)
            if not found:
                continue
            lines += markdown(f"TP {one.bench.world}, {fusion.name}", found, hidden)
            cells += sum(row.best is not None for row in found)
            for row in found:
                if row.best is not None and not row.met:
                    us, name = row.best
                    where = f"TP {one.bench.world} {fusion.name}, {row.tokens} tokens"
                    misses.append(f"- {where}: {_us(row.ours)} us ({row.choice}) against {_us(us)} us of {name}")
    lines.append(f"{cells - len(misses)} of {cells} cells with a peer are met (at most {MET - 1:.0%} above the best).")
    return "\n".join([*lines, *(["", "Misses:", "", *misses] if misses else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=RESULTS, help="the folder with our CSVs")
    parser.add_argument("--peers", type=Path, nargs="+", default=[RESULTS / PEERS], help="the peers' CSVs")
    parser.add_argument("--hidden", type=int, default=8192)
    asked = parser.parse_args()
    print(compare(asked.data_dir, asked.peers, asked.hidden), end="")


if __name__ == "__main__":
    main()
