# SPDX-License-Identifier: Apache-2.0
"""The strategies of `comm` as candidates of a benchmark: the same functions that the runtime calls."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from phalanx.comm.choose import Decider, Rules, decider
from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.strategies import Strategies, available
from phalanx.config.dtypes import parse_dtype
from phalanx.tables.message import Fusion
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.ranks.measure import Candidate


class StrategyCandidates:
    """The strategies of a group by choice. fingerprint: of the machine that the group stands on."""

    def __init__(self, strategies: Strategies) -> None:
        self.strategies = strategies
        self.fingerprint, self.workspace = strategies.fingerprint, strategies.workspace

    def get(self, choice: Choice) -> Candidate:
        if choice.strategy is Strategy.AUTO:
            return self._auto
        runs, refused = self.strategies.runs, self.strategies.refused
        if choice.strategy not in runs:
            raise KeyError(refused.get(choice.strategy, f"{choice.strategy.name} is not built here"))
        strategy = runs[choice.strategy]

        def run(x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
            if fusion is None:
                return (strategy.sum(x),)
            if strategy.sum_norm is None or choice.unfused:
                return finish(strategy.sum(x), fusion)
            return strategy.sum_norm(x, fusion)

        return run

    def _auto(self, x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
        """What the machine's table (or seed) says for this size."""
        kind = Fusion.NONE
        if fusion is not None:
            kind = Fusion.of(fusion.quant, token_scale=fusion.scale is None, keep_norm=fusion.keep_norm)
        chosen = self._decide(x.shape[0], x.shape[1], parse_dtype(str(x.dtype)), kind)
        return self.get(Choice(chosen.strategy, unfused=not chosen.fused))(x, fusion)

    @cached_property
    def _decide(self) -> Decider:
        return decider(Rules(self.fingerprint, self.strategies.refused, table_for(self.fingerprint).lookup))


def open_group(group: Group, device: torch.device, max_bytes: int) -> StrategyCandidates:
    """What the ranks of `group` can run; collective. max_bytes: the longest message that a workspace must hold without chunks.

    Raises RuntimeError on every rank where GPUs that reach each other have no workspace: a sweep of NCCL alone would say nothing.
    """
    strategies = available(group, device, detect_fingerprint(device, group.size, group), max_bytes)
    if device.type == "cuda" and strategies.refused:
        raise RuntimeError(next(iter(strategies.refused.values())))
    return StrategyCandidates(strategies)
