# SPDX-License-Identifier: Apache-2.0
"""Which strategy runs a message: the table, else the seed, else NCCL. A pure function of facts that are equal on all ranks, so that
every rank decides the same without communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.admit import MAX_WORLD, admit
from phalanx.tables.message import Fusion, Message
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import Entry

Lookup = Callable[[str, Fusion, int, int], Entry]
"""(dtype, fusion, tokens, hidden) -> what is fastest there: `tables.Table.lookup`."""

_MAX_CACHED = 1 << 16

SP_MIN_TOKENS = {2: 128} | dict.fromkeys(range(3, MAX_WORLD + 1), 64)
"""By the size of a group of GPUs: the tokens from which on its layers run sequence parallel (RS_NORM_AG). Below, a message waits
for its two hops longer than for what they carry. Measured on H200 at 2 and 4 ranks."""

GEMM_RS_MIN_BYTES = 32 << 20
"""Messages from which on the GEMM writes its output straight to the ranks that sum it (GEMM_RS). Below, the GEMM of one rank's rows
is too small to fill a GPU."""


@dataclass(frozen=True, slots=True)
class Decision:
    """strategy: what runs. fused: the fusion runs in the collective's own kernel. source: who decided. reason: for people. name:
    "ONESHOT/RESIDUAL_RMS_NORM", under which calls are counted. sharded: as RS_NORM_AG, which leaves the new residual sharded."""

    strategy: Strategy
    fused: bool
    source: Literal["table", "seed", "forced", "fallback"]
    reason: str
    name: str
    sharded: bool = False


@dataclass(frozen=True)
class Rules:
    """By what a group decides. refused: strategies that this group cannot run at all, with the reason; forced: the strategy that
    the user requires, None for AUTO; deterministic: no sums of NCCL's own while something else can run; sp_min_tokens: tokens from
    which on a caller that accepts a sharded residual gets RS_NORM_AG, None for a group that has no kernel for it."""

    fingerprint: Fingerprint
    refused: Mapping[Strategy, str]
    lookup: Lookup | None
    forced: Strategy | None = None
    deterministic: bool = False
    sp_min_tokens: int | None = None


def sp_min_tokens(fingerprint: Fingerprint) -> int | None:
    """Tokens from which on RS_NORM_AG runs on such a machine; None where there is no kernel for it."""
    return SP_MIN_TOKENS.get(fingerprint.world) if fingerprint.on_gpu and fingerprint.peers_reach else None


def choose_sharded(message: Message, rules: Rules) -> Decision | None:
    """The decision for a caller that accepts a sharded residual; None where `choose` decides.

    RS_NORM_AG gives the bits of TWOSHOT, so it may run where that strategy, or sums in rank order, are required.
    """
    fusion, twoshot = message.fusion, Strategy.TWOSHOT
    if rules.sp_min_tokens is None or message.tokens < rules.sp_min_tokens or rules.forced not in (None, twoshot):
        return None
    supported = fusion.quant == "fp8" or fusion is Fusion.RESIDUAL_RMS_NORM
    if not supported or fusion.keeps_norm or message.hidden % 16:
        return None
    if rules.refused.get(twoshot) or admit(twoshot, message, rules.fingerprint):
        return None
    reason = f"sequence parallel from {rules.sp_min_tokens} tokens on"
    return Decision(twoshot, True, "forced" if rules.forced else "seed", reason, f"RS_NORM_AG/{fusion.name}", sharded=True)


def choose(message: Message, rules: Rules) -> Decision:
    """Which strategy runs `message`, and why."""

    def refusal(strategy: Strategy) -> str | None:
        return rules.refused.get(strategy) or admit(strategy, message, rules.fingerprint)

    def decide(strategy: Strategy, fused: bool, source: Literal["table", "seed", "forced", "fallback"], reason: str) -> Decision:
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
        return fall_back(f"allreduce_strategy requires {rules.forced.name}, which cannot run this: {why}")
    if rules.lookup is None:
        return fall_back("there is no table")
    entry = rules.lookup(message.dtype, message.fusion, message.tokens, message.hidden)
    why = refusal(entry.strategy)
    if why is not None:
        return fall_back(f"{entry.strategy.name} ({entry.reason}) cannot run this: {why}")
    if rules.deterministic and entry.strategy is Strategy.NCCL and rules.fingerprint.on_gpu:
        return fall_back(f"NCCL ({entry.reason}) adds in an order of its own")
    return decide(entry.strategy, entry.fused, entry.source, entry.reason)


class Decider(Protocol):
    """`choose_sharded` and `choose` by fixed rules, with their answers kept."""

    def __call__(self, tokens: int, hidden: int, dtype: str, fusion: Fusion, accepts_sharded: bool = False) -> Decision:
        """For a tensor [tokens, hidden] per rank. dtype: bf16, fp16 or fp32. accepts_sharded: the caller accepts a sharded
        residual."""


def decider(rules: Rules) -> Decider:
    """See `Decider`."""

    @lru_cache(maxsize=_MAX_CACHED)
    def decide(tokens: int, hidden: int, dtype: str, fusion: Fusion, accepts_sharded: bool = False) -> Decision:
        message = Message("all_reduce", fusion, dtype, tokens, hidden, rules.fingerprint.world)
        return (choose_sharded(message, rules) if accepts_sharded else None) or choose(message, rules)

    return decide
