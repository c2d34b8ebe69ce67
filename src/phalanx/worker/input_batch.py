# SPDX-License-Identifier: Apache-2.0
"""The input batch of a step: the state per slot (block tables, prompts), and the index arrays of one forward, built in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment, StepRow
from phalanx.errors import EngineError

Ints = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.int32]]
NO_SLOTS: Ints = np.empty((0, 0), dtype=np.int64)
_ALIGNED_ENTRIES = 4  # of 4 bytes: what the kernels' compiler tells apart are multiples of 16 bytes
_SECTION = 16  # bytes: every array in an upload begins at a multiple


@dataclass(frozen=True)
class HostBatch:
    """The index arrays of R rows with T tokens; names and shapes as in models.batch.Batch. Each token of a row of the step that
    verifies drafts is a row here: where the slot has its start, at the highest position that it may have.

    slots [R]; sampled_slots [S]: of the rows that sample. token_ids: 0 where the id was sampled into a slot by an earlier step: at
    the indices `from_slot_at` [G], from the slots `from_slot` [G]. logit_rows [S + P]: the last token of each row that samples,
    then the tokens that are followed by prompt tokens to report. more_kv_slots [G - 1, T]: those of the other groups of layers.
    """

    slots: Ints
    sampled_slots: Ints
    token_ids: Ints
    positions: Ints
    kv_slots: Ints
    logit_rows: Ints
    from_slot_at: Ints
    from_slot: Ints
    query_starts: Words
    kv_lengths: Words
    more_kv_slots: Ints = field(default_factory=lambda: NO_SLOTS)

    @classmethod
    def empty(cls) -> HostBatch:
        """Of no rows."""
        none, words = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        return cls(none, none, none, none, none, none, none, none, np.zeros(1, dtype=np.int32), words)

    @property
    def prefill_pairs(self) -> int:
        """As in `StepExtent`."""
        counts = np.diff(self.query_starts).astype(np.int64)
        pairs = counts * (2 * self.kv_lengths.astype(np.int64) - counts + 1) // 2
        return int(pairs[counts > 1].sum())

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """All of them, in the order of the fields: the device needs them."""
        return [
            self.slots, self.sampled_slots, self.token_ids, self.positions, self.kv_slots, self.logit_rows,
            self.from_slot_at, self.from_slot, self.query_starts, self.kv_lengths,
            *([self.more_kv_slots] if len(self.more_kv_slots) else []),
        ]  # fmt: skip


class BlockTables:
    """Each slot's block table of each group of layers, [groups, slots, width] int32, on the host and, on GPU, once more on the
    device. A slot's tables have as many blocks in each group."""

    def __init__(self, slots: int, max_seq_len: int, block_size: int, device: torch.device, groups: int = 1) -> None:
        self.block_size = block_size
        self.width = -(-max_seq_len // block_size)
        if groups > 1:  # tables of all groups begin alike: kernels are compiled for the alignment of their arguments
            self.width += -self.width % _ALIGNED_ENTRIES
        self.host = np.zeros((groups, slots, self.width), dtype=np.int32)
        self._used = np.zeros(slots, dtype=np.int64)
        # On CPU the device's table is the host's: one memory.
        self.device = (
            torch.from_numpy(self.host) if device.type == "cpu" else torch.zeros(self.host.shape, dtype=torch.int32, device=device)
        )

    def clear(self, slot: int) -> None:
        """Empty the table of the slot."""
        self._used[slot] = 0

    def append(self, rows: Sequence[StepRow]) -> tuple[Ints, Words]:
        """Append the rows' blocks. Returns (entries of the flattened tables [K], block ids [K]) for the device's copies.

        Raises EngineError for more blocks than max_seq_len needs.
        """
        growing = [row for row in rows if row.blocks]
        if not growing:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        slots = np.array([row.slot for row in growing], dtype=np.int64)
        groups = len(self.host)
        counts = np.array([len(row.blocks) for row in growing], dtype=np.int64) // groups
        begins = self._used[slots]
        ends = begins + counts
        if int(ends.max()) > self.width:
            worst = int(ends.argmax())
            raise EngineError(
                f"slot {growing[worst].slot} has too many blocks: {ends[worst]}", held=f"max_seq_len needs {self.width} at most"
            )
        ids = np.array([block for row in growing for block in row.blocks], dtype=np.int32)
        firsts = slots * self.width + begins - (np.cumsum(counts) - counts)
        entries = np.arange(len(ids) // groups, dtype=np.int64) + np.repeat(firsts, counts)
        if groups > 1:
            entries = np.add.outer(entries, np.arange(groups) * self.host[0].size).reshape(-1)
        self.host.reshape(-1)[entries] = ids
        self._used[slots] = ends
        return entries, ids

    def capacities(self, slots: Ints) -> Ints:
        """How many positions of each of these slots have blocks."""
        return self._used[slots] * self.block_size

    def build(self, rows: Sequence[StepRow], reported: Sequence[range], verifying: int = 0) -> HostBatch:
        """The index arrays of the rows, whose blocks have been appended. `reported[r]`: the tokens of row r (0 .. count-1) that are
        followed by a prompt token to report. verifying: how many rows, the first ones, have drafts to verify, or would have them:
        `Verification.expand` writes their input on the device."""
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        sampled = np.array([row.samples for row in rows], dtype=bool)
        known = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        if verifying:
            width = rows[0].count
            slots, counts, sampled, known = (
                np.concatenate([np.repeat(array[:verifying], width), array[verifying:]])
                for array in (slots, counts, sampled, known)
            )
            verified = verifying * width
            places = np.add.outer(starts[:verifying], np.arange(width)).reshape(-1)
            starts = np.concatenate([np.minimum(places, self.capacities(slots[:verified]) - 1), starts[verifying:]])
            counts[:verified] = known[:verified] = 1
            reported = [*([range(0)] * verified), *reported[verifying:]]
            rows = rows[verifying:]
        unknown = known == 0
        ends = np.cumsum(counts)
        begins = ends - counts
        total = int(ends[-1])
        if total == len(counts):
            positions, token_slots = starts, slots
        else:
            positions = np.arange(total, dtype=np.int64) + np.repeat(starts - begins, counts)
            token_slots = np.repeat(slots, counts)
        columns = positions // self.block_size
        blocks = self.host[0, token_slots, columns].astype(np.int64)
        more_kv_slots = NO_SLOTS
        if len(self.host) > 1:
            more = self.host[1:, token_slots, columns].astype(np.int64)
            more_kv_slots = np.ascontiguousarray(more * self.block_size + positions % self.block_size)
        lengths = starts + counts
        short = lengths > self._used[slots] * self.block_size
        if short.any():
            raise EngineError(f"slots {slots[short].tolist()} were scheduled beyond their blocks", why="the KV accounting is wrong")
        if not np.array_equal(np.maximum(known, 1), counts):
            raise EngineError(
                f"a step of {total} tokens has {int(np.maximum(known, 1).sum())} token ids",
                why="only a decode row may have no id",
            )  # fmt: skip
        ids = np.zeros(total, dtype=np.int64)
        if not unknown.all():
            named = np.repeat(~unknown, counts)
            named[: total - sum(row.count for row in rows)] = False  # of rows that verify
            ids[named] = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, int(named.sum()))
        scored = [np.arange(begin + part.start, begin + part.stop) for begin, part in zip(begins, reported, strict=True) if part]
        return HostBatch(
            slots=slots, sampled_slots=slots[sampled], token_ids=ids, positions=positions,
            kv_slots=blocks * self.block_size + positions % self.block_size,
            logit_rows=np.concatenate([ends[sampled] - 1, *scored]),
            from_slot_at=begins[unknown], from_slot=slots[unknown],
            query_starts=np.concatenate([[0], ends]).astype(np.int32), kv_lengths=lengths.astype(np.int32),
            more_kv_slots=more_kv_slots,
        )  # fmt: skip


class PromptLogprobs:
    """The prompts whose tokens' logprobs are wanted, per slot."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[list[int], int]] = {}  # slot -> (prompt, alternatives per token)

    def admit(self, assignment: SlotAssignment) -> None:
        self.release(assignment.slot)
        if assignment.params.prompt_logprobs is not None:
            prompt = assignment.token_ids[: assignment.prompt_length]
            self._prompts[assignment.slot] = (prompt, assignment.params.prompt_logprobs)

    def release(self, slot: int) -> None:
        self._prompts.pop(slot, None)

    def reported(self, row: StepRow) -> range:
        """The tokens of the row that are followed by a prompt token to report."""
        if row.slot not in self._prompts:
            return range(0)
        return range(max(min(row.count, len(self._prompts[row.slot][0]) - 1 - row.start), 0))

    def targets(self, row: StepRow) -> tuple[list[int], list[int]]:
        """For each of `reported`: the token that follows, and how many alternatives are wanted."""
        part = self.reported(row)
        if not part:
            return [], []
        prompt, alternatives = self._prompts[row.slot]
        return prompt[row.start + 1 : row.start + 1 + len(part)], [alternatives] * len(part)


class Upload:
    """Moves many small arrays to the device in one copy, from pinned memory; on CPU it returns the arrays themselves.

    Several host buffers are filled in rotation, since a copy may still wait in the device's queue when the next step is built.
    """

    def __init__(self, device: torch.device, buffers: int = 4) -> None:
        self._device = device
        self._buffers = buffers
        self._capacity = 0
        self._next = 0
        self._host: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._target = torch.empty(0)

    def send(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """The arrays as tensors on the device, valid for work queued before the next call."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // _SECTION) * _SECTION
        if size > self._capacity:
            self._grow(size)
        index, self._next = self._next, (self._next + 1) % self._buffers
        self._copied[index].synchronize()
        host = self._host[index].numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._target[:size].copy_(self._host[index][:size], non_blocking=True)
        self._copied[index].record()
        tensors = []
        for array, offset in zip(arrays, offsets, strict=True):
            part = self._target[offset : offset + array.nbytes]
            tensors.append(part.view(torch.int64 if array.dtype == np.int64 else torch.int32).view(array.shape))
        return tensors

    def _grow(self, size: int) -> None:
        torch.cuda.synchronize(self._device)
        self._capacity = 2 * size
        self._host = [torch.empty(self._capacity, dtype=torch.uint8, pin_memory=True) for _ in range(self._buffers)]
        self._copied = [torch.cuda.Event() for _ in range(self._buffers)]  # type: ignore[no-untyped-call]
        self._target = torch.empty(self._capacity, dtype=torch.uint8, device=self._device)
