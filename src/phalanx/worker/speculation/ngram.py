# SPDX-License-Identifier: Apache-2.0
"""`NgramProposer`: proposes what followed the last tokens of a request where they occurred before, in its prompt or its output, or
in the output that its `SamplingParams.prediction` expects."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment
from phalanx.kernels.speculation.lookup import look_up
from phalanx.worker.speculation.proposer import Proposer, SampledRows
from phalanx.worker.speculation.token_history import TokenHistory, write_row


class NgramProposer(Proposer):
    """Without weights: two kernels, whose launches need no graph.

    least, most: tokens that must occur again. max_prediction: tokens of a request's prediction that are looked up, its first ones.
    They stand before the tokens of their slot, behind the prompt's last ones: so the first token has drafts, too.
    """

    def __init__(
        self, slots: int, max_seq_len: int, *, least: int, most: int, device: torch.device, max_prediction: int = 0
    ) -> None:  # fmt: skip
        self._least, self._most, self._text = least, most, 0 if not max_prediction else most + max_prediction
        self._columns = torch.zeros(slots, self._text + max_seq_len, dtype=torch.int32, device=device)
        self._begins = torch.full((slots,), self._text, dtype=torch.int64, device=device)  # of each slot's prediction
        self._history = TokenHistory(self._columns[:, self._text :])

    def admit(self, assignment: SlotAssignment) -> None:
        """As `Proposer`."""
        self._history.admit(assignment)
        predicted = (assignment.params.prediction or [])[: max(self._text - self._most, 0)]
        if predicted:
            predicted = assignment.token_ids[max(assignment.prompt_length - self._most, 0) : assignment.prompt_length] + predicted
            write_row(self._columns[assignment.slot, self._text - len(predicted) : self._text], predicted)
        if self._text:
            self._begins[assignment.slot] = self._text - len(predicted)

    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        """As `Proposer`."""
        self._history.append(rows)
        if not count:
            return None
        return look_up(
            self._columns, rows.slots, rows.lengths, self._begins, self._text, least=self._least, most=self._most, count=count
        )
