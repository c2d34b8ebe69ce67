# SPDX-License-Identifier: Apache-2.0
"""What more GPUs bring: `phalanx bench scaling`. Each size is an engine of its own, one after the other; what is known is written
after each, so that nothing is lost by what happens later.

Efficiency = throughput / (GPUs x throughput of one GPU). Where one GPU does not hold the model, the smallest size that does takes
its place, and the column says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.bench import latency, offline, report, roofline, throughput
from phalanx.bench.offline import BenchmarkTarget
from phalanx.bench.roofline import Bandwidth
from phalanx.bench.workloads import Workload, parse
from phalanx.errors import CapacityError, OptionError, PhalanxError
from phalanx.hardware import provenance

DEFAULT_SIZES = "1,2,4,8,1x2,2x2,4x2"
OK, OOM, NO_GPUS, FAILED = "ok", "OOM", "no GPUs", "failed"

Row = dict[str, Any]
Measure = Callable[[BenchmarkTarget, Sequence[Workload], Bandwidth], Row]

_SIZE = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")
_MEMORY = re.compile(r"out of memory|OutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|cannot allocate memory", re.I)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """ "1,4,2x2" -> [(1, 1), (4, 1), (2, 2)]: (tp, pp). Raises OptionError."""
    found = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise OptionError(f"sizes {text!r} were asked for", why="a size is TP or TPxPP", next=f"write them like {DEFAULT_SIZES}")
    return list(dict.fromkeys((int(match[1]), int(match[2] or 1)) for match in found if match))


def run(
    target: BenchmarkTarget, sizes: Sequence[tuple[int, int]], batch: Workload, *decodes: Workload, json_file: Path | None = None,
    measure: Measure | None = None,
) -> report.Document:  # fmt: skip
    """Measure each size that `json_file` does not hold yet, and write there after each; the report.

    A size that does not fit is a row that says OOM, one with more ranks than GPUs a row that says so, and an error a row with that
    error. Raises OptionError where the file holds another model, workload or options.
    """
    wanted = [batch, *decodes]
    offline.check(_sized(target, 1, 1), wanted)
    asked = offline.requested_options(target)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        asked.pop(name, None)
    asked |= {"workloads": [workload.name for workload in wanted]}
    rows: list[Row] = (report.held(json_file, asked) or {"rows": []})["rows"]
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
        document = {"about": about, "asked": asked, "rows": with_efficiency(rows)}
        report.keep(json_file, document)
    return document


def measure_size(target: BenchmarkTarget, workloads: Sequence[Workload], bandwidth: Bandwidth) -> Row:
    """Throughput and latencies of one size, through an engine of its own."""
    batch, *decodes = workloads
    with offline.engine(target) as (llm, start_s):
        steps = [latency.measure(target, llm, decode, bandwidth) for decode in decodes]
        fast = steps[0]
        many = throughput.measure(target, llm, batch, bandwidth)
        return {
            "output_tok_s": many["output_tok_s"], "tpot_ms": fast["tpot_ms"], "preemptions": many["preemptions"],
            "fraction_of_roof": {"throughput": many["fraction_of_roof"], "latency": fast["fraction_of_roof"]},
            "decodes": {
                row["workload"]: {name: row[name] for name in ("tpot_ms", "output_tok_s", "prefill_s", "fraction_of_roof")}
                for row in steps
            },
            "roof": bandwidth.as_json(), "engine": offline.engine_summary(llm.facts, start_s),
        }  # fmt: skip


def _row(target: BenchmarkTarget, workloads: Sequence[Workload], bandwidth: Bandwidth, measure: Measure) -> Row:
    options = target.options
    row: Row = {
        "tp": options.tensor_parallel_size, "pp": options.pipeline_parallel_size, "gpus": options.world_size,
        "nodes": options.nnodes,
    }  # fmt: skip
    if not _present(target, options.world_size):
        return {**row, "status": NO_GPUS, "why": f"{options.world_size} ranks, and this host shows {target.gpus} GPUs"}
    offline.logger.info("tp %d, pp %d", row["tp"], row["pp"])
    try:
        return {**row, "status": OK, **measure(target, workloads, bandwidth)}
    except PhalanxError as error:
        status = OOM if is_out_of_memory(error) else FAILED
        offline.logger.warning("tp %d, pp %d: %s: %s", row["tp"], row["pp"], status, error)
        return {**row, "status": status, "why": str(error)}


def is_out_of_memory(error: PhalanxError) -> bool:
    """Whether an error says that there is too little memory: the budget's own, or a rank that ran out of it."""
    return isinstance(error, CapacityError) or bool(_MEMORY.search(str(error)))


def _present(target: BenchmarkTarget, ranks: int) -> bool:
    return target.device != "cuda" or ranks // target.options.nnodes <= target.gpus


def _sized(target: BenchmarkTarget, tp: int, pp: int) -> BenchmarkTarget:
    options = target.options.model_copy(update={"tensor_parallel_size": tp, "pipeline_parallel_size": pp})
    return dataclasses.replace(target, options=options)


# ---- what it means ---------------------------------------------------------------------------------------------------


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows with "efficiency" (1 is perfect) and "efficiency_of" (the size that it is against, for example "TP1"); None where a
    row has no throughput."""
    base = reference(rows)
    found = []
    for row in rows:
        row = {**row, "efficiency": None, "efficiency_of": None}
        if base is not None and row["status"] == OK:
            row["efficiency"] = efficiency(row["output_tok_s"], row["gpus"], base["output_tok_s"], base["gpus"])
            row["efficiency_of"] = name_of(base)
        found.append(row)
    return found


def efficiency(rate: float, gpus: int, base_rate: float, base_gpus: int) -> float:
    """Throughput per GPU, against that of the base."""
    return (rate / gpus) / (base_rate / base_gpus)


def reference(rows: Sequence[Row]) -> Row | None:
    """One GPU, else the smallest size that ran; of equal ones that with the larger tp."""
    ran = [row for row in rows if row["status"] == OK]
    return min(ran, key=lambda row: (row["gpus"], -row["tp"]), default=None)


def name_of(row: Row) -> str:
    return f"TP{row['tp']}" + (f" x PP{row['pp']}" if row["pp"] > 1 else "")


def tables(document: report.Document) -> list[Any]:
    """The guide's two tables, and notes as lines: over all sizes; and, where pipelines were measured, those by nodes beside the
    same tp without one."""
    rows = document["rows"]
    base = reference(rows)
    against = f"efficiency (of {name_of(base)})" if base is not None else "efficiency"
    batch, decode, *others = document["asked"]["workloads"]
    piped = any(row["pp"] > 1 for row in rows)
    columns = ["GPUs", "TP size", *(["PP size"] if piped else []), "throughput tok/s", "latency ms/token", against, "of the roof"]
    lines = [
        [str(row["gpus"]), str(row["tp"]), *([str(row["pp"])] if piped else []), *_figures(row)]
        for row in sorted(rows, key=lambda row: (row["pp"] > 1, row["gpus"], row["pp"]))
    ]
    notes = ["of the roof: throughput / latency; the roof: bytes that a step must read, over measured bandwidth"]
    notes += [f"{name_of(row)}: {row['status']}: {row['why']}" for row in rows if row["status"] in (OOM, FAILED)]
    notes += [f"{name_of(row)}: room for {room} of {many} requests at once" for row, room, many in _short_of_memory(document)]
    found = [report.table(f"{document['asked']['model']}: {batch}, latency {decode}", columns, lines), *notes]
    if others:
        found += ["", _steps(document)]
    if piped:
        beside = {row["tp"] for row in rows if row["pp"] > 1}
        lines = [
            [str(row["nodes"]), str(row["tp"]), str(row["pp"]), str(row["gpus"]), _figures(row)[0]]
            for row in sorted(rows, key=lambda row: (row["tp"], row["pp"]))
            if row["tp"] in beside
        ]
        columns = ["nodes", "TP", "PP", "GPUs", "throughput tok/s"]
        found += ["", report.table(f"{document['asked']['model']}: pipelines", columns, lines)]
    return found


def _short_of_memory(document: report.Document) -> Iterator[tuple[Row, int, int]]:
    """Each size whose KV cache holds fewer of the batch's requests at their full length than could run at once, how many it holds,
    and how many could: such a size works in turns, and what others have over it is memory, too."""
    asked = document["asked"]
    batch = parse(asked["workloads"][0])
    for row in document["rows"]:
        if row["status"] == OK:
            room, many = row["engine"]["kv_tokens"] // batch.seq_len, min(batch.requests, row["engine"]["max_batch_size"])
            if room < many:
                yield row, room, many


def _steps(document: report.Document) -> Any:
    """Milliseconds per token of each decode workload, by size."""
    _, *decodes = document["asked"]["workloads"]
    lines = [
        [name_of(row), *(f"{row['decodes'][name]['tpot_ms']:.2f}" for name in decodes)]
        for row in document["rows"]
        if row["status"] == OK
    ]
    return report.table(f"{document['asked']['model']}: ms per token", ["size", *decodes], lines)


def _figures(row: Row) -> list[str]:
    if row["status"] != OK:
        return [row["status"], "-", "-", "-"]
    roofs = [report.percent_text(row["fraction_of_roof"][what]) for what in ("throughput", "latency")]
    return [f"{row['output_tok_s']:,.0f}", f"{row['tpot_ms']:.2f}", f"{row['efficiency']:.0%}", " / ".join(roofs)]
