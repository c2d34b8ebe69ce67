# SPDX-License-Identifier: Apache-2.0
"""Write the tables of measured figures in README and docs, and README's chart, from benchmarks/results.

python scripts/results_tables.py            writes them
python scripts/results_tables.py --check    exits with status 1 if a page or the chart is out of date

benchmarks/results/tables.toml says which measurements are behind each figure.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "pictures" / "beside_peers.svg"
CHARTED = "peers"
"""The table that the chart shows: workload, unit, ours, the peer's."""
HOW = {"median": statistics.median, "min": min, "max": max}


def tables() -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads((RESULTS / "tables.toml").read_text(encoding="utf-8"))["table"]
    return tables


@cache
def content(file: str) -> Any:
    text = (RESULTS / file).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines())) if file.endswith(".csv") else json.loads(text)


def measurements(run: str) -> list[float]:
    """The values that "FILE: PATH" selects; see tables.toml."""
    file, path = run.split(": ", 1)
    nodes = [content(file)]
    for part in re.findall(r"(?:[^/\[]|\[[^\]]*\])+", path):
        name, _, chosen = part.partition("[")
        if name:
            nodes = [node[name] for node in nodes]
        if chosen:
            wanted = dict(pair.split("=", 1) for pair in re.split(r",(?! )", chosen.rstrip("]")))
            nodes = [row for node in nodes for row in node if all(str(row.get(key)) == value for key, value in wanted.items())]
    if not nodes:
        raise LookupError(f"benchmarks/results/tables.toml: no measurement matches {run!r}")
    return [float(node) for node in nodes]


def figure(cell: dict[str, Any]) -> float:
    return float(HOW[cell.get("how", "median")]([value for run in cell["runs"] for value in measurements(run)]))


def printed(cell: str | dict[str, Any]) -> str:
    if isinstance(cell, str):
        return cell
    text: str = cell.get("text", "{}")
    return text.format(f"{figure(cell):,.{cell['digits']}f}")


def markdown(table: dict[str, Any]) -> str:
    rows = [table["head"], ["---"] * len(table["head"]), *([printed(cell) for cell in row["cells"]] for row in table["row"])]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page_with_tables(page: str) -> str:
    """The page's text with each of its tables written anew between its markers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for table in tables():
        if table["page"] != page:
            continue
        begin, end = f"<!-- results: {table['name']} -->\n", "\n<!-- end of results -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise LookupError(f"{page} lacks the markers {begin.strip()!r} and {end.strip()!r}")
        text = before + begin + markdown(table) + end + after
    return text


BAR, LEFT, WIDTH, ROW = 11, 385, 310, 44


def chart() -> str:
    """README's picture: for each workload two bars, ours and the peer's, as long as they are fast; the peer's is of length 1."""
    (table,) = [table for table in tables() if table["name"] == CHARTED]
    parts, longest = [], 0.0
    rows = []
    for row in table["row"]:
        workload, unit, ours, peer = row["cells"]
        ratio = figure(ours) / figure(peer)
        rows.append((workload, unit, ours, peer, ratio if unit.endswith("tok/s") else 1 / ratio))
        longest = max(longest, rows[-1][4])
    for place, (workload, unit, ours, peer, ratio) in enumerate(rows):
        y = 34 + place * ROW
        parts.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{workload}</text>')
        for offset, length, color, label in (
            (0, ratio, "#1f6feb", f"Phalanx: {printed(ours).strip('*')} {unit}, {ratio:.2f} times as fast"),
            (BAR + 2, 1.0, "#9aa4b2", printed(peer)),
        ):
            width = round(length / longest * WIDTH)
            parts.append(f'<rect x="{LEFT}" y="{y + offset}" width="{width}" height="{BAR}" fill="{color}"/>')
            parts.append(f'<text x="{LEFT + width + 6}" y="{y + offset + 9}" class="value">{label}</text>')
    height = 34 + len(rows) * ROW
    style = "text{font:13px sans-serif;fill:#57606a}.value{font-size:11px}.title{font-size:15px;font-weight:bold}"
    title = f'<text x="{LEFT}" y="18" class="title">Speed beside peers (longer is faster)</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" width="960" height="{height}">\n'
        f'<style>{style}</style>\n<rect width="960" height="{height}" fill="#ffffff"/>\n{title}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def outputs() -> dict[Path, str]:
    return {ROOT / page: page_with_tables(page) for page in sorted({table["page"] for table in tables()})} | {CHART: chart()}


def main(arguments: list[str]) -> int:
    stale = [path for path, text in outputs().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run: python scripts/results_tables.py")
        return 1 if stale else 0
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
