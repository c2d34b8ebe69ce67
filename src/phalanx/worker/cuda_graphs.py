# SPDX-License-Identifier: Apache-2.0
"""Steps without the host: forwards of some sizes, captured once and replayed. Of one kind are those of R rows of one token each
that all sample, of the other those of T tokens of any rows.

A step of less than a size has is padded, by tokens and rows that write nothing, and whose outcome nobody looks at. A size of rows
of one token has a second graph for short rows, where attention to so many is done sooner if none is long. Everything that a graph
reads or writes has its place for good (`places`), shared by all graphs of a kind; what lies between is in one pool of memory that
all graphs share, as they run one after the other.

A forward is captured with what goes before it, the new blocks' way into the tables. That of rows of one token takes along what goes
behind it in a greedy step: the likeliest tokens, and their way into the slots, where the next step finds them. A step that draws
does so from the logits, and overwrites them. The other kind ends with the residual stream, as which tokens want logits differs from
step to step. Receiving and sending between pipeline stages stay outside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.engine.messages import DECODE_GRAPH, EAGER, MIXED_GRAPH, STEP_KINDS
from phalanx import kernels
from phalanx.kernels.sampling import sampling
from phalanx.models.batch import Batch, KvCache, count_leading_decodes
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.models.registry import Model
from phalanx.worker.graph_buffers import (
    DecodeGraphBuffers,
    GraphBuffers,
    GraphSize,
    MixedGraphBuffers,
    NewBlocks,
    sizes,
    worth_padding,
)
from phalanx.worker.input_batch import BlockTables, HostBatch

Replay = Callable[[], None]


class GraphCapturer(Protocol):
    """How work is captured."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Do the work once, and return what does it again on the same tensors."""

    def rewind(self) -> None:
        """All that was recorded has been dropped; what is recorded from now on begins anew."""


class CudaGraphCapturer:
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
        made = [(name, new) for name, count in self._calls.items() if (new := count - before.get(name, 0))]

        def replay() -> None:
            graph.replay()
            for name, count in made:
                self._calls[name] += count

        return replay

    def rewind(self) -> None:
        self._pool = None  # it went with its last graph


class EagerCapturer:
    """Nothing is captured, the work is done again: on CPU, and where nobody replays it."""

    def record(self, work: Callable[[], None]) -> Replay:
        work()
        return work

    def rewind(self) -> None:
        return


class StepCounts:
    """How steps ran: of each of STEP_KINDS how many, their tokens, and the tokens of padding. Read by the pulse's thread too."""

    def __init__(self) -> None:
        self._of = {kind: [0, 0, 0] for kind in STEP_KINDS}

    def add(self, size: GraphSize | None, tokens: int) -> None:
        """A step of so many tokens, by the graph of a size or eagerly."""
        if size is None:
            held = self._of[EAGER]
        else:
            held = self._of[MIXED_GRAPH if size.prompts else DECODE_GRAPH]
            held[2] += size.tokens - tokens
        held[0] += 1
        held[1] += tokens

    @property
    def by_name(self) -> dict[str, int]:
        """As `Stats.ran` has it."""
        return {f"{kind}/{what}": n for kind, held in self._of.items() for what, n in zip(_COUNTED, held, strict=True)}


_COUNTED = ("steps", "tokens", "padding")


class StepGraphs:
    """The captured forwards of one rank's model.

    last_tokens [slots] int64: what was sampled last, by slot; written on the last stage, and read on one that is the first too.
    max_rows: of a step, which with pipeline stages are fewer than the slots. max_num_tokens: of a step; 0 where only rows of one
    token are to have graphs.
    """

    def __init__(
        self, model: Model, backend: AttentionBackend, tables: BlockTables, last_tokens: Tensor, tape: GraphCapturer, *,
        first: bool, last: bool, dtype: torch.dtype, max_rows: int, max_num_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._model, self._backend, self._tables, self._tape = model, backend, tables, tape
        self._last_tokens, self._both = last_tokens, first and last
        device = last_tokens.device
        self.decodes = DecodeGraphBuffers(max_rows, model, first=first, last=last, dtype=dtype, device=device)
        decodes, mixed = sizes(max_rows, min(max_num_tokens, worth_padding(model)) if backend.captures_prefill else 0)
        self.sizes = [*decodes, *mixed]
        self.largest = [*decodes[-1:], *mixed[-1:]]
        self.mixed = MixedGraphBuffers(mixed[-1], model, first=first, dtype=dtype, device=device) if mixed else None
        self._captured: dict[GraphSize, Replay] = {}
        self._short: dict[GraphSize, tuple[int, Replay]] = {}  # up to which KV length, and what for
        self._ready: list[GraphSize] = []  # the captured sizes of rows of one token, in order
        self._ready_mixed: list[GraphSize] = []

    def capture(self, caches: Sequence[KvCache], wanted: Sequence[GraphSize]) -> Iterator[GraphSize]:
        """Capture the forwards of these sizes over these caches, of each kind the largest first: it takes what the others then
        share. Rows of one token, which gain most, come before the rest. Yields each size once it is there, with its graph for
        short rows where it has one. Collective: all ranks capture the same, as their heads and GPUs are alike."""
        for size in sorted(wanted, key=lambda size: (size.prompts > 0, -size.tokens)):
            batch = self.places(size).batch(size, self._tables.device, self._last_tokens if self._both else None)
            self._captured[size] = self._record(size, batch, caches)
            up_to = self._short_up_to(size)  # once that forward has met all kinds of layers
            if up_to:
                self._short[size] = up_to, self._record(size, replace(batch, short=True), caches)
            self._ready = sorted(held for held in self._captured if not held.prompts)
            self._ready_mixed = sorted(held for held in self._captured if held.prompts)
            yield size

    def warm_up(self, caches: Sequence[KvCache]) -> None:
        """Do each size's forwards once, and keep no graph of them. Collective, as `capture`."""
        tape, self._tape = self._tape, EagerCapturer()
        try:
            for _ in self.capture(caches, self.sizes):
                pass
        finally:
            self.forget()
            self._tape = tape

    def forget(self) -> None:
        """Drop all graphs, and their memory."""
        for held in (self._captured, self._short, self._ready, self._ready_mixed):
            held.clear()
        self._tape.rewind()

    @property
    def count(self) -> int:
        """Graphs of all sizes, captured or not; known once a forward has met all kinds of layers."""
        return sum(2 if self._short_up_to(size) else 1 for size in self.sizes)

    def _short_up_to(self, size: GraphSize) -> int:
        return 0 if size.prompts else self._backend.short_kv_limit(size.decodes)

    def _record(self, size: GraphSize, batch: Batch, caches: Sequence[KvCache]) -> Replay:
        return self._tape.record(partial(self._forward, size, batch, caches))

    def _forward(self, size: GraphSize, batch: Batch, caches: Sequence[KvCache]) -> None:
        tokens, places, head = size.tokens, self.places(size), self._model.head
        batch.attention = self._backend.plan(batch)  # first: what it finds out is read early by others
        kernels.index_put_(self._tables.device.view(-1), places.facts[5], places.facts[6])
        stream = self._model.stream(batch, caches, None if places.hidden is None else places.hidden[:tokens])
        batch.attention = None  # a plan holds its batch: both, and what it found out, would wait for Python to look for cycles
        if places.out is not None:
            places.out[:tokens].copy_(stream)
        if isinstance(places, DecodeGraphBuffers) and places.logits is not None and head is not None:
            keys = head.keys(head.local(stream, out=places.logits[:tokens]))
            sampling.decode_keys(keys, places.tokens[:tokens], (self._last_tokens, places.slots[:tokens], batch.kv_slots))

    def places(self, size: GraphSize) -> GraphBuffers:
        """Where the graph of a size reads and writes."""
        if not size.prompts:
            return self.decodes
        assert self.mixed is not None
        return self.mixed

    def size_of(self, arranged: HostBatch) -> GraphSize | None:
        """The smallest captured size that can forward these rows: of rows of one token, if each has one whose logits are wanted,
        and no others."""
        rows, tokens = len(arranged.slots), len(arranged.token_ids)
        if tokens == len(arranged.sampled_slots) == len(arranged.logit_rows) == rows:
            at = bisect_left(self._ready, (rows,))
            if at < len(self._ready):
                return self._ready[at]
        ones = count_leading_decodes(arranged.query_starts) if self._ready_mixed else 0
        for size in self._ready_mixed:
            if tokens <= size.tokens and ones <= size.decodes and rows - ones <= size.prompts:
                return size
        return None

    def replay(self, size: GraphSize, arranged: HostBatch, new: NewBlocks, receive: Callable[[Tensor], Tensor]) -> None:
        """Forward T tokens that the size can hold into its places, where the outcome stays until the next replay. new: what the
        device's tables lack, at most as many blocks as the places have room for. `receive` fills the residual stream
        [T, hidden_size] on later stages."""
        up_to, short = self._short.get(size, (0, None))
        run = short if short is not None and arranged.kv_lengths.max() <= up_to else self._captured[size]
        places = self.places(size)
        places.fill(arranged, new, size)
        if places.hidden is not None:
            receive(places.hidden[: len(arranged.token_ids)])
        run()
