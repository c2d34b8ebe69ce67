# SPDX-License-Identifier: Apache-2.0
"""Decode steps without the host: the forward of R rows of one token each, captured once for some sizes R and replayed.

A step of fewer rows than a size has is padded: a padding row has one token, at position 0 of block 0, which it reads and does not
write (its slot is -1), and nobody looks at what it yields. Everything that a graph reads or writes has its place for good
(`Places`), shared by all sizes; what lies between is in one pool of memory that the graphs share, as they run one after the other.

The forward alone is captured. Receiving and sending between pipeline stages, planning attention and sampling go before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.ranks.slots import Arranged, SlotTables
from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.attention import AttentionBackend
from phalanx.models.registry import Model

Replay = Callable[[], None]


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

    facts [5, rows] int64: token ids (-1: what was sampled into the slot last), positions, KV slots, slots, KV lengths (int32).
    hidden: what comes from the stage before; out: what goes to the next. logits: on the last stage.
    """

    def __init__(self, rows: int, model: Model, *, first: bool, last: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.facts = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self.facts[2] = -1
        self.numbers = torch.arange(rows, dtype=torch.int64, device=device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        stream = (rows, model.shape.hidden_size)
        self.hidden = None if first else torch.zeros(stream, dtype=dtype, device=device)
        self.out = None if last else torch.zeros(stream, dtype=dtype, device=device)
        self.logits = torch.zeros(rows, model.shape.vocab_size, dtype=torch.float32, device=device) if last else None

    def batch(self, size: int) -> Batch:
        """The batch of a size; its facts on the host are those of padding."""
        ids, positions, kv_slots, _, lengths = self.facts
        tables = np.zeros((size, 1), dtype=np.int32)
        return Batch(
            token_ids=ids[:size], positions=positions[:size], kv_slots=kv_slots[:size], query_starts=self.starts[: size + 1],
            kv_lengths=lengths.view(torch.int32)[:size], block_tables=torch.from_numpy(tables), logit_rows=self.numbers[:size],
            query_starts_cpu=list(range(size + 1)), kv_lengths_cpu=[1] * size, block_tables_cpu=tables, fixed=True,
            logits=None if self.logits is None else self.logits[:size],
        )  # fmt: skip

    def fill(self, arranged: Arranged) -> None:
        """The facts of these rows, then padding: one copy to the device."""
        rows = len(arranged.slots)
        host = np.zeros(self.facts.shape, dtype=np.int64)
        host[0, :rows] = arranged.token_ids
        host[0, arranged.from_slot_at] = -1
        host[1, :rows] = arranged.positions
        host[2], host[2, :rows] = -1, arranged.kv_slots
        host[3, :rows] = arranged.slots
        lengths = host[4].view(np.int32)
        lengths[:], lengths[:rows] = 1, arranged.kv_lengths
        sent = torch.from_numpy(host)
        self.facts.copy_(sent.pin_memory() if self.facts.is_cuda else sent, non_blocking=True)

    @property
    def slots(self) -> Tensor:
        return self.facts[3]


class DecodeGraphs:
    """The captured forwards of one rank's model.

    last_tokens [slots] int64: what was sampled last, by slot; read on a rank that is both first and last stage.
    """

    def __init__(
        self, model: Model, backend: AttentionBackend, tables: SlotTables, last_tokens: Tensor, tape: Tape, *,
        first: bool, last: bool, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._model, self._backend, self._tables, self._tape = model, backend, tables, tape
        self._last_tokens = last_tokens if first and last else None
        most, width = tables.host.shape
        self.sizes = sizes(most)
        self.places = Places(most, model, first=first, last=last, dtype=dtype, device=last_tokens.device)
        self._captured: dict[int, tuple[Batch, Replay]] = {}
        backend.hold(most, most * width)

    def capture(self, caches: Sequence[KvCache], wanted: Sequence[int]) -> Iterator[int]:
        """Capture the forwards of these sizes over these caches, the largest first: it takes what the others then share. Yields
        each once it is there. Collective: all ranks capture the same."""
        for size in sorted(wanted, reverse=True):
            batch = self.places.batch(size)
            batch.attention = self._backend.plan(batch)
            self._captured[size] = batch, self._tape.record(partial(self._forward, batch, caches))
            yield size

    def forget(self) -> None:
        """Drop all graphs, and their memory."""
        self._captured.clear()
        self._tape.rewind()

    def _forward(self, batch: Batch, caches: Sequence[KvCache]) -> None:
        size = len(batch.kv_lengths_cpu)
        places, ids = self.places, self.places.facts[0, :size]
        if self._last_tokens is not None:
            ids = torch.where(ids < 0, self._last_tokens.index_select(0, places.slots[:size]), ids)
        batch.token_ids = ids
        out = self._model(batch, caches, None if places.hidden is None else places.hidden[:size])
        if places.out is not None:
            places.out[:size].copy_(out)

    def size_of(self, rows: int) -> int | None:
        """The smallest captured size that holds so many rows."""
        return min((size for size in self._captured if size >= rows), default=None)

    def replay(self, size: int, arranged: Arranged, receive: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward the rows [R] of one token each, R <= size. `receive` fills the residual stream [R, hidden_size] on later stages.
        Returns the rows' logits [R, vocab_size], or the residual stream; both until the next replay."""
        rows = len(arranged.slots)
        batch, run = self._captured[size]
        self.places.fill(arranged)
        used = -(-int(arranged.kv_lengths.max()) // self._tables.block_size)
        tables = np.zeros((size, used), dtype=np.int32)
        tables[:rows] = self._tables.host[arranged.slots, :used]
        batch.block_tables_cpu, batch.block_tables = tables, torch.from_numpy(tables)
        batch.kv_lengths_cpu = arranged.kv_lengths.tolist() + [1] * (size - rows)
        batch.attention = self._backend.plan(batch)
        if self.places.hidden is not None:
            receive(self.places.hidden[:rows])
        run()
        out = self.places.out if self.places.logits is None else self.places.logits
        assert out is not None
        return out[:rows]
