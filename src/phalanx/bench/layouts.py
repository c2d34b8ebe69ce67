# SPDX-License-Identifier: Apache-2.0
"""Layouts of one model side by side, out of reports of `phalanx bench all`: `phalanx bench layouts`. The best of each column is
marked and named, among layouts of equally many GPUs."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.bench import report
from phalanx.bench.workloads import parse
from phalanx.errors import OptionError
from phalanx.layout.layout import OPTIONS, Layout

MAY_DIFFER = {
    *OPTIONS.values(), "expert_exchange", "expert_traffic", "allreduce_strategy", "max_batch_size",
    "kv_cache_free_gpu_memory_fraction", "workloads", "strategies",
}  # fmt: skip
"""Options that reports need not have alike. Any other that differs would be taken for what a layout does."""


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
    """figures: of each layout and column the median over the reports that have it."""

    model: str
    device: str
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
    report of `bench all`, for reports of different devices or options, and for those that have no workload in common."""
    documents = [_read(path) for path in paths]
    alike = [{**document["asked"], "device": _device(document)} for document in documents]
    for path, options in zip(paths, alike, strict=True):
        differs = sorted(name for name in {*options, *alike[0]} - MAY_DIFFER if options.get(name) != alike[0].get(name))
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
    figures = {key: statistics.median(each) for key, each in values.items()}
    comparison = Comparison(alike[0]["model"], alike[0]["device"], _engine(documents[0])["dtype"], figures)
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
        if document["engines"] and document["results"] and document["asked"]["model"] and _device(document):
            return document
        why = "it has no results"
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = report.os_failure(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    raise OptionError(
        f"{path} is no report of `phalanx bench all`", why=why, next="write one with: phalanx bench all MODEL --json FILE"
    )


def _engine(document: dict[str, Any]) -> dict[str, Any]:
    engine: dict[str, Any] = next(iter(document["engines"].values()))
    return engine


def _device(document: dict[str, Any]) -> str:
    return report.device_name(document["about"], _engine(document))


def _figures(document: dict[str, Any]) -> Iterator[tuple[MeasuredLayout, Column, float]]:
    options = document["asked"]
    sizes = {size: options[name] for size, name in OPTIONS.items() if name in options}
    layout = Layout(**sizes)
    exchange = options.get("expert_exchange", "AUTO") if layout.dp > 1 else "AUTO"
    name = layout.name if exchange == "AUTO" else f"{layout.name}, {exchange}"
    for row in document["results"]:
        strategy = row["allreduce_strategy"]
        column = Column(row["workload"], options.get("expert_traffic"))
        value = row["output_tok_s"] if column.is_rate else row["tpot_ms"]
        yield MeasuredLayout(layout.gpus, name if strategy == "AUTO" else f"{name}, {strategy}"), column, value


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
    titles = [re.sub(r" (?=ep |moe_ep |\+ |x )", "\n", f"{layout.name}\n{_gpus(layout.gpus)}") for layout in layouts]
    shown = [report.table(f"{comparison.model}: layouts", ["workload", *titles], lines)]
    for gpus in sorted({layout.gpus for layout in layouts}):
        winners = [(column, name, comparison.best(column, gpus)) for column, name in zip(comparison.columns, names, strict=True)]
        texts = [
            f"{name}: {layout.name} ({column.text(comparison.figures[layout, column])} {column.unit})"
            for column, name, layout in winners
            if layout is not None
        ]
        if texts:
            shown.append(f"best on {_gpus(gpus)}: {'; '.join(texts)}")
    return shown


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


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
