# SPDX-License-Identifier: Apache-2.0
"""The strategies of a collective by number, and a choice among them.

To add a strategy, give it a free number here, and its numeric class below if its arithmetic differs. CSVs, tables, C++ and plots
take it from here (in TensorRT-LLM: `strategy_name_to_enum`; the axes of its `Constants` are in `grid`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from phalanx.errors import OptionError
from phalanx.tables.message import Caller, Fusion


class Strategy(IntEnum):
    """TensorRT-LLM's numbers, which never change; those of its own strategies begin at 64. Between CPU ranks, GLOO takes the place
    of NCCL (number 0).

    RS_NORM_AG: sequence parallelism between layers: each rank sums its own rows, adds the residual, normalizes and quantizes them,
    and all ranks gather the result; the residual stays sharded. GEMM_RS: the same behind a GEMM that writes each rank's rows
    straight into that rank's memory.
    """

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6
    MNNVL = 7
    NCCL_SYMMETRIC = 8
    SYMM_MEM = 9
    RS_NORM_AG = 64
    GEMM_RS = 65


SEQUENCE_PARALLEL = (Strategy.RS_NORM_AG, Strategy.GEMM_RS)
"""The strategies that leave the residual sharded. They always have a fusion."""
SUPPORTED = (Strategy.NCCL, Strategy.ONESHOT, Strategy.TWOSHOT, *SEQUENCE_PARALLEL)
"""The strategies that Phalanx runs. The other numbers are read, kept and written."""
TENSORRT_LLM = tuple(strategy for strategy in Strategy if strategy not in SEQUENCE_PARALLEL)
"""The strategies that a look-up table of TensorRT-LLM may name, when it is read."""
GENERATED = (Strategy.NCCL, Strategy.ONESHOT, Strategy.TWOSHOT, Strategy.NCCL_SYMMETRIC)
"""Those that TensorRT-LLM's generator writes into it: its dispatcher refuses others that win in a CSV, such as MNNVL."""

# Tuning compares only strategies of one class: a strategy with other arithmetic is never chosen for its speed.
_OTHER_CLASS = {Strategy.LOWPRECISION: "quantized wire", Strategy.AUTO: "none of its own"}
# These always run the fusion in a kernel of its own.
_NEVER_FUSED = (Strategy.NCCL, Strategy.NCCL_SYMMETRIC, Strategy.AUTO)

_UNFUSED = "+UNFUSED"


def numeric_class(strategy: Strategy) -> str:
    """ "exact" for sums that accumulate in full width; else the name of another class."""
    return _OTHER_CLASS.get(strategy, "exact")


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A strategy, and whether the fusion runs as a following kernel. (For NCCL it always does, so unfused is False there.)"""

    strategy: Strategy
    unfused: bool = False

    def __str__(self) -> str:
        return self.name()

    def name(self, sm: int = 90) -> str:
        """As in CSVs: "NCCL", "ONESHOT", "ONESHOT+UNFUSED"; on sm 0, number 0 is "GLOO"."""
        plain = "GLOO" if sm == 0 and self.strategy is Strategy.NCCL else self.strategy.name
        return plain + (_UNFUSED if self.unfused else "")

    @classmethod
    def parse(cls, text: str) -> Choice:
        """The inverse of name(). Raises OptionError that lists the names."""
        plain = text.removesuffix(_UNFUSED)
        try:
            strategy = Strategy["NCCL" if plain == "GLOO" else plain]
        except KeyError:
            known = ", ".join([*Strategy.__members__, "GLOO"])
            raise OptionError(f"strategy {text!r} is unknown", next=f"known: {known}, or one of them with {_UNFUSED}") from None
        if text != plain and strategy in SEQUENCE_PARALLEL:
            raise OptionError(f"strategy {text!r} is unknown", why=f"{plain} always runs its fusion", next=f"use {plain}")
        return cls(strategy, text != plain and strategy not in _NEVER_FUSED)

    def fuses(self, fusion: Fusion) -> bool:
        """Whether this runs `fusion` in the collective's own kernel, which sequence parallelism always does, whatever a table
        says."""
        unfused = self.unfused and self.strategy not in SEQUENCE_PARALLEL
        return fusion is not Fusion.NONE and not unfused and self.strategy not in _NEVER_FUSED


INCUMBENT = Choice(Strategy.NCCL)
"""The choice that a challenger must beat."""


def choices(fusion: Fusion, caller: Caller = Caller.REPLICATED) -> tuple[Choice, ...]:
    """All supported choices for `fusion` and such a caller, the incumbent first."""
    plain = [strategy for strategy in SUPPORTED if strategy not in SEQUENCE_PARALLEL]
    fused = [Choice(strategy) for strategy in plain]
    unfused = [Choice(strategy, unfused=True) for strategy in plain if strategy not in _NEVER_FUSED]
    sharded = [Choice(strategy) for strategy in SEQUENCE_PARALLEL[: int(caller)]] if fusion.shards else []
    return (*fused, *(unfused if fusion is not Fusion.NONE else ()), *sharded)
