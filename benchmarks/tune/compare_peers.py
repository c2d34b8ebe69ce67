# SPDX-License-Identifier: Apache-2.0
"""Our all-reduce beside every peer, cell by cell, as Markdown:

    python -m benchmarks.tune.compare_peers [--data_dir benchmarks/results/allreduce]

Ours is what AUTO runs: the measured time of the table's choice, or of AUTO itself where the benchmark measured it. Peers come from
peers_allreduce_h200_nvlink.csv; its .json names their origin. NCCL appears twice: from there, and from our own run. A cell counts
as slower when our time is more than 2 percent above that of the fastest peer.
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
from phalanx.tune.sweep import ALL_REDUCE, Task

RESULTS = Path(__file__).resolve().parent.parent / "results"
PEERS = "peers_allreduce_h200_nvlink.csv"
TOLERANCE = 1.02
Key = tuple[int, Fusion, int]


@dataclass(frozen=True)
class Cell:
    """One cell: our time and strategy, NCCL's time in the same run, and the best of each peer family."""

    tokens: int
    ours: float
    choice: str
    nccl: float | None
    peers: dict[str, tuple[float, str]]

    @property
    def best(self) -> tuple[float, str] | None:
        return min(self.peers.values()) if self.peers else None

    @property
    def slower(self) -> bool:
        return self.best is not None and self.ours > TOLERANCE * self.best[0]


def read_peers(paths: list[Path]) -> dict[Key, dict[str, tuple[float, str]]]:
    """{(world, fusion, tokens): {family: (us, implementation)}}, the best of each family (the first word of its name), without
    ours, which `comm/peers.py` timed beside them."""
    times: dict[Key, dict[str, tuple[float, str]]] = defaultdict(dict)
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                cell = int(line["world_size"]), Fusion.named(line["fusion"]), int(line["num_tokens"])
                name, us = line["implementation"], float(line["time (us)"])
                family = name.split()[0]
                if family != "Phalanx":
                    times[cell][family] = min(times[cell].get(family, (us, name)), (us, name))
    return times


def rows(bench: Benchmark, table: Table, peers: dict[Key, dict[str, tuple[float, str]]], fusion: Fusion, hidden: int) -> list[Cell]:
    """The measured cells of a fusion, by rising tokens."""
    dtype = parse_dtype("bf16")
    cells = []
    for tokens in sorted({task.tokens for task in bench.times if task.cell == (dtype, fusion, task.tokens, hidden, ALL_REDUCE)}):
        entry = table.lookup(dtype, fusion, tokens, hidden)
        plain = Choice(entry.strategy)
        choice = plain if entry.fused or not plain.fuses(fusion) else Choice(entry.strategy, unfused=True)
        measured = bench.times.get(Task(dtype, fusion, tokens, hidden, choice))
        ours = bench.times.get(Task(dtype, fusion, tokens, hidden, Choice(Strategy.AUTO)), measured)
        if ours is None:
            continue
        nccl = bench.times.get(Task(dtype, fusion, tokens, hidden, INCUMBENT))
        cells.append(Cell(tokens, ours, choice.name(bench.sm), nccl, peers.get((bench.world, fusion, tokens), {})))
    return cells


def markdown(title: str, cells: list[Cell], hidden: int) -> list[str]:
    families = sorted({family for row in cells for family in row.peers})
    lines = [f"### {title}", ""]
    lines.append("| tokens | KiB | **ours** | runs | NCCL, same run | " + " | ".join(families) + " | ours / best peer |")
    lines.append("|" + "---|" * (6 + len(families)))
    for row in cells:
        shown = [_us(row.peers[family][0]) if family in row.peers else "" for family in families]
        nccl = "" if row.nccl is None else _us(row.nccl)
        ratio = "" if row.best is None else f"{row.ours / row.best[0]:.2f}" + (" slower" if row.slower else "")
        size = f"{row.tokens * hidden * 2 / 1024:.0f}"
        lines.append(f"| {row.tokens} | {size} | **{_us(row.ours)}** | {row.choice} | {nccl} | {' | '.join(shown)} | {ratio} |")
    return [*lines, ""]


def _us(us: float) -> str:
    return f"{us:.2f}" if us < 100 else f"{us:.1f}"


def compare(folder: Path, peers_paths: list[Path], hidden: int) -> str:
    """A table for each TP size and fusion, then the cells in which a peer is faster."""
    peers = read_peers(peers_paths)
    lines = [f"Microseconds, bf16, hidden {hidden}. A peer's column is the fastest of its kinds.", ""]
    slower, cells = [], 0
    for one in decide_benchmarks([bench for bench in records.read_folder(folder) if bench.sm > 0]):
        for fusion in Fusion:
            measured = rows(one.bench, one.table, peers, fusion, hidden)
            if not measured:
                continue
            lines += markdown(f"TP {one.bench.world}, {fusion.name}", measured, hidden)
            cells += sum(row.best is not None for row in measured)
            for row in measured:
                if row.best is not None and row.slower:
                    us, name = row.best
                    where = f"TP {one.bench.world} {fusion.name}, {row.tokens} tokens"
                    slower.append(f"- {where}: {_us(row.ours)} us ({row.choice}) against {_us(us)} us of {name}")
    lines.append(
        f"{cells - len(slower)} of {cells} cells with a peer are at most {TOLERANCE - 1:.0%} slower than the fastest peer."
    )
    return "\n".join([*lines, *(["", "Slower:", "", *slower] if slower else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=RESULTS, help="folder with our CSVs")
    parser.add_argument("--peers", type=Path, nargs="+", default=[RESULTS / PEERS], help="CSVs of peers")
    parser.add_argument("--hidden", type=int, default=8192)
    arguments = parser.parse_args()
    print(compare(arguments.data_dir, arguments.peers, arguments.hidden), end="")


if __name__ == "__main__":
    main()
