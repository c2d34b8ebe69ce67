# SPDX-License-Identifier: Apache-2.0
"""Every measured figure of README and docs is the median of measurements in benchmarks/results; figures.toml names them."""

from __future__ import annotations

import csv
import json
import re
import statistics
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.sources import ROOT

RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = tomllib.loads((Path(__file__).parent / "figures.toml").read_text(encoding="utf-8"))
RULES = CLAIMS["rule"]
OF_README = {entry["near"]: entry for entry in CLAIMS["figure"] if entry["page"] == "README.md" and "how" not in entry}
FIGURES = [
    figure | {"value": value, "runs": OF_README[figure["runs_of"]]["runs"] if "runs_of" in figure else runs}
    for figure in CLAIMS["figure"]
    for value, runs in zip(figure.get("values", [figure.get("value")]), figure.get("each", [figure.get("runs")]), strict=True)
]
BESIDE = "benchmarks/results/serving/README.md"
GENERATED = {
    "options.md": "test_documents.py compares it with the options",
    "guide.md": "predictions, not measurements; tests/scripts/test_guide_page.py compares them with what the commands print",
}
"""Pages without entries in figures.toml -> why."""
PAGES = sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED)])

NUMBER = r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)"
MEASURED = re.compile(
    rf"({NUMBER})(?:(?: to | and | or )({NUMBER}))?(?: |-)?(?:ms|us|s|tok/s|percent|%|GB/s|TB/s|seconds?|minutes?)(?![\w/])"
)


@cache
def lines_of(page: str) -> tuple[str, ...]:
    """The page's lines without its code blocks."""
    lines, code = [], False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        code = code != line.lstrip().startswith("```")
        if not code and not line.startswith("    "):
            lines.append(line)
    return tuple(lines)


@cache
def content(file: str) -> Any:
    text = (RESULTS / file).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines())) if file.endswith(".csv") else json.loads(text)


def measurements(run: str) -> list[float]:
    """The values that a line "FILE: PATH" of figures.toml selects."""
    file, path = run.split(": ", 1)
    nodes = [content(file)]
    for part in re.findall(r"(?:[^/\[]|\[[^\]]*\])+", path):
        name, _, chosen = part.partition("[")
        if name:
            nodes = [node[name] for node in nodes]
        if chosen:
            wanted = dict(pair.split("=", 1) for pair in re.split(r",(?! )", chosen.rstrip("]")))
            nodes = [row for node in nodes for row in node if all(str(row.get(key)) == value for key, value in wanted.items())]
    return [float(node) for node in nodes]


def computed(figure: dict[str, Any]) -> float:
    values = [value for run in figure["runs"] for value in measurements(run)]
    assert values, "no measurement matches"
    how = figure.get("how", "median")
    if how in ("min", "max"):
        return min(values) if how == "min" else max(values)
    middle = statistics.median(values)
    if how == "median":
        return middle * figure.get("scale", 1.0)
    against = statistics.median(value for run in figure["against"] for value in measurements(run))
    ratio = 100 * middle / against
    return {"percent_of": ratio, "percent_less": 100 - ratio, "percent_more": ratio - 100}[how]


def line_of(entry: dict[str, Any]) -> str:
    lines = [line for line in lines_of(entry["page"]) if entry["near"] in line]
    assert len(lines) == 1, f"{entry['page']} has {len(lines)} lines with {entry['near']!r}, not one"
    return lines[0]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f['page']}: {f['near'][:40]}: {f['value']}")
def test_a_figure_is_what_the_runs_gave(figure):
    assert figure["value"] in re.findall(NUMBER, line_of(figure)), "the page says something else"
    digits = len(figure["value"].partition(".")[2])
    assert f"{computed(figure):,.{digits}f}" == f"{float(figure['value'].replace(',', '')):,.{digits}f}"


def test_the_number_of_runs_and_the_files_stand_in_the_row():
    """README's table: `runs` counts the measurements behind our figure, and `files` names all of their files."""
    for figure in FIGURES:
        if figure["page"] != "README.md" or figure.get("how", "median") != "median":
            continue
        cells = [cell.strip() for cell in line_of(figure).strip("|").split("|")]
        assert cells[2] == f"**{figure['value']}**"
        assert int(cells[4]) == sum(len(measurements(run)) for run in figure["runs"]), cells[0]
        used, patterns = {run.split(": ")[0] for run in figure["runs"]}, _patterns(cells[5])
        assert all(any(fnmatch(file, pattern) for pattern in patterns) for file in used), cells[0]
        assert all(any(fnmatch(file, pattern) for file in used) for pattern in patterns), cells[0]


def test_the_table_beside_vllm_prints_each_run():
    """benchmarks/results/serving/README.md: each row has its figure, which is README's where README has it, and all of its runs."""
    figures = {line_of(figure): figure for figure in FIGURES if figure["page"] == BESIDE}
    lines = lines_of(BESIDE)
    begin = lines.index("## Beside vLLM")
    rows = [line for line in lines[begin : lines.index("| file | commit | what ran, and on which machine |")] if "**" in line]
    assert set(rows) == set(figures)
    assert {figure["runs_of"] for figure in figures.values() if "runs_of" in figure} == {
        near for near, figure in OF_README.items() if figure["runs"][0].startswith("serving/")
    }
    for row, figure in figures.items():
        _, _, median, runs, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert median == f"**{figure['value']}**"
        printed = re.sub(r" ?\([^)]*\)", "", runs).split(", ")
        measured = sorted(value for run in figure["runs"] for value in measurements(run))
        assert printed == [f"{value:,.{len(text.partition('.')[2])}f}" for text, value in zip(printed, measured, strict=True)], row


def _patterns(cell: str) -> list[str]:
    """`serving/{a,b*}.json`, `c.csv` -> patterns of files below benchmarks/results."""
    patterns = []
    for quoted in re.findall(r"`([^`]+)`", cell):
        head, _, rest = quoted.partition("{")
        inner, _, tail = rest.partition("}")
        patterns += [head + each + tail for each in inner.split(",")] if rest else [quoted]
    return patterns


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_without_a_source(page):
    """A number with a unit is a figure with its measurements, or a rule of the program, in figures.toml."""
    figures = {(line_of(figure), figure["value"]) for figure in FIGURES if figure["page"] == page}
    known = figures | {(line_of(rule), value) for rule in RULES if rule["page"] == page for value in rule["values"]}
    for line in lines_of(page):
        for match in MEASURED.finditer(re.sub("`[^`]*`", "``", line)):
            for number in filter(None, match.groups()):
                assert (line, number) in known, f"{page}: {match.group(0)!r} has no entry in figures.toml: {line}"
