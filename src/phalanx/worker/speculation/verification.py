# SPDX-License-Identifier: Apache-2.0
"""`Verification`: the rows of a step that verify drafts, between the host, which may know neither their start nor their tokens, and
the slots' state on the device (`kernels.speculation.drafts`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import StepRow
from phalanx.kernels.speculation.drafts import IN_SLOT, LENGTH, accept_drafts, expand_drafts
from phalanx.worker.input_batch import BlockTables, HostBatch, Upload

Longs = np.ndarray[Any, np.dtype[np.int64]]


def verifying_rows(rows: Sequence[StepRow]) -> int:
    """How many rows, which come first, verify; 0 for a step whose rows all begin where the host knows, without drafts."""
    if not any(row.drafts or row.late for row in rows):
        return 0
    return sum(row.verifies for row in rows)


class Verification:
    """The rows of one step that sample: S, of which the first R verify k drafts each. T tokens are sampled: k + 1 for each of
    those, one for each other.

    slots, starts [S]: the slot, and the position of the last token; known after `expand`, which writes the forward's input.
    at [S]: which of the forward's tokens gave the row's first one.
    capacities [S]: positions of the slot that have blocks.
    drafts [R, k]: those that are verified; known after `expand`.
    out [S, k + 2]: see `accept_drafts`; known after `accept`.
    row, place [T], on the host: the row of each sampled token, and its place among that row's.
    lowest [T], on the host: the lowest position that each sampled token may have. positions [T]: the one that it has.
    """

    out: Tensor

    def __init__(
        self, state: Tensor, tables: BlockTables, upload: Upload, rows: Sequence[StepRow], verifying: int, host_batch: HostBatch,
        rates: Tensor | None = None,
    ) -> None:  # fmt: skip
        """rows: those of the step that sample. rates: see `accept_drafts`."""
        self.rows, self.k = verifying, rows[0].drafts if verifying else 0
        self._state, self._tables, self._rates = state, tables, rates
        width = self.k + 1
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        ends = np.array([row.start if row.verifies else row.start + row.count - 1 for row in rows], dtype=np.int64)
        late = np.array([row.late for row in rows], dtype=np.int64)
        starts = ends.copy()
        starts[:verifying][late[:verifying] > 0] = IN_SLOT
        capacities = tables.capacities(slots)
        known = [row.tokens or [IN_SLOT] * width for row in rows[:verifying]]
        ids = np.array(list(chain.from_iterable(known)), dtype=np.int64).reshape(verifying, width)
        first = np.concatenate([np.repeat(np.arange(verifying), width), np.arange(verifying, len(rows))])
        self.place: Longs = np.concatenate([np.tile(np.arange(width), verifying), np.zeros(len(rows) - verifying, dtype=np.int64)])
        self.row: Longs = first
        self.lowest: Longs = (ends - late)[first] + self.place + 1
        at = host_batch.logit_rows[: len(first)][self.place == 0]
        self.slots, self.starts, self.at, self.capacities, self._ids, self._row, self._place = upload.send(
            [slots, starts, at, capacities, ids, first, self.place]
        )
        self.drafts = torch.empty((verifying, self.k), dtype=torch.int64, device=state.device)

    def take_starts(self, starts: Tensor) -> None:
        """On a stage that has no state: the starts [R] that another stage has."""
        self.starts[: self.rows] = starts

    def expand(
        self, token_ids: Tensor, positions: Tensor, kv_slots: Tensor, kv_lengths: Tensor, more_kv_slots: Sequence[Tensor] = ()
    ) -> None:
        """Write the forward's input of the rows that verify, whose tokens come first in it. more_kv_slots: of the other groups."""
        if self.rows:
            tables, block_size = self._tables.device, self._tables.block_size
            expand_drafts(
                self._state, tables[0], block_size, self.slots[: self.rows], self.starts[: self.rows],
                self.capacities[: self.rows], self._ids, token_ids=token_ids, positions=positions, kv_slots=kv_slots,
                kv_lengths=kv_lengths, drafts=self.drafts,
            )  # fmt: skip
            for table, group_slots in zip(tables[1:], more_kv_slots, strict=True):
                count = self.rows * (self.k + 1)
                at, slots = positions[:count], self.slots[: self.rows].repeat_interleave(self.k + 1)
                places = table[slots, at // block_size].long() * block_size + at % block_size
                group_slots[:count] = torch.where(kv_slots[:count] < 0, -1, places)

    @cached_property
    def positions(self) -> Tensor:
        """[T] of the sampled tokens, on the device."""
        return self.starts.index_select(0, self._row) + self._place + 1

    def drafts_before(self) -> Tensor:
        """[T, k]: the drafts that lie before each sampled token in its row, NO_DRAFT else."""
        drafts = torch.cat([self.drafts, self.drafts.new_full((len(self.slots) - self.rows, self.k), -1)])[self._row]
        return drafts.masked_fill(torch.arange(self.k, device=drafts.device) >= self._place.unsqueeze(1), -1)

    def accept(self, tokens: Tensor) -> Tensor:
        """Accept drafts by the sampled tokens [T], and move the slots on. Returns `out`."""
        self.out = torch.empty((len(self.slots), self.k + 2), dtype=torch.int64, device=tokens.device)
        accept_drafts(self._state, self.slots, self.starts, tokens, self.drafts, self.out, self._rates)
        return self.out

    @property
    def kept(self) -> Tensor:
        """[T] bool: the sampled tokens that are part of the result."""
        return self.out[self._row, self._place] >= 0

    @property
    def lengths(self) -> Tensor:
        """[S]: the position of each row's last token now."""
        return self._state[LENGTH, self.slots]
