# SPDX-License-Identifier: Apache-2.0
"""Decode steps without the host: the forward of R rows of one token each, captured once for some sizes R and replayed.

A step of fewer rows than a size has is padded: a padding row has one token, at position 0 of block 0, which it reads and does not
write (its slot is -1), and nobody looks at what it yields. A size has a second graph for short rows, where attention to so many is
done sooner if none is long. Everything that a graph reads or writes has its place for good (`Places`), shared by all graphs; what
lies between is in one pool of memory that the graphs share, as they run one after the other.

The forward is captured, with what goes before and behind it in a greedy step: the new blocks' way into the tables, the likeliest
tokens, and their way into the slots, where the next step finds them. A step that draws does so from the logits, and overwrites
them. Receiving and sending between pipeline stages stay outside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.ranks.slots import Arranged, Ints, SlotTables, Words
from phalanx.kernels import between, sampling
from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.attention import AttentionBackend
from phalanx.models.registry import Model

Replay = Callable[[], None]
NewBlocks = tuple[Ints, Words]
"""Places [K] in the flattened tables of all slots, and the block ids [K] that are new there: see `SlotTables.append`."""

HOST_COPIES = 4
"""Steps whose facts may wait for the device at a time, before the host waits."""


class Tape(Protocol):
    """How work is captured."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Do the work once, and return what does it again on the same tensors."""

    def rewind(self) -> None:
        """All that was recorded has been dropped; what is recorded from now on begins anew."""


class CudaTape:
    """CUDA graphs in one pool of memory, captured on a stream of their own.

    calls: counters that the work counts up on the host (a group's collectives); a replay counts what the captured work did.
    """

    def __init__(self, device: torch.device, calls: dict[str, int] | None = None) -> None:
        self._calls = {} if calls is None else calls
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, work: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # what happens at the first call only, such as loading kernels, cannot be captured
            self._stream.synchronize()
            graph, before = torch.cuda.CUDAGraph(), self._calls.copy()
            # "thread_local": other threads, such as NCCL's watchdog, may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool = self._pool or graph.pool()
        made = [(name, count - before.get(name, 0)) for name, count in self._calls.items()]

        def replay() -> None:
            graph.replay()
            for name, count in made:
                self._calls[name] += count

        return replay

    def rewind(self) -> None:
        self._pool = None  # it went with its last graph


class Rerun:
    """On CPU: nothing is captured, the work is done again."""

    def record(self, work: Callable[[], None]) -> Replay:
        work()
        return work

    def rewind(self) -> None:
        return


def sizes(max_batch_size: int) -> list[int]:
    """For how many rows graphs are made: few enough to capture, close enough that padding costs little."""
    found = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch_size, 32)]
    return [*(size for size in found if size < max_batch_size), max_batch_size]


class Places:
    """What graphs of up to `rows` rows read and write.

    facts [7, rows] int64: token ids (-1: what was sampled into the slot last), positions, KV slots, slots, KV lengths (int32); and
    of no row in particular, places in the flattened tables of all slots (-1: none) and the blocks that are new there.
    hidden: what comes from the stage before; out: what goes to the next. On the last stage instead logits [rows, width], this
    rank's, in the model's dtype, and tokens [rows] int64, the likeliest of all ranks'.
    """

    def __init__(self, rows: int, model: Model, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.facts = torch.zeros(7, rows, dtype=torch.int64, device=device)
        self.facts[2], self.facts[5] = -1, -1
        self.facts[4].view(torch.int32)[:] = 1
        self.numbers = torch.arange(rows, dtype=torch.int64, device=device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        stream = (rows, model.shape.hidden_size)
        self.hidden = None if first else torch.zeros(stream, dtype=dtype, device=device)
        self.out = None if last else torch.zeros(stream, dtype=dtype, device=device)
        self.logits = torch.zeros(rows, model.head.width, dtype=dtype, device=device) if model.head is not None else None
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._turns = Turns(self.facts)

    def batch(self, size: int, tables: Tensor, last_tokens: Tensor | None) -> Batch:
        """The batch of a size. tables: of all slots; last_tokens: see `Batch.last`."""
        ids, positions, kv_slots, slots, lengths = self.facts[:5, :size]
        return Batch(
            token_ids=ids, positions=positions, kv_slots=kv_slots, query_starts=self.starts[: size + 1],
            kv_lengths=lengths.view(torch.int32)[:size], block_tables=tables, table_rows=slots, logit_rows=self.numbers[:size],
            query_starts_cpu=list(range(size + 1)), kv_lengths_cpu=[1] * size, fixed=True,
            last=None if last_tokens is None else (last_tokens, slots),
        )  # fmt: skip

    def fill(self, arranged: Arranged, new: NewBlocks, size: int) -> None:
        """The facts of these rows, then padding up to `size`, and the new blocks [K], at most `rows`: one copy to the device."""
        rows = len(arranged.slots)
        with self._turns.take() as host:
            host[:5, rows:size] = [[0], [0], [-1], [0], [0]]
            host[0, :rows] = arranged.token_ids
            host[0, arranged.from_slot_at] = -1
            host[1, :rows], host[2, :rows], host[3, :rows] = arranged.positions, arranged.kv_slots, arranged.slots
            lengths = host[4].view(np.int32)
            lengths[rows:size], lengths[:rows] = 1, arranged.kv_lengths
            places, blocks = new
            host[5, len(places) :] = -1
            host[5, : len(places)], host[6, : len(places)] = places, blocks

    @property
    def slots(self) -> Tensor:
        return self.facts[3]


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


class DecodeGraphs:
    """The captured forwards of one rank's model.

    last_tokens [slots] int64: what was sampled last, by slot; written on the last stage, and read on one that is the first too.
    """

    def __init__(
        self, model: Model, backend: AttentionBackend, tables: SlotTables, last_tokens: Tensor, tape: Tape, *,
        first: bool, last: bool, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._model, self._backend, self._tables, self._tape = model, backend, tables, tape
        self._last_tokens, self._both = last_tokens, first and last
        most = len(tables.host)
        self.sizes = sizes(most)
        self.places = Places(most, model, first=first, last=last, dtype=dtype, device=last_tokens.device)
        self._captured: dict[int, Replay] = {}
        self._short: dict[int, tuple[int, Replay]] = {}  # up to which KV length, and what for
        self._ready: list[int] = []  # the captured sizes, in order

    def capture(self, caches: Sequence[KvCache], wanted: Sequence[int]) -> Iterator[int]:
        """Capture the forwards of these sizes over these caches, the largest first: it takes what the others then share. Yields
        each size once it is there, with its graph for short rows where it has one. Collective: all ranks capture the same, as their
        heads and GPUs are alike."""
        for size in sorted(wanted, reverse=True):
            batch = self.places.batch(size, self._tables.device, self._last_tokens if self._both else None)
            self._captured[size] = self._record(batch, caches)
            up_to = self._backend.short_up_to(size)  # once that forward has met all kinds of layers
            if up_to:
                self._short[size] = up_to, self._record(replace(batch, short=True), caches)
            self._ready = sorted(self._captured)
            yield size

    def forget(self) -> None:
        """Drop all graphs, and their memory."""
        self._captured.clear()
        self._short.clear()
        self._ready.clear()
        self._tape.rewind()

    @property
    def count(self) -> int:
        """Graphs of all sizes, captured or not; known once a forward has met all kinds of layers."""
        return sum(2 if self._backend.short_up_to(size) else 1 for size in self.sizes)

    def _record(self, batch: Batch, caches: Sequence[KvCache]) -> Replay:
        batch.attention = self._backend.plan(batch)
        return self._tape.record(partial(self._forward, batch, caches))

    def _forward(self, batch: Batch, caches: Sequence[KvCache]) -> None:
        size, places, head = len(batch.kv_lengths_cpu), self.places, self._model.head
        between.store_words(self._tables.device.view(-1), places.facts[5], places.facts[6])
        stream = self._model.stream(batch, caches, None if places.hidden is None else places.hidden[:size])
        if places.out is not None:
            places.out[:size].copy_(stream)
        if head is not None and places.logits is not None:
            keys = head.keys(head.local(stream, out=places.logits[:size]))
            sampling.settle(keys, places.tokens[:size], (self._last_tokens, places.slots[:size], batch.kv_slots))

    def size_of(self, rows: int) -> int | None:
        """The smallest captured size that holds so many rows."""
        at = bisect_left(self._ready, rows)
        return self._ready[at] if at < len(self._ready) else None

    def replay(self, size: int, arranged: Arranged, new: NewBlocks, receive: Callable[[Tensor], Tensor]) -> None:
        """Forward the rows [R] of one token each, R <= size, into `places`, where it stays until the next replay. new: what the
        device's tables lack, at most as many blocks as slots. `receive` fills the residual stream [R, hidden_size] on later stages.
        """
        up_to, short = self._short.get(size, (0, None))
        run = short if short is not None and arranged.kv_lengths.max() <= up_to else self._captured[size]
        self.places.fill(arranged, new, size)
        if self.places.hidden is not None:
            receive(self.places.hidden[: len(arranged.slots)])
        run()
