# SPDX-License-Identifier: Apache-2.0
"""How wide the interval of a figure must be: from rows that a fit left out, and from predictions that were committed before their
figures. `intervals` of data/coefficients.json is made here; benchmarks/planner/fit.py writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from benchmarks.planner.predict import NAMES
from benchmarks.planner.rows import RESULTS, beside_prompts, one_name, shape_named
from phalanx.bench.workloads import parse
from phalanx.planner import search

PARTS = ("layout", "model")
"""What of a row the fit may not have seen: the layout of a model that it has, or the model."""

LEVEL = 0.95
"""Of rows that the fit has not seen, the part that a width of theirs holds. 9 of 10 is what an interval promises, and rows of one
model err together: at 0.9, only 71 of 85 rows were inside the width of the other models' rows."""

ENOUGH = 20
"""Rows whose 95th percentile is less than their largest error."""


def half(error: float) -> float:
    """The least half width of an interval that holds the measured figure: it reaches from the value / (1 + half) to the value x
    (1 + half). error: predicted over measured, less 1."""
    return max(1 + error, 1 / (1 + error)) - 1


def half_width(relative_errors: Sequence[float]) -> float:
    """The ceil(LEVEL (n + 1))-th smallest error, the largest of few (conformal prediction): what holds as many of further rows, if
    they come from the same distribution."""
    sizes = sorted(map(half, relative_errors))
    return round(sizes[min(math.ceil(LEVEL * (len(sizes) + 1)), len(sizes)) - 1], 4)


def nine_of_ten(relative_errors: Sequence[float]) -> float:
    """The least half width that holds 9 of 10 of these; 0 for none."""
    sizes = sorted(map(half, relative_errors))
    return math.ceil(1e4 * sizes[math.ceil(0.9 * len(sizes)) - 1]) / 1e4 if sizes else 0.0


@dataclass(frozen=True)
class Promise:
    """A prediction that was committed before its figure. of_fitted_kind: whether the fit had rows of its kind then."""

    kind: search.Kind
    model: str
    of_fitted_kind: bool
    error: float
    inside: bool


def promises() -> list[Promise]:
    """All that have been measured on a machine of the fit, but for decodes beside prompts, which are no decode figures."""
    kept = []
    for number, name in enumerate(NAMES):
        path = RESULTS / f"{name}_measured.json"
        for entry in json.loads(path.read_text(encoding="utf-8"))["figures"] if path.is_file() else ():
            work = parse(entry["workload"])
            if entry["gpu"] == "H200" and not beside_prompts(work):
                of_kind = search.kind(shape_named(entry["model"]), work.input_len + work.output_len / 2)
                kept.append(Promise(of_kind, one_name(entry["model"]), number > 0, entry["error"], entry["inside"]))
    return kept


def widths(
    rows_of: Sequence[dict[str, Any]], contexts: Sequence[float], kept: Sequence[Promise]
) -> dict[search.Kind, dict[str, float]]:
    """Half widths by kind, of a model that the fit has seen (layout) and of another (model): the larger of that of rows left out of
    the fit and of that which holds 9 of 10 of the kind's earlier predictions. Dense models and mixtures have rows of their own, and
    share them where one of them has fewer than ENOUGH. contexts: errors of layers of long contexts."""
    kinds: dict[search.Kind, dict[str, float]] = {}
    for name in get_args(search.Kind):
        from_rows = dict.fromkeys(PARTS, 0.0)
        if name in ("dense", "experts"):
            own = [row for row in rows_of if row["kind"] == name]
            from_rows = {part: half_width([row[f"{part}_left_out"] for row in (own, rows_of)[len(own) < ENOUGH]]) for part in PARTS}
        elif name == "contexts" and contexts:
            from_rows = dict.fromkeys(PARTS, half_width(contexts))
        before, first = ([each.error for each in kept if each.kind == name and each.of_fitted_kind is was] for was in (True, False))
        layout = max(from_rows["layout"], nine_of_ten(before))
        kinds[name] = {"layout": layout, "model": max(layout, from_rows["model"], nine_of_ten(first))}
    return kinds


def coverage(rows_of: Sequence[dict[str, Any]], kept: Sequence[Promise], part: str) -> dict[str, dict[str, float]]:
    """By kind: rows whose model or layout the fit has not seen, how many are inside a width that they have no part in either (of
    other models' or layouts' rows, and of other models' predictions), and the median of these widths. rows_of: `rows` of
    results/plan_fit.json; part: "model" or "layout"."""
    checked = {}
    for name in sorted({row["kind"] for row in rows_of}):
        of_kind = [row for row in rows_of if row["kind"] == name]
        others: dict[tuple[str, str], float] = {}
        for group, model in {(str(row[part]), row["model"]) for row in of_kind}:
            rest = [row for row in rows_of if str(row[part]) != group]
            others[group, model] = widths(rest, (), [each for each in kept if each.model != model])[name][part]
        errors_and_widths = [(row[f"{part}_left_out"], others[str(row[part]), row["model"]]) for row in of_kind]
        inside = sum(half(error) <= width for error, width in errors_and_widths)
        median = round(float(np.median([width for _, width in errors_and_widths])), 4)
        checked[name] = {"rows": len(of_kind), "inside": inside, "median_half_width": median}
    return checked


def kept_promises(
    rows_of: Sequence[dict[str, Any]], contexts: Sequence[float], kept: Sequence[Promise]
) -> dict[str, dict[str, int]]:
    """By kind: measured predictions, how many were inside their interval, how many are inside the present width, and how many
    inside that which the predictions of other models and the rows give."""
    now = widths(rows_of, contexts, kept)
    without = {each.model: widths(rows_of, contexts, [other for other in kept if other.model != each.model]) for each in kept}
    counts: dict[str, dict[str, int]] = {}
    for each in kept:
        part = "layout" if each.of_fitted_kind else "model"
        count = counts.setdefault(each.kind, dict.fromkeys(("figures", "inside", "inside_now", "inside_by_others"), 0))
        count["figures"] += 1
        count["inside"] += each.inside
        count["inside_now"] += half(each.error) <= now[each.kind][part]
        count["inside_by_others"] += half(each.error) <= without[each.model][each.kind][part]
    return counts


def intervals(rows_of: Sequence[dict[str, Any]], contexts: Sequence[float], models: Iterable[str]) -> dict[str, Any]:
    """Half widths by kind of model (`widths`), and what says how good they are: checked, `coverage`; predicted, `kept_promises`.
    rows_of: `rows` of results/plan_fit.json; contexts: errors of layers of long contexts; models: of the fit. Beyond the measured
    class what is known from elsewhere: another GPU of the generation 0.1 (12 of 12 figures of H100 lie within 0.05, and public rows
    of another engine have a 90th percentile of 0.093), another generation, link or network 0.2."""
    kept = promises()
    shapes = [shape_named(model.partition(":")[0]) for model in models]
    return {
        "kinds": widths(rows_of, contexts, kept),
        "derived": 0.1,
        "estimated": 0.2,
        "models": sorted(map(list, {(shape.hidden_size, shape.num_layers) for shape in shapes})),
        "checked": {part: coverage(rows_of, kept, part) for part in PARTS},
        "predicted": kept_promises(rows_of, contexts, kept),
    }
