# SPDX-License-Identifier: Apache-2.0
"""`NgramProposer`: proposes what followed the last tokens of a request where they occurred before, in its prompt or its output."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment
from phalanx.kernels.speculation.lookup import look_up
from phalanx.worker.speculation.proposer import Proposer, SampledRows
from phalanx.worker.speculation.token_history import TokenHistory


class NgramProposer(Proposer):
    """Without weights: two kernels, whose launches need no graph.

    least, most: tokens that must occur again.
    """

    def __init__(self, slots: int, max_seq_len: int, *, least: int, most: int, device: torch.device) -> None:
        self._history = TokenHistory(slots, max_seq_len, device)
        self._least, self._most = least, most

    def admit(self, assignment: SlotAssignment) -> None:
        """As `Proposer`."""
        self._history.admit(assignment)

    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        """As `Proposer`."""
        self._history.append(rows)
        return look_up(self._history.tokens, rows.slots, rows.lengths, self._least, self._most, count) if count else None
