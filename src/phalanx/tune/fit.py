# SPDX-License-Identifier: Apache-2.0
"""Fit the seed, time = a + b x bytes + c x tokens for each fusion and choice, by least absolute deviations. And its regret."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import seed as seeds
from phalanx.tables.message import Fusion
from phalanx.tables.seed import Latency, Seed
from phalanx.tables.strategy import Choice, choices, numeric_class
from phalanx.tables.table import Table
from phalanx.tune.sweep import Task

_MIB = 2**20


def fit_seed(times: Mapping[Task, float], fingerprint: Fingerprint) -> Seed:
    """The seed of one machine's times (microseconds). Fusions that were not measured keep the models of the machine's class."""
    points: dict[tuple[Fusion, Choice], list[tuple[int, int, float]]] = defaultdict(list)
    for task, us in times.items():
        if numeric_class(task.choice.strategy) == "exact":
            points[task.fusion, task.choice].append((task.bytes, task.tokens, us))
    default = seeds.default(fingerprint)
    models: dict[Fusion, dict[Choice, Latency]] = {}
    for fusion in Fusion:
        measured = [choice for measured_fusion, choice in points if measured_fusion is fusion]
        order = [c for c in choices(fusion) if c in measured] + sorted(c for c in measured if c not in choices(fusion))
        models[fusion] = {choice: fit(points[fusion, choice]) for choice in order} or default.models[fusion]
    return Seed(f"fitted to {len(times)} times of {fingerprint}", models)


def fit(points: list[tuple[int, int, float]]) -> Latency:
    """The model with the smallest sum of relative errors over (bytes, tokens, us) points. Coefficients are not negative.

    minimize sum(u_i)  with  -u_i <= (a + b x bytes_i + c x tokens_i) / us_i - 1 <= u_i   and  a, b, c >= 0

    (the linear program of least absolute deviations). Errors are relative, as a wrong choice costs a factor, not microseconds.
    """
    import numpy
    from scipy.optimize import linprog
    from scipy.sparse import bmat, identity

    us = numpy.array([point[2] for point in points])
    sizes = numpy.array([[1.0, point[0] / _MIB, point[1] / 1024] for point in points])
    ratios = sizes / us[:, None]
    count = len(points)
    bounds = bmat([[ratios, -identity(count)], [-ratios, -identity(count)]], format="csr")
    limits = numpy.concatenate([numpy.ones(count), -numpy.ones(count)])
    cost = numpy.concatenate([numpy.zeros(3), numpy.ones(count)])
    solved = linprog(cost, A_ub=bounds, b_ub=limits, bounds=(0, None), method="highs")
    if not solved.success:  # feasible for any u that is large enough, so this is the solver's own limit
        raise ArithmeticError(f"the seed's linear program over {count} points ended with: {solved.message}")
    a, b, c = (float(value) for value in solved.x[:3])
    return Latency.of_us(a, b / _MIB, c / 1024)


def relative_error(points: list[tuple[int, int, float]], model: Latency) -> float:
    """The median over points of |model / measured - 1|."""
    return statistics.median(abs(model.us(tokens, nbytes) / us - 1) for nbytes, tokens, us in points)


@dataclass(frozen=True)
class Regret:
    """By how much a decision is slower than the best measured choice of a cell, as a fraction, over cells."""

    cells: int
    mean: float
    p95: float
    worst: float
    where: str

    def __str__(self) -> str:
        head = f"mean {self.mean:.1%}, 95th percentile {self.p95:.1%}, worst {self.worst:.1%}"
        return f"{head} ({self.where})" if self.worst > 0 else head


def by_cell(times: Mapping[Task, float]) -> dict[tuple[str, Fusion, int, int], dict[Choice, float]]:
    """{(dtype, fusion, tokens, hidden): {choice: us}}, of the exact numeric class only."""
    cells: dict[tuple[str, Fusion, int, int], dict[Choice, float]] = defaultdict(dict)
    for task, us in times.items():
        if numeric_class(task.choice.strategy) == "exact":
            cells[task.cell][task.choice] = us
    return cells


def regret(times: Mapping[Task, float], decide: Table | Seed) -> Regret | None:
    """The regret of a table or a seed over all cells in which its choice was measured; None if there are none."""
    slowdowns: list[tuple[float, str]] = []
    for (dtype, fusion, tokens, hidden), measured in by_cell(times).items():
        if isinstance(decide, Seed):
            choice = decide.choose(dtype, fusion, tokens, hidden)[0]
        else:
            entry = decide.lookup(dtype, fusion, tokens, hidden)
            plain = Choice(entry.strategy)
            choice = plain if entry.fused or not plain.fuses(fusion) else Choice(entry.strategy, unfused=True)
        if choice in measured:
            slower = measured[choice] / min(measured.values()) - 1
            slowdowns.append((slower, f"{fusion.name} {tokens} x {hidden} {dtype}, {choice.name(sm_of(decide))}"))
    if not slowdowns:
        return None
    ordered = sorted(slower for slower, _ in slowdowns)
    worst, where = max(slowdowns)
    return Regret(len(slowdowns), statistics.fmean(ordered), ordered[int(0.95 * (len(ordered) - 1))], worst, where)


def sm_of(decide: Table | Seed) -> int:
    """The SM version for names of strategies; a seed has none."""
    return decide.fingerprint.sm if isinstance(decide, Table) else 90
