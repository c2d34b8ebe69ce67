# SPDX-License-Identifier: Apache-2.0
"""Layouts of one model side by side, out of reports of `phalanx bench all`: `phalanx bench layouts`. The best of each column is
marked and named, among layouts of equally many GPUs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.bench import report
from phalanx.bench.workloads import parse
from phalanx.errors import OptionError

COMMON = ("model", "dtype", "kv_cache_dtype", "kv_block_size", "load_format", "max_num_tokens", "max_seq_len")
"""Options that all reports must have alike, or their figures say nothing of layouts."""

_FACTORS = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "expert_parallel_size",
    "moe_ep": "moe_expert_parallel_size",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A workload, with the power law that experts are drawn from: 0 is uniform; None: routers choose, or there are no experts."""

    workload: str
    expert_traffic: float | None

    @property
    def is_rate(self) -> bool:
        """Whether its figures are output tokens per second, where more is better, and not milliseconds per token."""
        return parse(self.workload).kind == "batch"

    def name(self, several: bool) -> str:
        """With the kind of routing, if there are several."""
        routing = {None: "routers", 0.0: "uniform"}.get(self.expert_traffic, f"power law {self.expert_traffic}")
        return f"{self.workload}, {routing}" if several else self.workload

    @property
    def unit(self) -> str:
        return "tok/s" if self.is_rate else "ms"

    def text(self, value: float) -> str:
        """Without the unit."""
        return f"{value:,.0f}" if self.is_rate else f"{value:.2f}"


@dataclass(frozen=True, order=True)
class MeasuredLayout:
    gpus: int
    name: str


@dataclass(frozen=True)
class Comparison:
    """figures: of each layout and column the median over the reports that have it. about: of the first report."""

    model: str
    about: dict[str, Any]
    dtype: str
    figures: dict[tuple[MeasuredLayout, Column], float]

    @property
    def layouts(self) -> list[MeasuredLayout]:
        return sorted({layout for layout, _ in self.figures})

    @property
    def columns(self) -> list[Column]:
        """Those that at least two layouts have."""
        columns = {column for _, column in self.figures if sum(each == column for _, each in self.figures) > 1}
        return sorted(columns, key=lambda each: (each.is_rate, parse(each.workload).requests, each.expert_traffic or 0.0))

    def column_names(self) -> list[str]:
        several = len({column.expert_traffic for column in self.columns}) > 1
        return [column.name(several) for column in self.columns]

    def best(self, column: Column, gpus: int) -> MeasuredLayout | None:
        """Of the layouts of so many GPUs that have this column; None where fewer than two do."""
        rivals = {layout: self.figures[layout, column] for layout in self.layouts
                  if layout.gpus == gpus and (layout, column) in self.figures}  # fmt: skip
        if len(rivals) < 2:
            return None
        return (max if column.is_rate else min)(rivals, key=lambda layout: rivals[layout])


def compare(paths: Sequence[Path], workloads: Sequence[str] = ()) -> Comparison:
    """Put reports beside one another. workloads: those that count; all, if there are none. Raises OptionError for a file that is no
    report of `bench all`, for reports of different models, dtypes or sizes, and for those that have no workload in common."""
    documents = [_read(path) for path in paths]
    first = documents[0]["asked"]
    for path, document in zip(paths, documents, strict=True):
        differs = [name for name in COMMON if document["asked"].get(name) != first.get(name)]
        if differs:
            raise OptionError(
                f"{path} cannot be compared with {paths[0]}", held=f"their {', '.join(differs)} differ",
                next="give reports that differ by their layouts alone",
            )  # fmt: skip
    values: dict[tuple[MeasuredLayout, Column], list[float]] = {}
    for document in documents:
        for layout, column, value in _figures(document):
            if workloads and column.workload not in workloads:
                continue
            values.setdefault((layout, column), []).append(value)
    engine = next(iter(documents[0]["engines"].values()))
    comparison = Comparison(
        first["model"], documents[0]["about"], engine["dtype"], {key: statistics.median(each) for key, each in values.items()}
    )
    if not comparison.columns:
        names = ", ".join(layout.name for layout in comparison.layouts) or "none"
        raise OptionError(
            "these reports cannot be compared", held=f"layouts: {names}",
            why="no two of them have a workload in common", next="give reports of the same workloads",
        )  # fmt: skip
    return comparison


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["engines"] and document["results"] and document["asked"]["model"]:
            return document
        why = "it has no results"
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = report.os_failure(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    raise OptionError(
        f"{path} is no report of `phalanx bench all`", why=why, next="write one with: phalanx bench all MODEL --json FILE"
    )


def _figures(document: dict[str, Any]) -> Iterator[tuple[MeasuredLayout, Column, float]]:
    options = document["asked"]
    factors = {short: int(options.get(name, 1)) for short, name in _FACTORS.items()}
    replicas = int(options.get("replicas", 1))
    gpus = factors["tp"] * factors["pp"] * factors["ep"] * replicas
    name = " ".join(f"{short} {size}" for short, size in factors.items() if size > 1 or short == "tp")
    name += f" x {replicas} replicas" if replicas > 1 else ""
    if factors["ep"] > 1 and options.get("expert_exchange", "AUTO") != "AUTO":
        name += f", {options['expert_exchange']}"
    for row in document["results"]:
        strategy = row["allreduce_strategy"]
        column = Column(row["workload"], options.get("expert_traffic"))
        value = row["output_tok_s"] if column.is_rate else row["tpot_ms"]
        yield MeasuredLayout(gpus, name if strategy == "AUTO" else f"{name}, {strategy}"), column, value


def tables(comparison: Comparison) -> list[Any]:
    """A row for each workload, with * at its best layout, and a line for each number of GPUs that names these."""
    layouts, names = comparison.layouts, comparison.column_names()
    lines = []
    for column, name in zip(comparison.columns, names, strict=True):
        cells = [f"{name}, {column.unit}"]
        for layout in layouts:
            value = comparison.figures.get((layout, column))
            mark = " *" if comparison.best(column, layout.gpus) == layout else ""
            cells.append("-" if value is None else column.text(value) + mark)
        lines.append(cells)
    titles = [f"{layout.name}\n{layout.gpus} GPU{'s' * (layout.gpus > 1)}" for layout in layouts]
    shown = [report.table(f"{comparison.model}: layouts", ["workload", *titles], lines)]
    for gpus in sorted({layout.gpus for layout in layouts}):
        winners = [(column, name, comparison.best(column, gpus)) for column, name in zip(comparison.columns, names, strict=True)]
        texts = [
            f"{name}: {layout.name} ({column.text(comparison.figures[layout, column])} {column.unit})"
            for column, name, layout in winners
            if layout is not None
        ]
        if texts:
            shown.append(f"best on {gpus} GPU{'s' * (gpus > 1)}: {'; '.join(texts)}")
    return shown


def as_json(comparison: Comparison) -> dict[str, Any]:
    """For programs."""
    return {
        "model": comparison.model, "dtype": comparison.dtype,
        "figures": [
            {"gpus": layout.gpus, "layout": layout.name, "workload": column.workload, "expert_traffic": column.expert_traffic,
             ("output_tok_s" if column.is_rate else "tpot_ms"): value, "best": comparison.best(column, layout.gpus) == layout}
            for (layout, column), value in sorted(comparison.figures.items(), key=lambda each: (each[0][0], each[0][1].workload))
        ],
    }  # fmt: skip
