# SPDX-License-Identifier: Apache-2.0
"""Which strategy runs at which size, and why: the table and the seed in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

from phalanx.comm.choose import Decision, Rules, choose
from phalanx.config.dtypes import DTYPES
from phalanx.hardware.fingerprint import LINKS
from phalanx.tables.admit import MAX_WORLD
from phalanx.tables.message import Caller, Fusion, Message
from phalanx.tables.shipped import mean_gain
from phalanx.tables.strategy import SEQUENCE_PARALLEL, Choice, Strategy
from phalanx.tables.table import Table

MAX_TOKENS = 32_768
_CALLERS = {
    Caller.GEMM: "in a layer, behind a linear layer (o_proj, down_proj)",
    Caller.SHARDED: "in a layer, behind a mixture of experts or a GEMM with block scales",
    Caller.REPLICATED: "where every rank needs the whole residual (a layer with a bias, the end of a pipeline stage)",
}


def rules(table: Table) -> Rules:
    """The rules of a group that runs by this table, with no strategy forced."""
    return Rules(table.fingerprint, {}, table.lookup)


def lines(table: Table, dtype: str, hidden: int, fusions: tuple[Fusion, ...] = tuple(Fusion)) -> Iterator[str]:
    """The machine; then, for each fusion and each kind of caller for which it makes a difference, a line for each range of
    tokens; and what a residual changes that comes in sharded."""
    machine = table.fingerprint
    yield f"{machine}: {LINKS[machine.link]}; {machine.world} ranks"
    if table.sections:
        incumbent = Choice(Strategy.NCCL).name(machine.sm)
        yield f"table sha256:{table.digest[:16]}..., {mean_gain(table):.2f}x the speed of {incumbent} on average"
        yield from (f"  {name}: {text}" for name, text in table.provenance.items())
    else:
        label = "estimated" if table.seed.estimated else "seed"
        yield f"no table: the seed decides everywhere ({table.seed.origin}; {label})"
    shards = False
    for fusion in fusions:
        title = f"{fusion.name}, {dtype}, hidden {hidden}"
        if not fusion.shards:
            yield title
            yield from (line for _, line in _ranges(table, dtype, hidden, fusion, Caller.REPLICATED))
            continue
        for caller, where in _CALLERS.items():
            yield f"{title}, {where}"
            for strategy, line in _ranges(table, dtype, hidden, fusion, caller):
                shards = shards or strategy in SEQUENCE_PARALLEL
                yield line
    if shards:
        yield "in a layer, a residual that the all-reduce before left sharded stays so: RS_NORM_AG runs where this names ONESHOT,"
        yield "TWOSHOT or NCCL, as these would have to gather it first"


def _ranges(table: Table, dtype: str, hidden: int, fusion: Fusion, caller: Caller) -> Iterator[tuple[Strategy, str]]:
    """Each range of tokens in which one strategy runs for one reason: the strategy, and the line that says so."""
    machine = table.fingerprint
    decide = cache(lambda tokens: choose(Message("all_reduce", fusion, dtype, tokens, hidden, machine.world, caller), rules(table)))

    def key(tokens: int) -> tuple[Strategy, bool, str]:
        return decide(tokens).strategy, decide(tokens).fused, decide(tokens).source

    firsts = [1]
    for low, high in pairwise(_edges(table, dtype, hidden)):
        firsts += _changes(key, low, high)
    for first, end in pairwise([*firsts, MAX_TOKENS + 1]):
        upto = f"to {end - 1}" if end <= MAX_TOKENS else "or more"
        decision = decide(first)
        what = describe(decision, fusion, machine.sm)
        yield decision.strategy, f"  {first:>6} {upto:<9} tokens: {what:<24} {decision.source}: {decision.reason}"


def _edges(table: Table, dtype: str, hidden: int) -> list[int]:
    """Rising numbers of tokens from 1 to MAX_TOKENS. Between two of them at most the seed changes its choice. Its models are lines,
    so that each choice is the fastest in one range at most."""
    spans = [span for section in table.sections for row in section.hidden_ranges for span in row.spans]
    sharded = table.seed.sequence_parallel
    row_bytes = hidden * DTYPES[dtype].itemsize
    edges = {*range(1, MAX_WORLD**2 + 1), MAX_TOKENS}  # so few tokens may leave a rank without rows
    edges |= {edge for span in spans for edge in (span.first - 1, span.first, span.last, span.last + 1)}
    for first in (sharded.rs_norm_ag_min_tokens or 1, -(-(sharded.gemm_rs_min_bytes or 1) // row_bytes)):
        edges |= {first - 1, first}
    return sorted(edge for edge in edges if 1 <= edge <= MAX_TOKENS)


def _changes(key: Callable[[int], object], low: int, high: int) -> Iterator[int]:
    """The numbers above `low`, up to `high`, whose key differs from the one before, where no key comes twice."""
    if key(low) == key(high):
        return
    if high - low == 1:
        yield high
        return
    middle = (low + high) // 2
    yield from _changes(key, low, middle)
    yield from _changes(key, middle, high)


def describe(decision: Decision, fusion: Fusion, sm: int) -> str:
    """ "ONESHOT, fused", "NCCL, then a kernel", "ONESHOT", "RS_NORM_AG"."""
    name = Choice(decision.strategy).name(sm)
    if fusion is Fusion.NONE or decision.strategy in SEQUENCE_PARALLEL:
        return name
    return f"{name}, fused" if decision.fused else f"{name}, then a kernel"
