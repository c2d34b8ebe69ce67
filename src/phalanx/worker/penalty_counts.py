# SPDX-License-Identifier: Apache-2.0
"""Which tokens the requests with penalties have had: `PenaltyCounts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PenaltyCounts:
    """Which tokens a request has had: one row of counts for each slot with a penalty, made at first need, doubled when full, and
    dropped with the last of them.

    counts [rows, V] int32: times in the output, kept up to date on the device. in_prompt [rows, V] bool.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots, self._vocab_size, self._device = slots, vocab_size, device
        self._places = dict[int, int]()
        self._drop()

    def _drop(self) -> None:
        self._free = list[int]()
        self.counts = torch.zeros(0, self._vocab_size, dtype=torch.int32, device=self._device)
        self.in_prompt = torch.zeros(0, self._vocab_size, dtype=torch.bool, device=self._device)

    def open(self, slot: int, token_ids: list[int], prompt_length: int) -> None:
        """Start a slot's row from the tokens known so far."""
        if not self._free:
            self._grow()
        row = self._places[slot] = self._free.pop()
        known = torch.tensor(token_ids, dtype=torch.int64).to(self.counts.device)
        self.counts[row].zero_()
        self.counts[row].scatter_add_(0, known[prompt_length:], torch.ones_like(known[prompt_length:], dtype=torch.int32))
        self.in_prompt[row].zero_()
        self.in_prompt[row].index_fill_(0, known[:prompt_length], True)

    def close(self, slot: int) -> None:
        row = self._places.pop(slot, None)
        if row is not None:
            self._free.append(row)
            if not self._places:
                self._drop()

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The places of those slots that have one, in the order of the slots."""
        return [self._places[slot] for slot in slots if slot in self._places]

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """One more of tokens [M] in rows [M]; no row twice."""
        self.counts[rows, tokens] += 1

    def _grow(self) -> None:
        had = len(self.counts)
        more = min(max(had, 4), self._slots - had)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])])
        self._free.extend(range(had + more - 1, had - 1, -1))
