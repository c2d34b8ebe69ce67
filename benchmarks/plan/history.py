# SPDX-License-Identifier: Apache-2.0
"""What the engine did when committed rows were measured, and does no longer: priced for those rows alone.

Until 72457fc each layer with experts in FP8 gathered the residual in front of its router, from OWNED_ROWS rows of a step on: an
all-reduce of owned rows did not keep the norm that the router reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.plan.rows import Row
from phalanx.plan import coefficients
from phalanx.plan.coefficients import Coefficients
from phalanx.plan.cost import Costs

GATHERED_UNTIL = "2026-11-25"
"""The last day with figures of engines that gathered the residual."""
OWNED_ROWS = 128
"""Rows of a step from which on all-reduces left the residual with the ranks that own its rows."""


@dataclass(frozen=True)
class FittedCoefficients(Coefficients):
    """c_gather: microseconds in which the gather of a residual began, beside its bytes."""

    c_gather: float = 0.0


class GatheringCosts(Costs):
    """Those of an engine that gathered the residual."""

    def _all_reduces_us(self, tokens: int, layers: int, moe_layers: int) -> float:
        us = super()._all_reduces_us(tokens, layers, moe_layers)
        experts, now = self.shape.experts, self.machine.coefficients
        assert isinstance(now, FittedCoefficients)
        kept_norm = experts is not None and not experts.mxfp4 and self.split.ep == 1 and self._experts_in_fp8
        if self.strategy == "NCCL" or tokens < OWNED_ROWS or not kept_norm:
            return us
        gather = self._all_reduce("NCCL").us(tokens * self.shape.hidden_size * 2.0) / 2  # half of an all-reduce
        return us + moe_layers * (now.c_gather + gather)


def gathered(row: Row) -> bool:
    return row.date <= GATHERED_UNTIL


def fitted() -> FittedCoefficients:
    """The committed coefficients of H200, and what they were fitted with."""
    entry = coefficients.document()["machines"]["H200"]
    return FittedCoefficients.from_json({**entry["coefficients"], **entry["history"]})
