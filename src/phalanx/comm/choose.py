# SPDX-License-Identifier: Apache-2.0
"""Which strategy runs a message: the table, else the seed, else NCCL. A pure function of facts that are equal on all ranks, so that
every rank decides the same without communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.admit import admit
from phalanx.tables.message import Caller, Fusion, Message
from phalanx.tables.strategy import SEQUENCE_PARALLEL, Choice, Strategy
from phalanx.tables.table import Entry, Source

TableLookup = Callable[[str, Fusion, int, int, Caller], Entry]
"""(dtype, fusion, tokens, hidden, caller) -> what is fastest there: `tables.Table.lookup`."""

_MAX_CACHED = 1 << 16


@dataclass(frozen=True, slots=True)
class Decision:
    """strategy: what runs. fused: the fusion runs in the collective's own kernel. source: who decided. reason: for people. name:
    "ONESHOT/RESIDUAL_RMS_NORM", under which calls are counted."""

    strategy: Strategy
    fused: bool
    source: Source | Literal["forced", "fallback"]
    reason: str
    name: str


@dataclass(frozen=True)
class Rules:
    """By what a group decides. refused: strategies that this group cannot run at all, with the reason; forced: the strategy that
    the user requires, None for AUTO; deterministic: no sums of NCCL's own while something else can run."""

    fingerprint: Fingerprint
    refused: Mapping[Strategy, str]
    lookup: TableLookup | None
    forced: Strategy | None = None
    deterministic: bool = False


def choose(message: Message, rules: Rules, *, sharded: bool = False) -> Decision:
    """Which strategy runs `message`, and why. sharded: the residual comes in as RS_NORM_AG would shard it. Then it stays sharded
    where AUTO decides: another strategy would need it gathered first, and a gather takes longer than the other one saves.

    RS_NORM_AG and GEMM_RS add in rank order, as TWOSHOT does, so they may run where that is required.
    """

    def refusal(strategy: Strategy) -> str | None:
        return rules.refused.get(strategy) or admit(strategy, message, rules.fingerprint)

    def decide(strategy: Strategy, fused: bool, source: Source | Literal["forced", "fallback"], reason: str) -> Decision:
        fused = Choice(strategy, unfused=not fused).fuses(message.fusion)
        return Decision(strategy, fused, source, reason, f"{Choice(strategy).name(rules.fingerprint.sm)}/{message.fusion.name}")

    def fall_back(why: str) -> Decision:
        others = (Strategy.TWOSHOT, Strategy.ONESHOT) if rules.deterministic else ()
        for strategy in others:
            if refusal(strategy) is None:
                return decide(strategy, True, "fallback", f"{why}; sums in rank order are required")
        return decide(Strategy.NCCL, False, "fallback", why)

    if rules.forced is not None:
        why = refusal(rules.forced)
        if why is None:
            return decide(rules.forced, True, "forced", "allreduce_strategy requires it")
        why = f"allreduce_strategy requires {rules.forced.name}, which cannot run this: {why}"
        if rules.forced in SEQUENCE_PARALLEL:  # the same sums without what the caller does not allow
            for strategy in (Strategy.RS_NORM_AG, Strategy.TWOSHOT):
                if refusal(strategy) is None:
                    return decide(strategy, True, "fallback", why)
        return fall_back(why)
    if rules.lookup is None:
        return fall_back("there is no table")
    entry = rules.lookup(message.dtype, message.fusion, message.tokens, message.hidden, message.caller)
    why = refusal(entry.strategy)
    if why is not None and entry.strategy in SEQUENCE_PARALLEL and message.caller is not Caller.REPLICATED:
        return choose(replace(message, caller=message.caller.less), rules, sharded=sharded)
    if sharded and entry.strategy not in SEQUENCE_PARALLEL and refusal(Strategy.RS_NORM_AG) is None:
        stays = f"the residual comes in sharded, and {entry.strategy.name} ({entry.reason}) would have to gather it first"
        return decide(Strategy.RS_NORM_AG, True, entry.source, stays)
    if why is not None:
        return fall_back(f"{entry.strategy.name} ({entry.reason}) cannot run this: {why}")
    if rules.deterministic and entry.strategy is Strategy.NCCL and rules.fingerprint.on_gpu:
        return fall_back(f"NCCL ({entry.reason}) adds in an order of its own")
    return decide(entry.strategy, entry.fused, entry.source, entry.reason)


class Decider(Protocol):
    """`choose` by fixed rules, with its answers kept."""

    def __call__(
        self, tokens: int, hidden: int, dtype: str, fusion: Fusion, caller: Caller = Caller.REPLICATED, sharded: bool = False
    ) -> Decision:
        """For a tensor [tokens, hidden] per rank. dtype: bf16, fp16 or fp32. sharded: see `choose`."""


def decider(rules: Rules) -> Decider:
    """See `Decider`."""

    @lru_cache(maxsize=_MAX_CACHED)
    def decide(
        tokens: int, hidden: int, dtype: str, fusion: Fusion, caller: Caller = Caller.REPLICATED, sharded: bool = False
    ) -> Decision:
        return choose(Message("all_reduce", fusion, dtype, tokens, hidden, rules.fingerprint.world, caller), rules, sharded=sharded)

    return decide
