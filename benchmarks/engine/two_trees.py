# SPDX-License-Identifier: Apache-2.0
"""Two trees of these sources, before and after a change, in turn on one machine: steps, throughput and starts, and their medians.

A round is, for each tree: `phalanx bench all` with an empty home, so that no kernel is kept, and a start with what that run kept.
Odd rounds begin with the tree before. Reports that are there already are not measured again.

    python -m benchmarks.engine.two_trees --before FOLDER=COMMIT --after FOLDER=COMMIT --out DIR -- llama-3-8b --dtype bf16
    python -m benchmarks.engine.two_trees --before COMMIT --after COMMIT --out DIR --rounds 0     reports that there are

What stands behind -- goes to `phalanx bench`. DIR keeps the reports: GROUP.TREE.ROUND.json and GROUP.TREE.kept.ROUND.json. Only
reports of one group, which is one machine and one engine, are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx.bench.workloads import parse

TREES = ("before", "after")
LONG_PROMPT = 2048
"""Tokens of a prompt from which on its time to the first token is a figure, too."""
WORKLOADS = ("decode-1", "decode-64", "batch-512x1000x1000")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for tree in TREES:
        parser.add_argument(f"--{tree}", required=True, metavar="FOLDER=COMMIT")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group", default="engine", help="name of the machine and engine, no dots")
    parser.add_argument("--workload", action="append", help=f"of `phalanx bench`; {', '.join(WORKLOADS)} if none is given")
    parser.add_argument("--name", default="two_trees", help="of the file of figures")
    parser.add_argument("bench", nargs="*", metavar="ARGUMENT", help="behind --: the model and its options")
    options = parser.parse_args(arguments)
    trees = {tree: getattr(options, tree).rpartition("=") for tree in TREES}
    for number in range(1, options.rounds + 1):
        for tree in TREES if number % 2 else TREES[::-1]:
            folder, _, commit = trees[tree]
            measure(Path(folder), commit, options, tree, number)
    figures = joined(options.out)
    if not figures["reports"]:
        parser.error(f"{options.out} holds no report GROUP.TREE.ROUND.json, and --rounds 0 measures none")
    for row in figures["medians"]:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    about = {**list(figures["reports"].values())[-1]["about"], "commit": None, "command": "python -m benchmarks.engine.two_trees"}
    commits = {tree: trees[tree][2] for tree in TREES}
    harness.write(options.name, {"about": about, "commits": commits, **figures}, options.out.parent)
    return 0


def measure(folder: Path, commit: str, options: argparse.Namespace, tree: str, number: int) -> None:
    """One round of one tree. Raises CalledProcessError where `phalanx bench` fails."""
    home = options.out / "homes" / f"{options.group}.{tree}.{number}"
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join(
        filter(None, (str(folder / "src"), os.environ.get("PYTHONPATH")))
    )}  # fmt: skip
    workloads = [argument for name in options.workload or WORKLOADS for argument in ("-w", name)]
    for kept, verb, chosen in (("", "all", workloads), (".kept", "latency", ["-w", "decode-1"])):
        report = options.out / f"{options.group}.{tree}{kept}.{number}.json"
        if report.exists():
            continue
        home.mkdir(parents=True, exist_ok=True)
        bench = [sys.executable, "-m", "phalanx", "bench", verb, *options.bench, *chosen]
        subprocess.run([*bench, "--commit", commit, "--json", str(report)], cwd=folder, env=environment, check=True)


def joined(folder: Path) -> dict[str, Any]:
    """What the reports in a folder say: every figure with its group, measure and tree; of those that both trees have, the median
    before, the median after and after / before; and the reports."""
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.*.json"))}
    figures = []
    for name, report in reports.items():
        group, tree = name.split(".")[:2]
        for measure, value in _figures(report, kept=".kept." in name):
            figures.append({"group": group, "measure": measure, "tree": tree, "report": name, "value": value})
    medians = []
    for group, measure in dict.fromkeys((figure["group"], figure["measure"]) for figure in figures):
        of_both = [each for each in figures if (each["group"], each["measure"]) == (group, measure)]
        values = {tree: [each["value"] for each in of_both if each["tree"] == tree] for tree in TREES}
        if all(values.values()):
            before, after = (statistics.median(values[tree]) for tree in TREES)
            medians.append(
                {"group": group, "measure": measure, "before": before, "after": after, "ratio": round(after / before, 4)}
            )
    return {"medians": medians, "figures": figures, "reports": reports}


def _figures(report: Mapping[str, Any], *, kept: bool) -> Iterator[tuple[str, float]]:
    """Each measure and its value; the measures of another all-reduce strategy than AUTO name it. Of several engines only the first
    one's start counts: the others find its kernels."""
    strategy, engine = next(iter(report["engines"].items())) if "engines" in report else ("AUTO", report["engine"])
    yield f"start with {'the kernels of an earlier one' if kept else 'no kernels'}{_by(strategy)}, s", engine["start_s"]
    for row in report["results"]:
        workload, by = parse(row["workload"]), _by(row.get("allreduce_strategy", "AUTO"))
        if workload.kind == "batch":
            yield f"{workload.name}{by}, tok/s", row["output_tok_s"]
            continue
        yield f"{workload.name}{by}, ms", row["tpot_ms"]
        if workload.input_len >= LONG_PROMPT:
            yield f"{workload.name}{by}, s to the first token", row["prefill_s"]


def _by(strategy: str) -> str:
    return "" if strategy == "AUTO" else f" by {strategy}"


if __name__ == "__main__":
    sys.exit(main())
