# SPDX-License-Identifier: Apache-2.0
"""The vectors of prompts: hidden states behind the final norm, pooled over a prompt as its steps compute them, or logits behind its
last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepRow


class PooledStates:
    """The slots whose requests want a vector. Every rank of every stage has them, so that all take the same branch."""

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}
        self._sums: dict[int, Tensor] = {}  # of the mean: [hidden_size] fp32, over what has been computed

    def admit(self, assignment: SlotAssignment) -> None:
        self.release(assignment.slot)
        if assignment.params.pooling is not None:
            self._params[assignment.slot] = assignment.params

    def release(self, slot: int) -> None:
        self._params.pop(slot, None)
        self._sums.pop(slot, None)

    def any_of(self, rows: Sequence[StepRow]) -> bool:
        """Whether hidden states of the step are wanted."""
        return bool(self._params) and any(row.slot in self._params for row in rows)

    def pool(
        self, rows: Sequence[StepRow], hidden_states: Tensor, logits: Callable[[Tensor], Tensor]
    ) -> tuple[list[int], list[Tensor]]:
        """Take in a step. Returns the rows that end their prompt, and their vectors in fp32: of the last token [hidden_size], the
        mean of all [hidden_size], or the logits of the request's tokens [tokens].

        hidden_states: [T, hidden_size] of its rows in order, behind the final norm. logits: those [P, vocab_size] of states
        [P, hidden_size]; collective.
        """
        ended: list[int] = []
        vectors: list[Tensor] = []
        scored: list[int] = []  # those vectors that become logits
        begin = 0
        for index, row in enumerate(rows):
            states, begin = hidden_states[begin : begin + row.count], begin + row.count
            params = self._params.get(row.slot)
            if params is not None and params.pooling == "mean":
                total = states.float().sum(0)
                before = self._sums.get(row.slot)
                self._sums[row.slot] = total if before is None else before.add_(total)
            if params is None or not row.samples:
                continue
            if params.pooling == "logits":
                scored.append(len(ended))
            ended.append(index)
            mean = params.pooling == "mean"
            vectors.append(self._sums[row.slot] / (row.start + row.count) if mean else states[-1])
        if scored:
            of_states = logits(torch.stack([vectors[place] for place in scored]))
            for place, every in zip(scored, of_states, strict=True):
                tokens = self._params[rows[ended[place]].slot].pooled_tokens or ()
                vectors[place] = torch.stack([every[token] for token in tokens])
        return ended, [vector.float() for vector in vectors]
