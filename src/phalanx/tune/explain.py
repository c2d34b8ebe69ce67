# SPDX-License-Identifier: Apache-2.0
"""Which strategy runs at which size, and why: the table and the seed in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from phalanx.comm.choose import GEMM_RS_MIN_BYTES, Decision, Rules, choose, choose_sharded, sp_min_tokens
from phalanx.config.dtypes import DTYPES
from phalanx.hardware.fingerprint import LINKS
from phalanx.tables.message import Fusion, Message
from phalanx.tables.shipped import mean_gain
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import Table

MAX_TOKENS = 32_768


def rules(table: Table) -> Rules:
    """The rules of a group that runs by this table, with no strategy forced."""
    return Rules(table.fingerprint, {}, table.lookup, sp_min_tokens=sp_min_tokens(table.fingerprint))


def lines(table: Table, dtype: str, hidden: int, fusions: tuple[Fusion, ...] = tuple(Fusion)) -> Iterator[str]:
    """The machine, then a line for each range of tokens of each fusion."""
    machine, decide = table.fingerprint, rules(table)
    yield f"{machine}: {LINKS[machine.link]}; {machine.world} ranks"
    if table.sections:
        incumbent = Choice(Strategy.NCCL).name(machine.sm)
        yield f"table sha256:{table.digest[:16]}..., {mean_gain(table):.2f}x the speed of {incumbent} on average"
        yield from (f"  {name}: {text}" for name, text in table.provenance.items())
    else:
        yield f"no table: the seed decides everywhere ({table.seed.origin})"
    yield from _sequence_parallel(decide, dtype, hidden, fusions)
    for fusion in fusions:
        yield f"{fusion.name}, {dtype}, hidden {hidden}"
        sizes = range(1, MAX_TOKENS + 1)
        messages = (Message("all_reduce", fusion, dtype, tokens, hidden, machine.world) for tokens in sizes)
        decisions = ((message.tokens, choose(message, decide)) for message in messages)
        for _, same in groupby(decisions, key=lambda item: (item[1].strategy, item[1].fused, item[1].source)):
            members = list(same)
            (first, entry), last = members[0], members[-1][0]
            upto = "or more" if last == MAX_TOKENS else f"to {last}"
            yield f"  {first:>6} {upto:<9} tokens: {describe(entry, fusion, machine.sm):<24} ({entry.reason})"


def _sequence_parallel(decide: Rules, dtype: str, hidden: int, fusions: tuple[Fusion, ...]) -> Iterator[str]:
    """From how many tokens on the layers of a model run sequence parallel, if they do."""
    first, world = decide.sp_min_tokens, decide.fingerprint.world
    if first is None:
        return
    gemm_rs = -(-GEMM_RS_MIN_BYTES // (hidden * DTYPES[dtype].itemsize))
    if any(choose_sharded(Message("all_reduce", fusion, dtype, first, hidden, world), decide) for fusion in fusions):
        yield (
            f"between layers of a model, in FP8 or unquantized: RS_NORM_AG from {first} tokens on, in place of what follows "
            "(reduce-scatter, residual and norm of each rank's own rows, all-gather); "
            f"from {gemm_rs} tokens on GEMM_RS: the GEMM writes its output to the ranks that sum it"
        )


def describe(entry: Decision, fusion: Fusion, sm: int) -> str:
    """ "ONESHOT, fused", "NCCL, then a kernel", "ONESHOT"."""
    name = Choice(entry.strategy).name(sm)
    if fusion is Fusion.NONE:
        return name
    return f"{name}, fused" if entry.fused else f"{name}, then a kernel"
