# SPDX-License-Identifier: Apache-2.0
"""From times to a table: a challenger must beat the incumbent by more than the noise, and neighbouring cells agree where the noise
allows it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from phalanx.errors import TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables import cpp_lookup
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Seed
from phalanx.tables.strategy import INCUMBENT, Choice, Strategy
from phalanx.tables.table import HAND_OVER, HiddenRange, Section, Span, Table
from phalanx.tune.fit import Cell, by_cell, chosen, fit_seed
from phalanx.tune.sweep import ALL_REDUCE, GEMM_ALL_REDUCE, Task

FLOOR = 0.01
"""Differences below this fraction count as noise: they do not repeat from day to day."""
UNSAMPLED = 0.03
"""The noise of a time without samples, as a fraction."""
# Between two measured points the nearer one answers. Between points further apart
# than these factors, the range is unmeasured.
_BRIDGED_TOKENS, _BRIDGED_HIDDEN = 16, 4

Times = Mapping[Choice, float]


def noise(samples: Sequence[float] | None, us: float) -> float:
    """The standard error, in microseconds, of a median of these samples.

    1.4826 x (median absolute deviation) estimates the standard deviation, 1.2533 / sqrt(n) of which is a median's (normal errors).
    """
    if not samples or len(samples) < 3:
        return UNSAMPLED * us
    middle = statistics.median(samples)
    deviation = 1.4826 * statistics.median(abs(sample - middle) for sample in samples)
    return 1.2533 * deviation / math.sqrt(len(samples))


def decide(
    times: Mapping[Task, float],
    fingerprint: Fingerprint,
    *,
    samples: Mapping[Task, Sequence[float]] | None = None,
    skips: Collection[Task] = (),
    expressible: bool = False,
    seed: Seed | None = None,
    provenance: dict[str, str] | None = None,
) -> Table:
    """The table of one machine. expressible: only choices that TensorRT-LLM's table `holds`.

    Each kind of caller has its cells. For REPLICATED and SHARDED, the fastest choice must beat NCCL. For GEMM, GEMM_RS must beat a
    GEMM and then what SHARDED decided for that cell; both times contain the GEMM. AUTO and strategies of another numeric class are
    ignored. Raises TableError where no time is left.

    skips: what was tried and cannot run. A cell of SHARDED (of GEMM) for which RS_NORM_AG (GEMM_RS) was neither measured nor
    skipped, as in a run that its time limit ended, is left to the seed.
    """
    samples = samples or {}
    errors = {task: noise(samples.get(task), us) for task, us in times.items()}
    cells: dict[Cell, Times] = dict(by_cell(times))
    if expressible:
        cells = {cell: _expressible(cell, measured, fingerprint.world) for cell, measured in cells.items()}
    cells = {cell: measured for cell, measured in cells.items() if measured}
    if not cells and not expressible:
        raise TableError(f"no times of {fingerprint} to decide by", next="measure with `phalanx allreduce bench`")

    def own_error(cell: Cell, choice: Choice) -> float:
        return errors[Task(*cell, choice)]

    seed = seed or fit_seed(times, fingerprint)
    sections = [*_sections(cells, own_error, Caller.REPLICATED)]
    if not expressible:
        tried = {*times, *skips}
        sharded = _with(Strategy.RS_NORM_AG, ALL_REDUCE, by_cell(times, Caller.SHARDED), tried)
        decided = [*_sections(sharded, own_error, Caller.SHARDED)]
        until_now = Table(fingerprint, tuple(sections + decided), seed)
        gemm, actual = _gemm_cells(_with(Strategy.GEMM_RS, GEMM_ALL_REDUCE, by_cell(times, Caller.GEMM), tried), until_now)

        def gemm_error(cell: Cell, choice: Choice) -> float:
            return errors[Task(*cell, actual[cell] if choice == HAND_OVER else choice, GEMM_ALL_REDUCE)]

        sections += [*decided, *_sections(gemm, gemm_error, Caller.GEMM, HAND_OVER)]
    return Table(fingerprint, tuple(sections), seed, provenance or {})


def _with(strategy: Strategy, op: str, cells: Mapping[Cell, Times], tried: Collection[Task]) -> dict[Cell, Times]:
    """The cells in which a strategy was tried."""
    return {cell: measured for cell, measured in cells.items() if Task(*cell, Choice(strategy), op) in tried}


def _expressible(cell: Cell, measured: Times, world: int) -> Times:
    return {choice: us for choice, us in measured.items() if cpp_lookup.holds(choice, cell[2], world)}


def _gemm_cells(cells: Mapping[Cell, Times], table: Table) -> tuple[dict[Cell, Times], dict[Cell, Choice]]:
    """({cell: times of HAND_OVER and GEMM_RS}, {cell: what HAND_OVER is}): what the table runs for SHARDED, or, where that was not
    measured, the fastest choice that was. Cells without GEMM_RS hold HAND_OVER alone."""
    contests: dict[Cell, Times] = {}
    actual: dict[Cell, Choice] = {}
    for cell, measured in cells.items():
        others = {choice: us for choice, us in measured.items() if choice.strategy is not Strategy.GEMM_RS}
        if not others:
            continue
        runs = chosen(table, cell, Caller.SHARDED)
        actual[cell] = runs if runs in others else min(others, key=lambda choice: others[choice])
        rest = {choice: us for choice, us in measured.items() if choice.strategy is Strategy.GEMM_RS}
        contests[cell] = {HAND_OVER: others[actual[cell]], **rest}
    return contests, actual


def _sections(
    cells: Mapping[Cell, Times], error: Callable[[Cell, Choice], float], caller: Caller, incumbent: Choice = INCUMBENT
) -> Iterator[Section]:
    """One section for each dtype and fusion of the cells. error: the noise of one time, in microseconds."""

    def margin(cell: Cell, a: Choice, b: Choice) -> float:
        return max(2 * math.hypot(error(cell, a), error(cell, b)), FLOOR * min(cells[cell][a], cells[cell][b]))

    for dtype, fusion in sorted({cell[:2] for cell in cells}, key=lambda key: (key[0], list(Fusion).index(key[1]))):
        grid: dict[int, dict[int, Times]] = {}
        for cell, measured in cells.items():
            if cell[:2] == (dtype, fusion):
                grid.setdefault(cell[3], {})[cell[2]] = measured
        allowed = {
            hidden: {
                tokens: within_noise(measured, lambda a, b, c=(dtype, fusion, tokens, hidden): margin(c, a, b))  # type: ignore[misc]
                for tokens, measured in sorted(row.items())
            }
            for hidden, row in sorted(grid.items())
        }
        decided = agree(grid, allowed, incumbent)
        yield Section(dtype, fusion, _rows(grid, decided, incumbent), caller)


def within_noise(measured: Times, margin: Callable[[Choice, Choice], float]) -> list[Choice]:
    """The choices that a cell allows: the fastest, and all that are slower by no more than the noise between the two."""
    best = min(measured, key=lambda choice: measured[choice])
    return [choice for choice, us in measured.items() if us - measured[best] <= margin(best, choice)]


def agree(
    grid: dict[int, dict[int, Times]], allowed: dict[int, dict[int, list[Choice]]], incumbent: Choice = INCUMBENT
) -> dict[int, dict[int, Choice]]:  # fmt: skip
    """One choice for each cell, {hidden: {tokens: choice}}, among those that the cell allows.

    For each hidden size: the sequence along tokens with the fewest changes; then the one that differs least from the hidden size
    before; then the one with the fewest challengers that are within the noise of the incumbent; then the fastest.
    """
    decided: dict[int, dict[int, Choice]] = {}
    before: dict[int, Choice] = {}
    for hidden in sorted(allowed):
        row = allowed[hidden]
        paths: dict[Choice, tuple[tuple[float, ...], list[Choice]]] = {}
        for tokens in sorted(row):
            longer = {}
            for choice in row[tokens]:
                times = grid[hidden][tokens]
                own = (
                    float(tokens in before and before[tokens] != choice),
                    float(incumbent in row[tokens] and choice != incumbent),
                    times[choice] / min(times.values()),
                )
                ways = [
                    ((cost[0] + (path[-1] != choice), *(a + b for a, b in zip(cost[1:], own, strict=True))), path)
                    for cost, path in paths.values()
                ] or [((0.0, *own), [])]
                cost, path = min(ways, key=lambda way: way[0])
                longer[choice] = (cost, [*path, choice])
            paths = longer
        best = min(paths.values(), key=lambda way: way[0])[1]
        before = decided[hidden] = dict(zip(sorted(row), best, strict=True))
    return decided


def _rows(
    grid: dict[int, dict[int, Times]], decided: dict[int, dict[int, Choice]], incumbent: Choice
) -> tuple[HiddenRange, ...]:  # fmt: skip
    sizes = sorted(decided)
    rows = []
    for (first, last), hidden in zip(ranges(sizes, _BRIDGED_HIDDEN, middle), sizes, strict=True):
        rows.append(HiddenRange(first, last, _spans(grid[hidden], decided[hidden], incumbent)))
    return tuple(rows)


def _spans(row: dict[int, Times], decided: dict[int, Choice], incumbent: Choice) -> tuple[Span, ...]:
    points = sorted(decided)

    def change(low: int, high: int) -> int:
        """The last size at which the lower point's choice is faster: where the lines between the times cross."""
        here, there = decided[low], decided[high]
        if all(choice in row[point] for choice in (here, there) for point in (low, high)):
            ahead = row[low][there] - row[low][here]
            behind = row[high][here] - row[high][there]
            if ahead >= 0 and behind >= 0 and ahead + behind > 0:
                return min(low + int((high - low) * ahead / (ahead + behind)), high - 1)
        return middle(low, high)

    spans: list[Span] = []
    gains: list[float] = []
    for (first, last), tokens in zip(ranges(points, _BRIDGED_TOKENS, change), points, strict=True):
        choice = decided[tokens]
        if spans and spans[-1].choice == choice and spans[-1].last + 1 == first:
            first = spans.pop().first
        else:
            gains = []
        if incumbent in row[tokens]:
            gains.append(row[tokens][incumbent] / row[tokens][choice])
        gain = round(math.exp(statistics.fmean(map(math.log, gains))), 3) if gains else None
        spans.append(Span(first, last, choice, gain))
    return tuple(spans)


def ranges(points: Sequence[int], bridged: int, change: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """The range of each of the rising points: up to the result of `change` (at most the next point less 1). The outermost points
    end their ranges, and so do two points that are more than `bridged` times apart."""
    firsts, lasts = [points[0]], []
    for low, high in pairwise(points):
        end = change(low, high) if high <= bridged * low else low
        lasts.append(end)
        firsts.append(end + 1 if high <= bridged * low else high)
    return list(zip(firsts, [*lasts, points[-1]], strict=True))


def middle(low: int, high: int) -> int:
    """The last size that is nearer to `low`, by ratio."""
    return min(max(math.isqrt(low * high), low), high - 1)
