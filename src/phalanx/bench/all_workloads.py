# SPDX-License-Identifier: Apache-2.0
"""Every workload through one engine: `phalanx bench all`. With several all-reduce strategies, one engine for each.

The report is written after each workload, and the same command again measures only what is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from phalanx.bench import latency, offline, report, roofline, throughput
from phalanx.bench.offline import BenchmarkTarget
from phalanx.bench.report import ResultRow
from phalanx.bench.roofline import Bandwidth
from phalanx.bench.workloads import Workload
from phalanx.config import EngineOptions
from phalanx.errors import OptionError
from phalanx.hardware import provenance
from phalanx.serve.llm import LLM

_STRATEGIES = get_args(EngineOptions.model_fields["allreduce_strategy"].annotation)


def parse_strategies(text: str) -> list[str]:
    """ "AUTO,NCCL" -> ["AUTO", "NCCL"]. Raises OptionError."""
    strategies = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in strategies if name not in _STRATEGIES]:
        raise OptionError(f"strategy {unknown[0]!r} is unknown", next=f"use {', '.join(_STRATEGIES)}, separated by commas")
    return strategies


def run(
    target: BenchmarkTarget, workloads: Sequence[Workload], strategies: Sequence[str], *, json_file: Path | None = None
) -> report.Document:
    """Measure each workload with each strategy, except those that `json_file` holds; write there after each. Returns the report.

    Raises what an LLM raises, and OptionError where the file holds another model, other workloads or other options.
    """
    offline.check(target, workloads)
    requested = {
        **offline.requested_options(target),
        "workloads": [each.name for each in workloads],
        "strategies": list(strategies),
    }
    requested.pop("allreduce_strategy", None)
    before = report.earlier(json_file, requested) or {"engines": {}, "results": [], "roof": Bandwidth(None).as_json()}
    document = {
        "about": provenance.collect(target.commit).as_json(),
        "asked": requested,
        **{name: before[name] for name in ("roof", "engines", "results")},
    }
    results: list[ResultRow] = document["results"]
    bandwidth: Bandwidth | None = None
    for strategy in strategies:
        known = {row["workload"] for row in results if row["allreduce_strategy"] == strategy}
        left = [workload for workload in workloads if workload.name not in known]
        if not left:
            continue
        if bandwidth is None:
            bandwidth = roofline.measure(target.device)
            document["roof"] = bandwidth.as_json()
        options = target.options.model_copy(update={"allreduce_strategy": strategy})
        chosen = dataclasses.replace(target, options=options)
        with offline.engine(chosen) as (llm, start_s):
            document["engines"][strategy] = offline.engine_summary(llm.facts, start_s)
            for workload in left:
                row = measure(chosen, llm, workload, bandwidth)
                results.append({"allreduce_strategy": strategy, **row, "measured": report.measured_at(document["about"])})
                report.save_progress(json_file, document)
    return document


def measure(target: BenchmarkTarget, llm: LLM, workload: Workload, bandwidth: Bandwidth) -> ResultRow:
    """One workload of either kind."""
    if workload.kind == "decode":
        return latency.measure(target, llm, workload, bandwidth)
    return throughput.measure(target, llm, workload, bandwidth)


def tables(document: report.Document) -> list[Any]:
    """One table per engine and, where there are several, one that compares them."""
    shown: list[Any] = []
    strategies = document["asked"]["strategies"]
    for strategy in strategies:
        view = {**document, "engine": document["engines"][strategy]}
        title = report.title(view) + (f"; allreduce_strategy {strategy}" if len(strategies) > 1 else "")
        lines = [_line(row) for row in _rows(document, strategy)]
        columns = ["workload", "ms per token", "output tok/s", "first token s", "seconds", "preempted", "of roofline"]
        shown.append(report.table(title, columns, lines, report.caption(view)))
    if len(strategies) > 1:
        shown.append(_comparison(document, strategies))
    return shown


def _rows(document: report.Document, strategy: str) -> list[ResultRow]:
    named = {row["workload"]: row for row in document["results"] if row["allreduce_strategy"] == strategy}
    return [named[name] for name in document["asked"]["workloads"]]


def _line(row: ResultRow) -> list[str]:
    of_roofline = report.percent_text(row["fraction_of_roof"])
    rate = "-" if row["output_tok_s"] is None else f"{row['output_tok_s']:,.0f}"
    if "tpot_ms" in row:
        return [row["workload"], f"{row['tpot_ms']:.3f}", rate, f"{row['prefill_s']:.4f}", "-", "-", of_roofline]
    return [row["workload"], "-", rate, "-", f"{row['seconds']:.1f}", f"{row['preemptions']:,}", of_roofline]


def _comparison(document: report.Document, strategies: Sequence[str]) -> Any:
    """Each strategy's figure, and by how much the first is faster than the last."""
    lines = []
    for rows in zip(*(_rows(document, strategy) for strategy in strategies), strict=True):
        decodes = "tpot_ms" in rows[0]
        figures = [row["tpot_ms"] if decodes else row["output_tok_s"] for row in rows]
        gain = figures[-1] / figures[0] - 1 if decodes else figures[0] / figures[-1] - 1
        shown = [f"{figure:.3f} ms" if decodes else f"{figure:,.0f} tok/s" for figure in figures]
        lines.append([rows[0]["workload"], *shown, f"{gain:+.1%}"])
    columns = ["workload", *strategies, f"{strategies[0]} over {strategies[-1]}"]
    return report.table(f"{document['asked']['model']}: all-reduce strategies", columns, lines)
