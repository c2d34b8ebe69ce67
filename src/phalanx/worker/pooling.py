# SPDX-License-Identifier: Apache-2.0
"""The vectors of prompts: hidden states behind the final norm, pooled over a prompt as its steps compute them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.engine.messages import SlotAssignment, StepRow


class PooledStates:
    """The slots whose requests want a vector. Every rank of every stage has them, so that all take the same branch."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._sums: dict[int, Tensor] = {}  # of the mean: [hidden_size] fp32, over what has been computed

    def admit(self, assignment: SlotAssignment) -> None:
        self.release(assignment.slot)
        if assignment.params.pooling is not None:
            self._kinds[assignment.slot] = assignment.params.pooling

    def release(self, slot: int) -> None:
        self._kinds.pop(slot, None)
        self._sums.pop(slot, None)

    def any_of(self, rows: Sequence[StepRow]) -> bool:
        """Whether hidden states of the step are wanted."""
        return bool(self._kinds) and any(row.slot in self._kinds for row in rows)

    def pool(self, rows: Sequence[StepRow], hidden_states: Tensor) -> tuple[list[int], list[Tensor]]:
        """Take in a step. hidden_states: [T, hidden_size] of its rows in order, behind the final norm. Returns the rows that end
        their prompt, and their vectors [hidden_size] fp32: of the last token, or the mean of all."""
        ended: list[int] = []
        vectors: list[Tensor] = []
        begin = 0
        for index, row in enumerate(rows):
            states, begin = hidden_states[begin : begin + row.count], begin + row.count
            kind = self._kinds.get(row.slot)
            if kind == "mean":
                total = states.float().sum(0)
                before = self._sums.get(row.slot)
                self._sums[row.slot] = total if before is None else before.add_(total)
            if kind is not None and row.samples:
                ended.append(index)
                count = row.start + row.count
                vectors.append(states[-1].float() if kind == "last" else self._sums[row.slot] / count)
        return ended, vectors
