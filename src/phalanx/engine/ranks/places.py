# SPDX-License-Identifier: Apache-2.0
"""What captured forwards read and write, which has its place for good: `DecodePlaces` of rows of one token, `StepPlaces` of any."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.ranks.slots import Arranged, Ints, Words
from phalanx.models.batch import Batch, leading_ones
from phalanx.models.registry import Model
from phalanx.plan import graphs
from phalanx.plan.graphs import Size as Size
from phalanx.plan.graphs import sizes as sizes
from phalanx.plan.weights import layer_bytes

NewBlocks = tuple[Ints, Words]
"""Places [K] in the flattened tables of all slots, and the block ids [K] that are new there: see `SlotTables.append`."""

HOST_COPIES = 4
"""Steps whose facts may wait for the device at a time, before the host waits."""


def worth_padding(model: Model) -> int:
    """Up to how many tokens an eager step would have the GPU wait for the host. From the shape alone: ranks may differ in what they
    hold of a layer by some scales or heads, and must capture the same."""
    fp8 = any(each.dtype == torch.float8_e4m3fn for each in model.layers[0].parameters())
    plain = "fp32" if model.seat.dtype.itemsize == 4 else "bf16"
    held = layer_bytes(model.shape, "fp8" if fp8 else plain).layers[0] / model.seat.group.size
    return graphs.worth_padding(held)


class Places(ABC):
    """What graphs of one kind, of up to `width` tokens, read and write.

    facts [F, width] int64: of tokens, ids (-1: what was sampled into the slot last), positions, KV slots and slots; of rows, KV
    lengths (int32); of neither, places in the flattened tables of all slots (-1: none) and the blocks that are new there.
    hidden: what comes from the stage before; out [width, hidden_size]: the residual stream that a forward ends with.
    Where rows of one token end with it, instead of `out`: logits [width, head's], this rank's, in the model's dtype, and tokens
    [width] int64, the likeliest of all ranks'.
    """

    out: Tensor | None = None
    logits: Tensor | None = None

    def __init__(self, facts: int, width: int, model: Model, *, first: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.facts = torch.zeros(facts, width, dtype=torch.int64, device=device)
        self.facts[2], self.facts[5] = -1, -1
        self.lengths = self.facts[4].view(torch.int32)
        self._shape = width, model.shape.hidden_size
        self.hidden = None if first else torch.zeros(self._shape, dtype=dtype, device=device)
        self._turns = Turns(self.facts)

    @property
    def room(self) -> int:
        """How many new blocks `fill` takes."""
        return self.facts.shape[1]

    @abstractmethod
    def batch(self, size: Size, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        """The batch of a size. tables: of all slots; last_tokens: see `Batch.last`."""

    def fill(self, arranged: Arranged, new: NewBlocks, size: Size) -> None:
        """The facts of a step, then padding up to `size`, and its new blocks, at most `room`: one copy to the device."""
        count = len(arranged.token_ids)
        with self._turns.take() as host:
            host[:3, count : size.tokens] = [[0], [0], [-1]]
            host[0, :count] = arranged.token_ids
            host[0, arranged.from_slot_at] = -1
            host[1, :count], host[2, :count] = arranged.positions, arranged.kv_slots
            self._fill_rows(host, arranged, size)
            places, blocks = new
            host[5, len(places) :] = -1
            host[5, : len(places)], host[6, : len(places)] = places, blocks

    @abstractmethod
    def _fill_rows(self, host: Ints, arranged: Arranged, size: Size) -> None:
        """What differs: how the rows are told."""


class DecodePlaces(Places):
    """Of up to `most` rows of one token each: token r's slot is row r's."""

    def __init__(self, most: int, model: Model, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(7, most, model, first=first, dtype=dtype, device=device)
        self.lengths[:] = 1
        self.numbers = torch.arange(most, dtype=torch.int64, device=device)
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.out = None if last else torch.zeros(self._shape, dtype=dtype, device=device)
        self.logits = torch.zeros(most, model.head.width, dtype=dtype, device=device) if model.head is not None else None
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)

    def batch(self, size: Size, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        rows = size.decodes
        ids, positions, kv_slots, slots = self.facts[:4, :rows]
        return Batch(
            token_ids=ids, positions=positions, kv_slots=kv_slots, query_starts=self.starts[: rows + 1],
            kv_lengths=self.lengths[:rows], block_tables=tables, table_rows=slots, logit_rows=self.numbers[:rows],
            query_starts_cpu=list(range(rows + 1)), kv_lengths_cpu=[1] * rows, fixed=True, decodes=rows,
            last=None if last_tokens is None else (last_tokens, slots),
        )  # fmt: skip

    def _fill_rows(self, host: Ints, arranged: Arranged, size: Size) -> None:
        rows, lengths = len(arranged.slots), host[4].view(np.int32)
        host[3, :rows], host[3, rows : size.tokens] = arranged.slots, 0
        lengths[:rows], lengths[rows : size.tokens] = arranged.kv_lengths, 1

    @property
    def slots(self) -> Tensor:
        return self.facts[3]


class StepPlaces(Places):
    """Of up to `most.tokens` tokens, and as many rows as `most` has. More facts: slots of rows, where they begin (int32); tokens
    whose logits are wanted; slots of the rows that sample. Of the tokens' slots only those are told that an id of -1 asks for."""

    def __init__(self, most: Size, model: Model, *, first: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(11, max(most.tokens, most.decodes + most.prompts), model, first=first, dtype=dtype, device=device)
        self.starts = self.facts[8].view(torch.int32)
        self.out = torch.zeros(self._shape, dtype=dtype, device=device)

    def batch(self, size: Size, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        tokens, decodes, rows = size.tokens, size.decodes, size.decodes + size.prompts
        ids, positions, kv_slots, slots = self.facts[:4, :tokens]
        return Batch(
            token_ids=ids, positions=positions, kv_slots=kv_slots, query_starts=self.starts[: rows + 1],
            kv_lengths=self.lengths[:rows], block_tables=tables, table_rows=self.facts[7, :rows], logit_rows=self.facts[9, :0],
            query_starts_cpu=[*range(decodes + 1), *[tokens] * size.prompts], kv_lengths_cpu=[1] * rows, fixed=True,
            decodes=decodes, last=None if last_tokens is None else (last_tokens, slots),
        )  # fmt: skip

    def _fill_rows(self, host: Ints, arranged: Arranged, size: Size) -> None:
        rows, count = len(arranged.slots), len(arranged.token_ids)
        leading, begin, most = leading_ones(arranged.query_starts), size.decodes, size.decodes + size.prompts
        end = begin + rows - leading
        slots, lengths, starts = host[7], host[4].view(np.int32), host[8].view(np.int32)
        for fact, told in ((slots, arranged.slots), (lengths, arranged.kv_lengths)):
            fact[:leading], fact[leading:begin], fact[begin:end], fact[end:most] = told[:leading], 0, told[leading:], 0
        starts[:leading], starts[leading:begin] = arranged.query_starts[:leading], leading
        starts[begin : end + 1], starts[end + 1 : most + 1] = arranged.query_starts[leading:], count
        host[3, arranged.from_slot_at] = arranged.from_slot
        host[9, : len(arranged.logit_rows)] = arranged.logit_rows
        host[10, : len(arranged.sampled_slots)] = arranged.sampled_slots

    @property
    def logit_rows(self) -> Tensor:
        return self.facts[9]

    @property
    def sampled_slots(self) -> Tensor:
        return self.facts[10]


class Turns:
    """Page-locked copies of a small tensor that are filled in turn, since a copy may still wait in the device's queue when the next
    one is filled; on CPU there is one."""

    def __init__(self, there: Tensor) -> None:
        self._there, on_gpu = there, there.is_cuda
        self._host = [torch.zeros(there.shape, dtype=there.dtype, pin_memory=on_gpu) for _ in range(HOST_COPIES if on_gpu else 1)]
        self._arrays = [host.numpy() for host in self._host]
        self._copied = [torch.cuda.Event() for _ in self._host] if on_gpu else []  # type: ignore[no-untyped-call]
        self._next = 0

    @contextmanager
    def take(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        """The next one, holding what it held when its turn last came; its copy to the device begins once it is left."""
        turn, self._next = self._next, (self._next + 1) % len(self._host)
        if self._copied:
            self._copied[turn].synchronize()
        yield self._arrays[turn]
        self._there.copy_(self._host[turn], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
