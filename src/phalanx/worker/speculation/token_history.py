# SPDX-License-Identifier: Apache-2.0
"""`TokenHistory`: the tokens of each slot on the device, so that a proposer need not wait for the host to name them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment
from phalanx.kernels.speculation.lookup import append_tokens
from phalanx.worker.speculation.proposer import SampledRows


class TokenHistory:
    """tokens [slots, max_seq_len] int32: those of each slot, by position. What lies behind a slot's last one means nothing."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    @classmethod
    def empty(cls, slots: int, max_seq_len: int, device: torch.device) -> TokenHistory:
        return cls(torch.zeros(slots, max_seq_len, dtype=torch.int32, device=device))

    def admit(self, assignment: SlotAssignment) -> None:
        """As `Proposer`."""
        write_row(self.tokens[assignment.slot, : len(assignment.token_ids)], assignment.token_ids)

    def append(self, rows: SampledRows) -> None:
        """Take in the tokens that a step has sampled."""
        append_tokens(self.tokens, rows.slots, rows.lengths, rows.sampled)


def write_row(row: Tensor, tokens: Sequence[int]) -> None:
    """Copy the tokens to the device, without waiting for it."""
    source = torch.tensor(tokens, dtype=torch.int32)
    row.copy_(source.pin_memory() if row.is_cuda else source, non_blocking=True)
