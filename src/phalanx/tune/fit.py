# SPDX-License-Identifier: Apache-2.0
"""Fit the seed: time = a + b x bytes + c x tokens for each fusion and choice, by least absolute deviations; and the thresholds of
sequence parallelism, by least regret. And the regret of a decision."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import seed as seeds
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Latency, Seed, SequenceParallelSeed
from phalanx.tables.strategy import SEQUENCE_PARALLEL, Choice, Strategy, choices, numeric_class
from phalanx.tables.table import Table
from phalanx.tune.sweep import ALL_REDUCE, GEMM_ALL_REDUCE, Task

_MIB = 2**20
Cell = tuple[str, Fusion, int, int]
"""(dtype, fusion, tokens, hidden)"""


def fit_seed(times: Mapping[Task, float], fingerprint: Fingerprint) -> Seed:
    """The seed of one machine's times (microseconds). Fusions that were not measured keep the models of the machine's class."""
    points: dict[tuple[Fusion, Choice], list[tuple[int, int, float]]] = defaultdict(list)
    for cell, by_choice in by_cell(times).items():
        for choice, us in by_choice.items():
            points[cell[1], choice].append((Task(*cell, choice).bytes, cell[2], us))
    default = seeds.default(fingerprint)
    models: dict[Fusion, dict[Choice, Latency]] = {}
    for fusion in Fusion:
        measured = [choice for measured_fusion, choice in points if measured_fusion is fusion]
        order = [c for c in choices(fusion) if c in measured] + sorted(c for c in measured if c not in choices(fusion))
        models[fusion] = {choice: fit(points[fusion, choice]) for choice in order} or default.models[fusion]
    origin = f"fitted to {len(times)} times of {fingerprint}"
    return Seed(origin, models, sequence_parallel=fit_sequence_parallel(times, fingerprint, origin))


def fit_sequence_parallel(times: Mapping[Task, float], fingerprint: Fingerprint, origin: str) -> SequenceParallelSeed:
    """The thresholds with the least regret over the measured cells, each on a measured size. Those that were not measured stay as
    the machine's class has them."""
    seed = seeds.sequence_parallel(fingerprint)
    sharded = _contests(by_cell(times, Caller.SHARDED), Strategy.RS_NORM_AG, lambda cell: cell[2])
    if not sharded:
        return seed
    gemm = _contests(by_cell(times, Caller.GEMM), Strategy.GEMM_RS, lambda cell: Task(*cell, Choice(Strategy.GEMM_RS)).bytes)
    seed = replace(seed, rs_norm_ag_min_tokens=_threshold(sharded), origin=origin, estimated=False)
    return replace(seed, gemm_rs_min_bytes=_threshold(gemm)) if gemm else seed


def _contests(
    cells: Mapping[Cell, Mapping[Choice, float]], strategy: Strategy, size: Callable[[Cell], int]
) -> list[tuple[int, float]]:  # fmt: skip
    """For each cell that holds the strategy and another: (its size, log of how much slower the best of the others is)."""
    contests = []
    for cell, measured in cells.items():
        others = [us for choice, us in measured.items() if choice.strategy is not strategy]
        if Choice(strategy) in measured and others:
            contests.append((size(cell), math.log(min(others) / measured[Choice(strategy)])))
    return contests


def _threshold(contests: list[tuple[int, float]]) -> int | None:
    """The size from which on a strategy runs so that its gains sum up to the most; None where it had better never run."""
    best: tuple[float, int | None] = (0.0, None)
    for size in sorted({size for size, _ in contests}, reverse=True):
        gain = math.fsum(ahead for at, ahead in contests if at >= size)
        best = max(best, (gain, size), key=lambda item: item[0])
    return best[1]


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


def by_cell(times: Mapping[Task, float], caller: Caller = Caller.REPLICATED) -> dict[Cell, dict[Choice, float]]:
    """{(dtype, fusion, tokens, hidden): {choice: us}} of what such a caller may run, of the exact numeric class only. GEMM: times
    that contain the GEMM. SHARDED: of the dtypes and fusions for which RS_NORM_AG was measured at some size."""
    cells: dict[Cell, dict[Choice, float]] = defaultdict(dict)
    op = GEMM_ALL_REDUCE if caller is Caller.GEMM else ALL_REDUCE
    sharded = {(task.dtype, task.fusion) for task in times if task.choice.strategy is Strategy.RS_NORM_AG}
    for task, us in times.items():
        if task.op != op or numeric_class(task.choice.strategy) != "exact":
            continue
        if caller is Caller.REPLICATED and task.choice.strategy in SEQUENCE_PARALLEL:
            continue
        if caller is Caller.SHARDED and (task.dtype, task.fusion) not in sharded:
            continue
        cells[task.dtype, task.fusion, task.tokens, task.hidden][task.choice] = us
    return cells


def chosen(table: Table, cell: Cell, caller: Caller = Caller.REPLICATED) -> Choice:
    """What a table decides for a cell."""
    entry = table.lookup(*cell, caller)
    plain = Choice(entry.strategy)
    return plain if entry.fused or not plain.fuses(cell[1]) else Choice(entry.strategy, unfused=True)


def regret(
    times: Mapping[Task, float], decide: Table | Seed, callers: tuple[Caller, ...] = (Caller.REPLICATED,)
) -> Regret | None:  # fmt: skip
    """The regret of a table (or of a seed, for REPLICATED only) over all cells of these callers in which its choice was measured;
    None if there are none."""
    slowdowns: list[tuple[float, str]] = []
    for caller in callers:
        for cell, measured in by_cell(times, caller).items():
            choice = decide.choose(*cell)[0] if isinstance(decide, Seed) else chosen(decide, cell, caller)
            if choice in measured:
                slower = measured[choice] / min(measured.values()) - 1
                dtype, fusion, tokens, hidden = cell
                slowdowns.append((slower, f"{fusion.name} {tokens} x {hidden} {dtype}, {choice.name(sm_of(decide))}"))
    if not slowdowns:
        return None
    ordered = sorted(slower for slower, _ in slowdowns)
    worst, where = max(slowdowns)
    return Regret(len(slowdowns), statistics.fmean(ordered), ordered[int(0.95 * (len(ordered) - 1))], worst, where)


def sm_of(decide: Table | Seed) -> int:
    """The SM version for names of strategies; a seed has none."""
    return decide.fingerprint.sm if isinstance(decide, Table) else 90
