# SPDX-License-Identifier: Apache-2.0
"""How a collective can run: the strategies by number, and a choice among them.

To add a strategy, give it a free number here, and its numeric class below if its arithmetic differs; the CSVs, tables, C++ and
pictures take it from here (TensorRT-LLM's `strategy_name_to_enum`; the axes of its `Constants` are in `grid`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from phalanx.errors import OptionError
from phalanx.tables.message import Fusion


class Strategy(IntEnum):
    """TensorRT-LLM's numbers, never renumbered. Off a GPU, GLOO stands in NCCL's place (number 0)."""

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


SUPPORTED = (Strategy.NCCL, Strategy.ONESHOT, Strategy.TWOSHOT)
"""What Phalanx runs; the other numbers are read, kept and written."""

# Tuning compares only strategies of one class: another arithmetic is never chosen because it is faster.
_OTHER_CLASS = {Strategy.LOWPRECISION: "quantized wire", Strategy.AUTO: "none of its own"}
# These run the work behind the sum in a kernel of its own, always.
_NEVER_FUSED = (Strategy.NCCL, Strategy.NCCL_SYMMETRIC, Strategy.AUTO)

_UNFUSED = "+UNFUSED"


def numeric_class(strategy: Strategy) -> str:
    """ "exact" for sums that accumulate in full width; else the name of another class."""
    return _OTHER_CLASS.get(strategy, "exact")


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """A strategy, and whether the fusion runs as a following kernel (which NCCL's always does, so it is not said there)."""

    strategy: Strategy
    unfused: bool = False

    def __str__(self) -> str:
        return self.name()

    def name(self, sm: int = 90) -> str:
        """As CSVs have it: "NCCL", "ONESHOT", "ONESHOT+UNFUSED"; on sm 0, "GLOO" is 0's name."""
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
        return cls(strategy, text != plain and strategy not in _NEVER_FUSED)

    def fuses(self, fusion: Fusion) -> bool:
        """Whether this runs `fusion` in the collective's own kernel."""
        return fusion is not Fusion.NONE and not self.unfused and self.strategy not in _NEVER_FUSED


INCUMBENT = Choice(Strategy.NCCL)
"""What a challenger must beat."""


def choices(fusion: Fusion) -> tuple[Choice, ...]:
    """Everything of ours that can run `fusion`, the incumbent first."""
    fused = [Choice(strategy) for strategy in SUPPORTED]
    unfused = [Choice(strategy, unfused=True) for strategy in SUPPORTED if strategy not in _NEVER_FUSED]
    return (*fused, *(unfused if fusion is not Fusion.NONE else ()))
