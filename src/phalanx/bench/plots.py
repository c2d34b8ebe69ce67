# SPDX-License-Identifier: Apache-2.0
"""The plot of `phalanx bench scaling`: throughput beside the ideal, latency, efficiency; sizes that did not run are named. And that
of `phalanx bench layouts`: a panel for each workload, the best layout of each number of GPUs in another colour."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.bench import report
from phalanx.bench.layouts import Comparison
from phalanx.bench.report import ResultRow
from phalanx.bench.scaling import OK, name_of, reference
from phalanx.errors import OptionError, PhalanxError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT, _IDEAL = "#1f2933", "#7b8794", "#c2cbd2"
_TENSOR, _PIPED = "#2b6cb0", "#d9822b"
_ACROSS = 4
"""Panels beside one another."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_path(plot: str | None, json_file: Path | None) -> Path | None:
    """The path of the plot: `plot`, else beside the report; None for no plot. Call it before anything runs.

    A file at `plot` is replaced. Raises OptionError where the plot cannot be drawn, or would replace something else.
    """
    if plot is None and (json_file is None or not can_draw()):
        return None
    path = Path(plot) if plot is not None else Path(str(json_file)).with_suffix(".png")
    failure = f"the plot cannot be drawn to {str(path)!r}"
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(failure, why=str(error), next="install phalanx[tune]") from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise OptionError(failure, why=f"the suffix {path.suffix!r} names no image format", next=f"use one of {', '.join(kinds)}")
    if json_file is not None and path.resolve() == json_file.resolve():
        raise OptionError(failure, held="the report is written there, too", next="give another --json, such as x.json")
    report.require_writable(path, failure)
    if plot is None and path.exists() and not Path(str(json_file)).exists():
        raise OptionError(failure, held="a file is there, and would be lost", next="give another --plot, or a new --json")
    return path


def draw(document: report.Document, path: Path) -> None:
    """Write the plot in the format that the path's suffix names. Raises PhalanxError where that fails."""
    from matplotlib.figure import Figure

    rows = sorted(document["rows"], key=lambda row: (row["pp"] > 1, row["gpus"], row["pp"]))
    base = reference(rows)
    batch, decode, *_ = document["asked"]["workloads"]
    figure = Figure(figsize=(max(11.0, 1.5 * len(rows) + 5), 4.6), dpi=130, layout="constrained")
    rate, latency, efficiency = figure.subplots(1, 3)
    figure.suptitle(f"{document['asked']['model']}: {_where(document)}", fontsize=12, color=_INK, x=0.01, ha="left")
    ideals = (
        [] if base is None else [base["output_tok_s"] / base["gpus"] * row["gpus"] if row["status"] == OK else 0.0 for row in rows]
    )
    if ideals:
        rate.bar(range(len(rows)), ideals, width=0.74, color="none", edgecolor=_IDEAL, linestyle="--", linewidth=1.2)
    _bars(rate, rows, [row.get("output_tok_s") for row in rows], "{:,.0f}", ideals)
    rate.set_title("output tokens/s (dashed: ideal)\n" + batch, loc="left", fontsize=10, color=_INK)
    _bars(latency, rows, [row.get("tpot_ms") for row in rows], "{:.2f}")
    latency.set_title("ms per token\n" + decode, loc="left", fontsize=10, color=_INK)
    _bars(efficiency, rows, [100 * row["efficiency"] if row["efficiency"] is not None else None for row in rows], "{:.0f}%")
    efficiency.axhline(100, color=_IDEAL, linestyle="--", linewidth=1.2, zorder=0)
    against = f"throughput / (GPUs x {name_of(base)} per GPU)" if base is not None else "no size ran"
    efficiency.set_title(f"efficiency\n{against}", loc="left", fontsize=10, color=_INK)
    _save(figure, path)


def draw_layouts(comparison: Comparison, path: Path) -> None:
    """Write the plot in the format that the path's suffix names. Raises PhalanxError where that fails."""
    from matplotlib.figure import Figure

    columns, layouts = comparison.columns, comparison.layouts
    across = min(len(columns), _ACROSS)
    down = -(-len(columns) // across)
    figure = Figure(figsize=(3.4 * across + 1.8, down * (0.36 * len(layouts) + 0.9) + 0.5), dpi=130, layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flat
    about = f"{comparison.model}: {comparison.dtype}, {comparison.device}; layout (GPUs), orange: the best of so many GPUs"
    figure.suptitle(about, fontsize=11, color=_INK, x=0.01, ha="left")
    for axes in panels[len(columns) :]:
        axes.set_visible(False)
    for axes, column, name in zip(panels, columns, comparison.column_names(), strict=False):
        values = [comparison.figures.get((layout, column)) for layout in layouts]
        top = max(value for value in values if value is not None)
        for y, (layout, value) in enumerate(zip(layouts, values, strict=True)):
            if value is None:
                axes.text(0.02 * top, y, "not measured", va="center", fontsize=8, color=_FAINT)
                continue
            axes.barh(y, value, height=0.72, color=_PIPED if comparison.best(column, layout.gpus) == layout else _TENSOR)
            axes.text(value + 0.02 * top, y, column.text(value), va="center", fontsize=9, color=_INK)
        unit = "output tokens/s: more is better" if column.is_rate else "ms per token: less is better"
        axes.set_title(f"{name}\n{unit}", loc="left", fontsize=10, color=_INK)
        axes.set_xlim(0, 1.25 * top)
        axes.set_xticks([])
        axes.set_yticks(range(len(layouts)), [f"{layout.name} ({layout.gpus})" for layout in layouts], fontsize=9)
        axes.tick_params(length=0, colors=_INK)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[0].invert_yaxis()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError, RuntimeError) as error:  # the latter two: a kind for which this machine lacks a program
        cure = "the same command with --json FILE draws it from FILE"
        why = report.os_failure(error) if isinstance(error, OSError) else str(error)
        raise PhalanxError(f"the plot cannot be drawn to {str(path)!r}", why=why, next=cure) from None


def _where(document: report.Document) -> str:
    engines: list[dict[str, Any]] = [row["engine"] for row in document["rows"] if "engine" in row]
    if not engines:
        return report.device_name(document["about"], {"device": "cuda"})
    return f"{engines[0]['dtype']}, {report.device_name(document['about'], engines[0])}"


def _bars(
    axes: Axes, rows: Sequence[ResultRow], values: Sequence[float | None], text: str, ceilings: Sequence[float] = ()
) -> None:  # fmt: skip
    """A bar for each size, with its figure; its status where it did not run."""
    top = max([value for value in values if value is not None] + list(ceilings), default=1.0)
    for x, (row, value) in enumerate(zip(rows, values, strict=True)):
        if value is None:
            axes.text(x, 0.02 * top, row["status"], ha="center", va="bottom", rotation=90, fontsize=10, color=_FAINT)
            continue
        axes.bar(x, value, width=0.74, color=_PIPED if row["pp"] > 1 else _TENSOR)
        figures = axes.text(x, value + 0.02 * top, text.format(value), ha="center", va="bottom", fontsize=9, color=_INK)
        figures.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # over the dashes of the ideal
    axes.set_xticks(range(len(rows)), [name_of(row).replace(" x ", "\n") for row in rows], fontsize=9)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.14 * top)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(length=0, colors=_INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
