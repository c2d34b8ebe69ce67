# SPDX-License-Identifier: Apache-2.0
"""The plots of a folder of CSVs, and one self-contained HTML page with plots, winners, regret and the fit of the seed."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.dtypes import DTYPES
from phalanx.errors import TableError
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.table_file import write_whole
from phalanx.tune import plots, records
from phalanx.tune.codegen import DecidedBenchmark, decide_benchmarks
from phalanx.tune.fit import by_cell, chosen, regret, relative_error
from phalanx.tune.sweep import ALL_REDUCE, GEMM_ALL_REDUCE

if TYPE_CHECKING:
    from pandas import DataFrame

PLOTS: dict[str, Callable[..., Any]] = {
    "heatmap": plots.visualize_2d_heatmap,
    "best_strategy": plots.visualize_2d_best_strategy,
    "strategy_difference_heatmap": plots.visualize_strategy_difference_heatmaps,
}
REPORT = Path("viz") / "report.html"
OnFile = Callable[[str], None]

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{margin-top:2.5rem;border-bottom:2px solid #d9e2ec}h3{margin-top:1.8rem}
table{border-collapse:collapse;margin:.7rem 0;font-size:13px}td,th{border:1px solid #d9e2ec;padding:.2rem .6rem;text-align:right}
th{background:#f0f4f8}td:first-child,th:first-child{text-align:left}img{max-width:100%;height:auto;display:block;margin:.6rem 0}
.note{color:#52606d}details{margin:.4rem 0}
"""


def draw(folder: Path, on_file: OnFile | None = None) -> list[Path]:
    """Write `viz/{FUSION}/{stem}_{plot}.png` for every CSV and fusion, and `viz/report.html`; the paths written.

    Layers with their GEMM have plots of their own, `{stem}_gemm_{plot}.png`. A CSV of several dtypes gives one plot for each; all
    but the first have the dtype in their names. Raises TableError for a folder
    without CSVs, or with a faulty one, before anything is written.
    """
    benches = records.read_folder(folder)
    results = decide_benchmarks(benches)
    paths: list[Path] = []
    plots_of: dict[tuple[int, int], list[tuple[str, bytes]]] = defaultdict(list)
    for bench in benches:
        path = records.csv_path(folder, bench.world, bench.sm)
        frame = plots.read_frame(path)
        for fusion, op in product(Fusion, (ALL_REDUCE, GEMM_ALL_REDUCE)):
            suffix, title = ("_gemm", f"{fusion.name} with its GEMM") if op == GEMM_ALL_REDUCE else ("", fusion.name)
            rows = frame[(frame["fusion"] == fusion.name) & (frame["op"] == op)]
            measured = [dtype.long_name for dtype in DTYPES.values() if (rows["dtype"] == dtype.long_name).any()]
            for dtype in measured:
                stem = path.stem + suffix if dtype == measured[0] else f"{path.stem}{suffix}.{dtype}"
                for name, plot in PLOTS.items():
                    target = folder / "viz" / fusion.name / f"{stem}_{name}.png"
                    data = _draw(plot, rows[rows["dtype"] == dtype], fusion, op, target)
                    if data is not None:
                        plots_of[bench.sm, bench.world].append((f"{title} {dtype}: {name.replace('_', ' ')}", data))
                        paths.append(target)
                        if on_file is not None:
                            on_file(str(target))
    write_whole(folder / REPORT, page(results, plots_of))
    return [*paths, folder / REPORT]


def _draw(plot: Callable[..., Any], frame: DataFrame, fusion: Fusion, op: str, target: Path) -> bytes | None:
    """Draw one plot; None where only AUTO was measured, which has no winner."""
    if plot is plots.visualize_2d_best_strategy and set(frame["strategy"]) <= {"AUTO", "GEMM+AUTO"}:
        return None
    plot(frame, fusion.name, target, op=op)
    return target.read_bytes()


def page(results: list[DecidedBenchmark], plots_of: dict[tuple[int, int], list[tuple[str, bytes]]]) -> str:
    """The HTML of the report. Raises TableError for no benchmarks."""
    if not results:
        raise TableError("no benchmark to report on", next="measure with `phalanx allreduce bench`")
    out = io.StringIO()
    out.write(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>All-reduce</title><style>{_STYLE}</style>\n')
    out.write("<h1>All-reduce: what is fastest where</h1>\n")
    out.write('<p class="note">Times are microseconds: the median of the replays of the slowest rank. Regret is how much slower a ')
    out.write("decision is than the fastest measured choice of the same cell.</p>\n")
    for one in results:
        _section(out, one, plots_of.get((one.bench.sm, one.bench.world), []))
    return out.getvalue() + "</html>\n"


def _section(out: io.StringIO, one: DecidedBenchmark, images: list[tuple[str, bytes]]) -> None:
    bench, table = one.bench, one.table
    out.write(f"<h2>{html.escape(str(table.fingerprint))}</h2>\n<p>Table digest <code>{table.digest}</code></p>\n")
    _table(out, ["fact", "value"], [[name, text] for name, text in bench.facts.items()])
    out.write("<h3>Winners and regret</h3>\n")
    _table(out, ["fusion", "caller", "cells", "won by", "regret of the table", "regret of the seed"], _verdicts(one))
    out.write("<h3>The seed's fit: time = a + b x bytes + c x tokens</h3>\n")
    _table(out, ["fusion", "choice", "a (us)", "b (us per MiB)", "c (us per 1024 tokens)", "median error"], _models(one))
    for title, data in images:
        encoded = base64.b64encode(data).decode()
        out.write(f'<h3>{html.escape(title)}</h3>\n<img alt="{html.escape(title)}" src="data:image/png;base64,{encoded}">\n')
    if bench.skips:
        out.write(f"<details><summary>{len(bench.skips)} candidates were skipped</summary>\n")
        by_reason: dict[str, list[str]] = defaultdict(list)
        for task, reason in bench.skips.items():
            by_reason[reason].append(str(task))
        rows = [[reason, str(len(tasks)), tasks[0]] for reason, tasks in by_reason.items()]
        _table(out, ["reason", "candidates", "the first"], rows)
        out.write("</details>\n")


def _verdicts(one: DecidedBenchmark) -> list[list[str]]:
    rows = []
    for fusion, caller in product(Fusion, Caller):
        times = {task: us for task, us in one.bench.times.items() if task.fusion is fusion}
        cells = by_cell(times, caller)
        if not cells:
            continue
        wins = Counter(chosen(one.table, cell, caller).name(one.bench.sm) for cell in cells)
        won = ", ".join(f"{name} {count / len(cells):.0%}" for name, count in wins.most_common())
        seed = regret(times, one.table.seed) if caller is Caller.REPLICATED else "-"
        rows.append([fusion.name, caller.label, str(len(cells)), won, str(regret(times, one.table, (caller,))), str(seed)])
    return rows


def _models(one: DecidedBenchmark) -> list[list[str]]:
    rows = []
    for fusion, models in one.table.seed.models.items():
        for choice, model in models.items():
            kind = fusion, choice, ALL_REDUCE
            tasks = [(task, us) for task, us in one.bench.times.items() if (task.fusion, task.choice, task.op) == kind]
            if tasks:
                error = relative_error([(task.bytes, task.tokens, us) for task, us in tasks], model)
                a, b, c = model.a / 1e9, model.b * 2**20 / 1e9, model.c * 1024 / 1e9
                rows.append([fusion.name, choice.name(one.bench.sm), f"{a:.2f}", f"{b:.2f}", f"{c:.2f}", f"{error:.1%}"])
    return rows


def _table(out: io.StringIO, head: list[str], rows: list[list[str]]) -> None:
    out.write("<table><tr>" + "".join(f"<th>{html.escape(text)}</th>" for text in head) + "</tr>\n")
    for row in rows:
        out.write("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>\n")
    out.write("</table>\n")
