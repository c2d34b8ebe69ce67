# SPDX-License-Identifier: Apache-2.0
"""The strategies of `comm` as candidates of a benchmark: the same functions that the runtime calls."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from phalanx.comm.choose import Decider, Rules, decider
from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.group import Group, ResidualRmsNorm
from phalanx.comm.strategies import Strategies, available
from phalanx.comm.tuned_group import TunedGroup
from phalanx.config.dtypes import parse_dtype
from phalanx.tables.message import Fusion
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import Entry, Table
from phalanx.tune.ranks.layer import RowParallelLayer
from phalanx.tune.ranks.measure import Candidate


class StrategyCandidates:
    """The strategies of a group by choice. fingerprint: of the machine that the group stands on. group: the ranks, for layers with
    their GEMM."""

    def __init__(self, strategies: Strategies, group: Group | None = None) -> None:
        self.strategies, self.group = strategies, group
        self.fingerprint, self.workspace = strategies.fingerprint, strategies.workspace

    def get(self, choice: Choice, layer: RowParallelLayer | None = None) -> Candidate:
        if choice.strategy is not Strategy.AUTO and choice.strategy not in self.strategies.runs:
            raise KeyError(self.strategies.refused.get(choice.strategy, f"{choice.strategy.name} is not built here"))
        if layer is not None:
            return self._layer(choice, layer)
        return self._auto if choice.strategy is Strategy.AUTO else self._all_reduce(choice)

    def _all_reduce(self, choice: Choice) -> Candidate:
        strategy = self.strategies.runs[choice.strategy]

        def run(x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
            return (strategy.sum(x),) if fusion is None else strategy.run(x, fusion, fused=not choice.unfused)

        return run

    def _layer(self, choice: Choice, layer: RowParallelLayer) -> Candidate:
        """The layer over a group whose table names nothing else. Raises KeyError as `get`."""
        assert self.group is not None
        refusal = layer.refusal(self.fingerprint.sm)
        if choice.strategy is Strategy.GEMM_RS:
            gemm_rs, residual = self.strategies.runs[Strategy.GEMM_RS].gemm_rs, layer.fusion.residual
            refusal = refusal or layer.gemm_rs_refusal()
            if gemm_rs is None or gemm_rs.targets(residual.shape[0], residual.shape[1], layer.fusion) is None:
                refusal = refusal or f"the memory of GEMM_RS has no room for {residual.nbytes} bytes"
        if refusal is not None:
            raise KeyError(refusal)
        entry = Entry(choice.strategy, not choice.unfused, "table", "measured now")
        lookup = self._table.lookup if choice.strategy is Strategy.AUTO else lambda *_: entry
        group = TunedGroup(self.group, Rules(self.fingerprint, self.strategies.refused, lookup), self.strategies.runs, "none")
        name = choice.name(self.fingerprint.sm).removesuffix("+UNFUSED")

        def run(x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
            assert fusion is not None
            outputs = layer(group, x, fusion.residual)
            if choice.strategy is not Strategy.AUTO and {call.split("/")[0] for call in group.calls} != {name}:
                raise RuntimeError(f"{choice} was to run, and these ran: {group.calls}")
            return outputs

        return run

    def _auto(self, x: Tensor, fusion: ResidualRmsNorm | None) -> tuple[Tensor, ...]:
        """What the machine's table (or seed) says for this size."""
        kind = Fusion.NONE
        if fusion is not None:
            kind = Fusion.of(fusion.quant, token_scale=fusion.scale is None, keep_norm=fusion.keep_norm)
        decision = self._decide(x.shape[0], x.shape[1], parse_dtype(str(x.dtype)), kind)
        return self.get(Choice(decision.strategy, unfused=not decision.fused))(x, fusion)

    @cached_property
    def _table(self) -> Table:
        return table_for(self.fingerprint)

    @cached_property
    def _decide(self) -> Decider:
        return decider(Rules(self.fingerprint, self.strategies.refused, self._table.lookup))


def open_group(group: Group, device: torch.device, max_bytes: int) -> StrategyCandidates:
    """What the ranks of `group` can run; collective. max_bytes: the longest message that a workspace must hold without chunks.

    Raises RuntimeError on every rank where GPUs that reach each other have no workspace: a sweep of NCCL alone would say nothing.
    """
    fingerprint = detect_fingerprint(device, group.size, group)
    strategies = available(group, device, fingerprint, max_bytes, gemm_rs=True, sweeps=True)
    if device.type == "cuda" and strategies.refused:
        raise RuntimeError(next(iter(strategies.refused.values())))
    return StrategyCandidates(strategies, group)
