# SPDX-License-Identifier: Apache-2.0
"""Which strategy runs a message: the table, else the seed, else NCCL. A pure function of what all ranks hold alike, so that every
rank comes to the same answer without asking the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.admit import MAX_WORLD, admit
from phalanx.tables.message import Fusion, Message
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import Entry

Lookup = Callable[[str, Fusion, int, int], Entry]
"""(dtype, fusion, tokens, hidden) -> what is fastest there: `tables.Table.lookup`."""

_MAX_CACHED = 1 << 16

OWNED_FROM = {2: 128} | dict.fromkeys(range(3, MAX_WORLD + 1), 64)
"""By the size of a group of GPUs: from how many tokens on each row of a residual stream has an owner, who norms it for all. Below,
a message waits for its two hops more than for what they carry."""

LANDED_FROM_BYTES = 32 << 20
"""Messages from which on products are written to who owns their rows: below, parts of products are too small to fill a GPU."""


@dataclass(frozen=True, slots=True)
class Decision:
    """strategy: what runs. fused: the fusion runs in the collective's own kernel. source: who decided. reason: for people. name:
    "ONESHOT/RESIDUAL_RMS_NORM", under which calls are counted. owned: rows have owners, and the new residual is `OwnedRows`."""

    strategy: Strategy
    fused: bool
    source: Literal["table", "seed", "forced", "fallback"]
    reason: str
    name: str
    owned: bool = False


@dataclass(frozen=True)
class Rules:
    """What a group decides by. refused: strategies that this group cannot run at all, with the reason; forced: the strategy that
    the user asked for, None for AUTO; deterministic: no sums of NCCL's own while something else can run; owned_from: tokens from
    which rows have owners where the caller can take that, None for a group that has no kernel for it."""

    fingerprint: Fingerprint
    refused: Mapping[Strategy, str]
    lookup: Lookup | None
    forced: Strategy | None = None
    deterministic: bool = False
    owned_from: int | None = None


def owned_from(fingerprint: Fingerprint) -> int | None:
    """Tokens from which rows have owners on such a machine; None where there is no kernel for it."""
    return OWNED_FROM.get(fingerprint.world) if fingerprint.on_gpu and fingerprint.peers_reach else None


def owned(message: Message, rules: Rules) -> Decision | None:
    """The decision for a caller that can take rows with owners, or None: `choose` decides.

    The sums and norms are the same bits as two-shot's, so whoever asks for that, or for sums in rank order, may get this.
    """
    fusion, twoshot = message.fusion, Strategy.TWOSHOT
    if rules.owned_from is None or message.tokens < rules.owned_from or rules.forced not in (None, twoshot):
        return None
    known = fusion.quant == "fp8" or fusion is Fusion.RESIDUAL_RMS_NORM
    if not known or fusion.keeps_norm or message.hidden % 16:
        return None
    if rules.refused.get(twoshot) or admit(twoshot, message, rules.fingerprint):
        return None
    reason = f"from {rules.owned_from} tokens on, whoever adds a row up norms it for all"
    return Decision(twoshot, True, "forced" if rules.forced else "seed", reason, f"TWOSHOT+OWNED/{fusion.name}", owned=True)


def choose(message: Message, rules: Rules) -> Decision:
    """What runs `message`, and why."""

    def refusal(strategy: Strategy) -> str | None:
        return rules.refused.get(strategy) or admit(strategy, message, rules.fingerprint)

    def decide(strategy: Strategy, fused: bool, source: Literal["table", "seed", "forced", "fallback"], reason: str) -> Decision:
        fused = Choice(strategy, unfused=not fused).fuses(message.fusion)
        return Decision(strategy, fused, source, reason, f"{Choice(strategy).name(rules.fingerprint.sm)}/{message.fusion.name}")

    def fall_back(why: str) -> Decision:
        others = (Strategy.TWOSHOT, Strategy.ONESHOT) if rules.deterministic else ()
        for strategy in others:
            if refusal(strategy) is None:
                return decide(strategy, True, "fallback", f"{why}; sums in rank order were asked for")
        return decide(Strategy.NCCL, False, "fallback", why)

    if rules.forced is not None:
        why = refusal(rules.forced)
        if why is None:
            return decide(rules.forced, True, "forced", "allreduce_strategy asks for it")
        return fall_back(f"allreduce_strategy asks for {rules.forced.name}, which cannot run this: {why}")
    if rules.lookup is None:
        return fall_back("there is no table")
    entry = rules.lookup(message.dtype, message.fusion, message.tokens, message.hidden)
    why = refusal(entry.strategy)
    if why is not None:
        return fall_back(f"{entry.strategy.name} ({entry.reason}) cannot run this: {why}")
    if rules.deterministic and entry.strategy is Strategy.NCCL and rules.fingerprint.on_gpu:
        return fall_back(f"NCCL ({entry.reason}) adds in an order of its own")
    return decide(entry.strategy, entry.fused, entry.source, entry.reason)


class Chooser:
    """`choose` with its answers kept: a look-up in a dict for each size that has come before."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._kept: dict[tuple[int, int, str, Fusion, bool], Decision] = {}

    def __call__(self, tokens: int, hidden: int, dtype: str, fusion: Fusion, may_own: bool = False) -> Decision:
        """For a tensor [tokens, hidden] per rank; dtype: bf16, fp16 or fp32. may_own: the caller can take rows with owners."""
        key = (tokens, hidden, dtype, fusion, may_own)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MAX_CACHED:
                self._kept.clear()
            message = Message("all_reduce", fusion, dtype, tokens, hidden, self.rules.fingerprint.world)
            found = (owned(message, self.rules) if may_own else None) or choose(message, self.rules)
            self._kept[key] = found
        return found
