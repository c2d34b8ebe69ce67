# SPDX-License-Identifier: Apache-2.0
"""`TokenHistory`: the tokens of each slot on the device, so that a proposer need not wait for the host to name them."""

from __future__ import annotations

import torch

from phalanx.engine.messages import SlotAssignment
from phalanx.kernels.speculation.lookup import append_tokens
from phalanx.worker.speculation.proposer import SampledRows


class TokenHistory:
    """tokens [slots, max_seq_len] int32: those of each slot, by position. What lies behind a slot's last one means nothing."""

    def __init__(self, slots: int, max_seq_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, max_seq_len, dtype=torch.int32, device=device)

    def admit(self, assignment: SlotAssignment) -> None:
        """As `Proposer`."""
        tokens = torch.tensor(assignment.token_ids, dtype=torch.int32)
        if self.tokens.is_cuda:
            tokens = tokens.pin_memory()
        self.tokens[assignment.slot, : len(tokens)].copy_(tokens, non_blocking=True)

    def append(self, rows: SampledRows) -> None:
        """Take in the tokens that a step has sampled."""
        append_tokens(self.tokens, rows.slots, rows.lengths, rows.sampled)
