# SPDX-License-Identifier: Apache-2.0
"""Three plots of a benchmark: times, the fastest strategies, and how much slower each strategy is. x is tokens, y is hidden size.

Frames have the columns of a benchmark's CSV (or `fusion_op`, `time_us`, `time_ms`), of one TP size and dtype. A plot shows one
operation (the column `op`): all-reduces, or layers with their GEMM.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import OptionError, TableError
from phalanx.tune.sweep import ALL_REDUCE, GEMM_ALL_REDUCE, parse_op

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

# The hue is the strategy, the lightness whether it is fused. The colours differ in greyscale, too.
_COLOURS = {
    "NCCL": "#5b6770", "GLOO": "#5b6770", "ONESHOT": "#d9822b", "TWOSHOT": "#2b6cb0", "ONESHOT+UNFUSED": "#f5cf9f",
    "TWOSHOT+UNFUSED": "#a9cdec", "AUTO": "#7b5ea7", "NCCL_SYMMETRIC": "#3d8f63", "SYMM_MEM": "#8dc6a4", "MIN_LATENCY": "#c2557a",
    "LOWPRECISION": "#8a6d3b", "UB": "#b0a160", "MNNVL": "#4aa3a2", "RS_NORM_AG": "#1f7a4d",
}  # fmt: skip
_COLOURS |= {f"GEMM+{name}": colour for name, colour in _COLOURS.items()} | {"GEMM_RS": "#a4243b"}
_AUTO = ("AUTO", "GEMM+AUTO")
_OTHER = "#999999"
_UNMEASURED = "#eceff1"
_INK = "#1f2933"
_SLOWEST_SHOWN = 100.0  # percent at which the red of the difference plot is full

_MEASURED = "measured"
"""The attribute of a frame that tells GPU, driver and date, for the title."""
_NEEDED = ("num_tokens", "hidden_size", "strategy", "fusion", "time (us)")


def visualize_2d_heatmap(
    df: DataFrame, fusion_op: str = "NONE", save_path: str | Path | None = None, *, op: str = ALL_REDUCE
) -> Figure:  # fmt: skip
    """One panel per strategy, coloured by time on one logarithmic scale in microseconds, each cell with its time.

    Returns the figure, and writes it to `save_path` if one is given. Raises OptionError where `df` has no rows of the fusion,
    TableError where a column is missing.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator

    frame, title = _prepare(df, fusion_op, op)
    low, high = float(frame["time (us)"].min()), float(frame["time (us)"].max())
    norm = LogNorm(low, high if high > low else low * 1.01)
    names = _names(frame)
    figure, panels = _panels(frame, len(names), f"{title}: time")
    for axes, name in zip(panels, names, strict=True):
        grid = _grid(frame[frame["strategy"] == name], "time (us)", frame)
        image = axes.imshow(grid, cmap=_colour_map(), norm=norm, aspect="auto", origin="lower")
        axes.set_title(name, loc="left", color=_INK, fontweight="bold")
        _annotate(axes, grid, _time_text, lambda value: norm(value) > 0.45)
    bar = figure.colorbar(
        image,
        ax=panels,
        shrink=0.9,
        pad=0.015,
        aspect=45,
        ticks=LogLocator(subs=(1.0, 2.0, 5.0)),
        format=FuncFormatter(lambda value, _: f"{value:g}"),
    )
    bar.set_label("time (us), logarithmic")
    return _finish(figure, save_path)


def visualize_2d_best_strategy(
    df: DataFrame, fusion_op: str = "NONE", save_path: str | Path | None = None, *, op: str = ALL_REDUCE
) -> Figure:  # fmt: skip
    """The fastest strategy of each cell with its time, and how many cells each strategy wins. Arguments as above."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    frame, title = _prepare(df, fusion_op, op)
    frame = frame[~frame["strategy"].isin(_AUTO)]
    if frame.empty:
        raise OptionError(f"only AUTO was measured for {fusion_op}", next="also measure the strategies that it chooses among")
    names = _names(frame)
    best = frame.loc[frame.groupby(["num_tokens", "hidden_size"])["time (us)"].idxmin()].copy()
    best["index"] = best["strategy"].map(names.index)
    grid = _grid(best, "index", frame)
    times = _grid(best, "time (us)", frame)
    colours = [_COLOURS.get(name, _OTHER) for name in names]
    colour_map = ListedColormap(colours).with_extremes(bad=_UNMEASURED)
    figure, (axes,) = _panels(frame, 1, f"{title}: fastest strategy (time in us)")
    axes.imshow(grid, cmap=colour_map, vmin=-0.5, vmax=len(names) - 0.5, aspect="auto", origin="lower")
    dark = {index: _luminance(colour) < 0.45 for index, colour in enumerate(colours)}
    for row, column, index in _cells(grid):
        ink = "white" if dark[int(index)] else _INK
        _write(axes, column, row, _time_text(times[row, column]), ink)
    counts = best["strategy"].value_counts()
    handles = [
        Patch(
            facecolor=colour,
            edgecolor="#9aa5b1",
            label=f"{name}: {counts.get(name, 0)} cells, {counts.get(name, 0) / len(best):.0%}",
        )
        for name, colour in zip(names, colours, strict=True)
    ]
    columns = max(1, min(len(names), 5, int(figure.get_figwidth() // 2.9)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    return _finish(figure, save_path)


def visualize_strategy_difference_heatmaps(
    df: DataFrame, fusion_op: str = "NONE", save_path: str | Path | None = None, *, op: str = ALL_REDUCE
) -> Figure:  # fmt: skip
    """One panel per strategy: percent slower than the cell's fastest; white is optimal, red is slower. Arguments as above."""
    from matplotlib.colors import LinearSegmentedColormap

    frame, title = _prepare(df, fusion_op, op)
    concrete = frame[~frame["strategy"].isin(_AUTO)]
    best = (frame if concrete.empty else concrete).groupby(["num_tokens", "hidden_size"])["time (us)"].min().rename("best")
    attributes = frame.attrs
    frame = frame.join(best, on=["num_tokens", "hidden_size"])
    frame.attrs.update(attributes)
    # Noise may make AUTO faster than the fastest of the others: it counts as optimal.
    frame["slower"] = ((frame["time (us)"] / frame["best"] - 1) * 100).clip(lower=0)
    fades = ["#ffffff", "#fcd5ce", "#f28482", "#c1121f", "#7f0d15"]
    reds = LinearSegmentedColormap.from_list("optimal to slower", fades).with_extremes(bad=_UNMEASURED)
    names = _names(frame)
    figure, panels = _panels(frame, len(names), f"{title}: percent slower than the fastest (white: optimal)")
    for axes, name in zip(panels, names, strict=True):
        grid = _grid(frame[frame["strategy"] == name], "slower", frame)
        image = axes.imshow(grid, cmap=reds, vmin=0, vmax=_SLOWEST_SHOWN, aspect="auto", origin="lower")
        optimal = float((frame.loc[frame["strategy"] == name, "slower"] == 0).mean())
        axes.set_title(f"{name}  (optimal in {optimal:.0%} of its cells)", loc="left", color=_INK, fontweight="bold")
        _annotate(axes, grid, _percent_text, lambda value: value > 0.6 * _SLOWEST_SHOWN)
    bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.015, aspect=45, extend="max")
    bar.set_label("percent slower")
    return _finish(figure, save_path)


def read_frame(path: Path) -> DataFrame:
    """A benchmark's CSV as a frame, with the checks of `records.read`."""
    import pandas

    from phalanx.config.dtypes import DTYPES
    from phalanx.tune import records

    bench = records.read(path)
    rows = [
        (
            bench.world, DTYPES[task.dtype].long_name, task.bytes, task.tokens, task.hidden, task.name(bench.sm),
            task.fusion.name, task.op, us,
        )
        for task, us in bench.times.items()
    ]  # fmt: skip
    frame = pandas.DataFrame(rows, columns=list(records.COLUMNS))
    facts = bench.facts
    driver = f"driver {facts['driver']}" if "driver" in facts else ""
    frame.attrs[_MEASURED] = ", ".join(filter(None, (facts.get("gpu") or facts.get("cpu"), driver, facts.get("date"))))
    return frame


def _prepare(df: DataFrame, fusion_op: str, op: str) -> tuple[DataFrame, str]:
    """The rows of a fusion and operation with the usual column names, and the title of the plot. A frame without the column `op`
    holds all-reduces."""
    all_rows = df.rename(columns={"fusion_op": "fusion", "time_us": "time (us)"})
    if "time_ms" in all_rows.columns and "time (us)" not in all_rows.columns:
        all_rows = all_rows.assign(**{"time (us)": all_rows["time_ms"] * 1000.0})
    missing = [name for name in _NEEDED if name not in all_rows.columns]
    if missing:
        raise TableError(f"the frame lacks the column {missing[0]!r}", next=f"it needs {', '.join(_NEEDED)}")
    if "op" in all_rows.columns:
        all_rows = all_rows[all_rows["op"].map(parse_op) == op]
    frame = all_rows[all_rows["fusion"] == fusion_op].copy()
    if frame.empty:
        measured = ", ".join(sorted(set(all_rows["fusion"]))) or "no rows at all"
        raise OptionError(f"fusion {fusion_op!r} was not measured", held=f"measured: {measured}")
    title = [fusion_op, *(["with the GEMM before it"] if op == GEMM_ALL_REDUCE else [])]
    for column, text in (("world_size", "TP {}"), ("dtype", "{}")):
        if column in frame.columns:
            values = sorted(set(frame[column]))
            if len(values) > 1:
                raise OptionError(
                    f"a plot cannot show {column} {values}", why="a cell would have several times", next="plot one at a time"
                )
            title.append(text.format(values[0]))
    return frame, ", ".join(title)


def _names(frame: DataFrame) -> list[str]:
    """The strategies in the order of the palette, then the unknown ones."""
    order = list(_COLOURS)
    return sorted(set(frame["strategy"]), key=lambda name: (order.index(name) if name in order else len(order), name))


def _grid(part: DataFrame, column: str, frame: DataFrame) -> Any:
    """[hidden, tokens] of a column over the axes of `frame`; masked where not measured."""
    import numpy

    hidden, tokens = sorted(set(frame["hidden_size"])), sorted(set(frame["num_tokens"]))
    table = part.pivot_table(index="hidden_size", columns="num_tokens", values=column, aggfunc="min")
    return numpy.ma.masked_invalid(table.reindex(index=hidden, columns=tokens).to_numpy(dtype=float))


def _panels(frame: DataFrame, count: int, title: str) -> tuple[Figure, list[Axes]]:
    """`count` panels below each other, large enough to read the number in each cell."""
    from matplotlib.figure import Figure

    hidden, tokens = sorted(set(frame["hidden_size"])), sorted(set(frame["num_tokens"]))
    columns = 1 if len(tokens) > 6 or count < 3 else min(count, 3)
    rows = math.ceil(count / columns)
    width = max(5.5, 0.72 * len(tokens) + 1.2) * columns + 1.6
    height = max(2.4, 0.42 * len(hidden) + 1.0) * rows + 1.1
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    for axes in panels[:count]:
        axes.set_xticks(range(len(tokens)), [str(value) for value in tokens])
        axes.set_yticks(range(len(hidden)), [str(value) for value in hidden])
        axes.set_xticks([edge - 0.5 for edge in range(1, len(tokens))], minor=True)
        axes.set_yticks([edge - 0.5 for edge in range(1, len(hidden))], minor=True)
        axes.grid(which="minor", color="#dde3e8", linewidth=1)
        axes.tick_params(which="both", length=0, labelsize=9)
        axes.set_xlabel("tokens")
        axes.set_ylabel("hidden size")
    cells = frame[["strategy", "num_tokens", "hidden_size"] if count > 1 else ["num_tokens", "hidden_size"]].drop_duplicates()
    grey = "grey: not measured" if len(cells) < count * len(hidden) * len(tokens) else ""
    below = "; ".join(filter(None, (frame.attrs.get(_MEASURED), grey)))
    figure.suptitle(f"{title}\n{below}" if below else title, fontsize=13, color=_INK)
    return figure, panels[:count]


def _colour_map() -> Any:
    from matplotlib import colormaps

    return colormaps["viridis_r"].with_extremes(bad=_UNMEASURED)


def _cells(grid: Any) -> list[tuple[int, int, float]]:
    """(row, column, value) of what was measured."""
    import numpy

    mask = numpy.ma.getmaskarray(grid)
    return [(r, c, float(grid[r, c])) for r in range(grid.shape[0]) for c in range(grid.shape[1]) if not mask[r, c]]


def _annotate(axes: Axes, grid: Any, words: Any, dark: Any) -> None:
    for row, column, value in _cells(grid):
        _write(axes, column, row, words(value), "white" if dark(value) else _INK)


def _write(axes: Axes, column: int, row: int, words: str, ink: str) -> None:
    text = axes.text(column, row, words, ha="center", va="center", fontsize=9, color=ink)
    text.set_in_layout(False)  # it lies within its cell, and laying out hundreds of them takes most of a picture's time


def _time_text(us: float) -> str:
    if us < 9.95:
        return f"{us:.1f}" if us >= 0.995 else f"{us:.2f}"
    return f"{us:.0f}" if us < 9999.5 else f"{us / 1000:.0f}k"


def _percent_text(percent: float) -> str:
    if percent == 0:
        return "0"
    if percent < 9.95:
        return f"{percent:.1f}"
    return f"{percent:.0f}" if percent < 999.5 else f"{percent / 100 + 1:.0f}x"


def _luminance(colour: str) -> float:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _finish(figure: Figure, save_path: str | Path | None) -> Figure:
    """Write the picture whole or not at all, if a path is given. A palette of 256 colours makes it half as large."""
    if save_path is None:
        return figure
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    path = Path(save_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        if path.suffix == ".png":
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB").quantize(256).save(
                part, "png", optimize=True
            )
        else:
            figure.savefig(part, format=path.suffix.lstrip(".") or "png")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return figure
