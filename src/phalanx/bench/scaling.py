# SPDX-License-Identifier: Apache-2.0
"""Throughput, latency and efficiency over numbers of GPUs: `phalanx bench scaling`. Each size is an engine of its own, one after
the other; the report is written after each.

Efficiency = throughput / (GPUs x throughput of one GPU). Where one GPU does not hold the model, the smallest size that ran takes
its place, and the column's title says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.bench import latency, offline, report, roofline, throughput
from phalanx.bench.offline import BenchmarkTarget
from phalanx.bench.report import ResultRow
from phalanx.bench.roofline import Bandwidth
from phalanx.bench.workloads import Workload, parse
from phalanx.errors import CapacityError, OptionError, PhalanxError
from phalanx.hardware import provenance

DEFAULT_SIZES = "1,2,4,8,1x2,2x2,4x2"
OK, OOM, NO_GPUS, FAILED = "ok", "OOM", "no GPUs", "failed"

Measure = Callable[[BenchmarkTarget, Sequence[Workload], Bandwidth], ResultRow]

_SIZE = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")
_MEMORY = re.compile(r"out of memory|OutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|cannot allocate memory", re.I)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """ "1,4,2x2" -> [(1, 1), (4, 1), (2, 2)]: (tp, pp). Raises OptionError."""
    matches = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(matches):
        raise OptionError(f"sizes {text!r} cannot be read", why="a size is TP or TPxPP", next=f"write them like {DEFAULT_SIZES}")
    return list(dict.fromkeys((int(match[1]), int(match[2] or 1)) for match in matches if match))


def run(
    target: BenchmarkTarget, sizes: Sequence[tuple[int, int]], batch: Workload, *decodes: Workload, json_file: Path | None = None,
    measure: Measure | None = None,
) -> report.Document:  # fmt: skip
    """Measure each size, except those that `json_file` holds; write there after each. Returns the report.

    A size that does not fit is a row with the status OOM; a size with more ranks than GPUs, and a size that fails, are rows with
    that status. Raises OptionError where the file holds another model, workload or options.
    """
    wanted = [batch, *decodes]
    offline.check(_sized(target, 1, 1), wanted)
    requested = offline.requested_options(target)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        requested.pop(name, None)
    requested |= {"workloads": [workload.name for workload in wanted]}
    rows: list[ResultRow] = (report.earlier(json_file, requested) or {"rows": []})["rows"]
    bandwidth: Bandwidth | None = None
    document: report.Document = {}
    about = provenance.collect(target.commit).as_json()
    for tp, pp in sizes:
        if not any((row["tp"], row["pp"]) == (tp, pp) and row["status"] != FAILED for row in rows):
            if bandwidth is None and _present(target, tp * pp):
                bandwidth = roofline.measure(target.device)
            rows = [row for row in rows if (row["tp"], row["pp"]) != (tp, pp)]
            row = _row(_sized(target, tp, pp), wanted, bandwidth or Bandwidth(None), measure or measure_size)
            rows.append({**row, "measured": report.measured_at(about)})
        document = {"about": about, "asked": requested, "rows": with_efficiency(rows)}
        report.save_progress(json_file, document)
    return document


def measure_size(target: BenchmarkTarget, workloads: Sequence[Workload], bandwidth: Bandwidth) -> ResultRow:
    """Throughput and latencies of one size, through an engine of its own."""
    batch, *decodes = workloads
    with offline.engine(target) as (llm, start_s):
        steps = [latency.measure(target, llm, decode, bandwidth) for decode in decodes]
        first = steps[0]
        whole_batch = throughput.measure(target, llm, batch, bandwidth)
        return {
            "output_tok_s": whole_batch["output_tok_s"], "tpot_ms": first["tpot_ms"], "preemptions": whole_batch["preemptions"],
            "fraction_of_roof": {"throughput": whole_batch["fraction_of_roof"], "latency": first["fraction_of_roof"]},
            "decodes": {
                row["workload"]: {name: row[name] for name in ("tpot_ms", "output_tok_s", "prefill_s", "fraction_of_roof")}
                for row in steps
            },
            "roof": bandwidth.as_json(), "engine": offline.engine_summary(llm.facts, start_s),
        }  # fmt: skip


def _row(target: BenchmarkTarget, workloads: Sequence[Workload], bandwidth: Bandwidth, measure: Measure) -> ResultRow:
    options = target.options
    row: ResultRow = {
        "tp": options.tensor_parallel_size, "pp": options.pipeline_parallel_size, "gpus": options.world_size,
        "nodes": options.nnodes,
    }  # fmt: skip
    if not _present(target, options.world_size):
        return {**row, "status": NO_GPUS, "why": f"{options.world_size} ranks, and this host has {target.gpus} GPUs"}
    offline.logger.info("tp %d, pp %d", row["tp"], row["pp"])
    try:
        return {**row, "status": OK, **measure(target, workloads, bandwidth)}
    except PhalanxError as error:
        status = OOM if is_out_of_memory(error) else FAILED
        offline.logger.warning("tp %d, pp %d: %s: %s", row["tp"], row["pp"], status, error)
        return {**row, "status": status, "why": str(error)}


def is_out_of_memory(error: PhalanxError) -> bool:
    """Whether an error means too little memory: the budget's own error, or a rank that ran out of memory."""
    return isinstance(error, CapacityError) or bool(_MEMORY.search(str(error)))


def _present(target: BenchmarkTarget, ranks: int) -> bool:
    return target.device != "cuda" or ranks // target.options.nnodes <= target.gpus


def _sized(target: BenchmarkTarget, tp: int, pp: int) -> BenchmarkTarget:
    options = target.options.model_copy(update={"tensor_parallel_size": tp, "pipeline_parallel_size": pp})
    return dataclasses.replace(target, options=options)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def with_efficiency(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows with "efficiency" (1 is perfect) and "efficiency_of" (the size that it is relative to, for example "TP1"); None
    where a row has no throughput."""
    base = reference(rows)
    completed = []
    for row in rows:
        row = {**row, "efficiency": None, "efficiency_of": None}
        if base is not None and row["status"] == OK:
            row["efficiency"] = efficiency(row["output_tok_s"], row["gpus"], base["output_tok_s"], base["gpus"])
            row["efficiency_of"] = name_of(base)
        completed.append(row)
    return completed


def efficiency(rate: float, gpus: int, base_rate: float, base_gpus: int) -> float:
    """Throughput per GPU, relative to that of the base."""
    return (rate / gpus) / (base_rate / base_gpus)


def reference(rows: Sequence[ResultRow]) -> ResultRow | None:
    """One GPU, else the smallest size that ran; of equal sizes the one with the larger tp."""
    completed = [row for row in rows if row["status"] == OK]
    return min(completed, key=lambda row: (row["gpus"], -row["tp"]), default=None)


def name_of(row: ResultRow) -> str:
    return f"TP{row['tp']}" + (f" x PP{row['pp']}" if row["pp"] > 1 else "")


def tables(document: report.Document) -> list[Any]:
    """Two tables and notes as lines: all sizes; and, where pipelines were measured, these by nodes beside the same tp without a
    pipeline."""
    rows = document["rows"]
    base = reference(rows)
    against = f"efficiency (of {name_of(base)})" if base is not None else "efficiency"
    batch, decode, *others = document["asked"]["workloads"]
    piped = any(row["pp"] > 1 for row in rows)
    columns = ["GPUs", "TP size", *(["PP size"] if piped else []), "throughput tok/s", "latency ms/token", against, "of roofline"]
    lines = [
        [str(row["gpus"]), str(row["tp"]), *([str(row["pp"])] if piped else []), *_figures(row)]
        for row in sorted(rows, key=lambda row: (row["pp"] > 1, row["gpus"], row["pp"]))
    ]
    notes = ["of roofline: throughput / latency; the roofline: bytes that a step must read, over measured bandwidth"]
    notes += [f"{name_of(row)}: {row['status']}: {row['why']}" for row in rows if row["status"] in (OOM, FAILED)]
    notes += [
        f"{name_of(row)}: the KV cache holds {capacity} of {wanted} requests at once"
        for row, capacity, wanted in _limited_by_memory(document)
    ]
    shown = [report.table(f"{document['asked']['model']}: {batch}, latency {decode}", columns, lines), *notes]
    if others:
        shown += ["", _steps(document)]
    if piped:
        beside = {row["tp"] for row in rows if row["pp"] > 1}
        lines = [
            [str(row["nodes"]), str(row["tp"]), str(row["pp"]), str(row["gpus"]), _figures(row)[0]]
            for row in sorted(rows, key=lambda row: (row["tp"], row["pp"]))
            if row["tp"] in beside
        ]
        columns = ["nodes", "TP", "PP", "GPUs", "throughput tok/s"]
        shown += ["", report.table(f"{document['asked']['model']}: pipelines", columns, lines)]
    return shown


def _limited_by_memory(document: report.Document) -> Iterator[tuple[ResultRow, int, int]]:
    """(row, requests that its KV cache holds at their full length, requests of the batch that could run at once) for each size
    where the first number is smaller. Part of what other sizes gain over it is their memory."""
    requested = document["asked"]
    batch = parse(requested["workloads"][0])
    for row in document["rows"]:
        if row["status"] == OK:
            capacity, wanted = row["engine"]["kv_tokens"] // batch.seq_len, min(batch.requests, row["engine"]["max_batch_size"])
            if capacity < wanted:
                yield row, capacity, wanted


def _steps(document: report.Document) -> Any:
    """Milliseconds per token of each decode workload, by size."""
    _, *decodes = document["asked"]["workloads"]
    lines = [
        [name_of(row), *(f"{row['decodes'][name]['tpot_ms']:.2f}" for name in decodes)]
        for row in document["rows"]
        if row["status"] == OK
    ]
    return report.table(f"{document['asked']['model']}: ms per token", ["size", *decodes], lines)


def _figures(row: ResultRow) -> list[str]:
    if row["status"] != OK:
        return [row["status"], "-", "-", "-"]
    of_roofline = [report.percent_text(row["fraction_of_roof"][what]) for what in ("throughput", "latency")]
    return [f"{row['output_tok_s']:,.0f}", f"{row['tpot_ms']:.2f}", f"{row['efficiency']:.0%}", " / ".join(of_roofline)]
