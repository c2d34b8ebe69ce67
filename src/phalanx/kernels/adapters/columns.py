# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Which part of a layer an output belongs to, as its kernels compute it without a load. RUNS: `AdapterFactors.columns`, runs of
outputs as (part, begin, end), constants of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

Run = tuple[int, int, int]


@triton.constexpr_function
def num_parts(runs):
    """How many parts have an A of their own."""
    return 1 + max(part for part, _, _ in runs)


@triton.constexpr_function
def _field(runs, number, field):
    return runs[number][field]


@triton.constexpr_function
def _num_runs(runs):
    return len(runs)


@triton.constexpr_function
def num_tiles(runs: Sequence[Run], columns: int) -> int:
    """How many tiles of so many outputs, each within a run, there are."""
    return sum(-(-(end - begin) // columns) for _, begin, end in runs)


@triton.constexpr_function
def run_tiles(runs, number, columns):
    return -(-(runs[number][2] - runs[number][1]) // columns)


@triton.jit
def part_of(column, RUNS: tl.constexpr):
    """The part of each of these outputs."""
    part = column * 0 + _field(RUNS, 0, 0)
    for number in tl.static_range(1, _num_runs(RUNS)):
        part = tl.where(column >= _field(RUNS, number, 1), _field(RUNS, number, 0), part)
    return part


@triton.jit
def tile_columns(at, RUNS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tile number `at`: (its part, its first output, the end of its run)."""
    part, first, last = at * 0, at * 0, at * 0
    for number in tl.static_range(_num_runs(RUNS)):
        here = (at >= 0) & (at < run_tiles(RUNS, number, COLUMNS))
        part = tl.where(here, _field(RUNS, number, 0), part)
        first = tl.where(here, _field(RUNS, number, 1) + at * COLUMNS, first)
        last = tl.where(here, _field(RUNS, number, 2), last)
        at -= run_tiles(RUNS, number, COLUMNS)
    return part, first, last
