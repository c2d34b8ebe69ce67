# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of whole steps: forwards of some sizes, captured once and replayed without the host. Decode graphs are for R decode
rows that all sample; mixed graphs for T tokens of any rows, decode and prefill. Where there are adapters, all are captured a second
time, with their deltas.

A step smaller than its graph is padded with tokens and rows that write nothing and whose output is not used. A decode graph of many
rows has a second version for short rows, in which attention is faster as none of them is long. A graph reads and writes at fixed
addresses (`graph_buffers`), which all graphs of a kind share; what lies between is in one memory pool that all graphs share, since
they run one after the other.

A graph begins with the update of the block tables by the step's new blocks. A decode graph ends with what follows in a greedy step:
the argmax tokens, and their way into the slots, where the next step finds them. A step that samples at random does so from the
graph's logits, and overwrites those tokens. A mixed graph ends with the residual stream, since the tokens that want logits differ
from step to step. Receiving and sending between pipeline stages stay outside.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx import kernels
from phalanx.engine.messages import DECODE_GRAPH, EAGER, MIXED_GRAPH, STEP_KINDS, StepExtent
from phalanx.kernels.sampling import sampling
from phalanx.layout.rank_progress import BEFORE_LAYERS, RankProgress
from phalanx.models.adapters import ModelAdapters
from phalanx.models.batch import Batch, InnerStates, count_leading_decodes
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.worker.graph_buffers import (
    AdapterInputs,
    DecodeGraphBuffers,
    DpGraphTokens,
    GraphSize,
    MixedGraphBuffers,
    NewBlocks,
    graph_sizes,
    max_graph_tokens,
)
from phalanx.worker.input_batch import BlockTables, HostBatch, Ints
from phalanx.worker.speculation.proposer import Proposer

Replay = Callable[[], None]
Expand = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], None]
"""Writes token ids, positions, KV slots, KV lengths, and KV slots of other groups, of the first rows: see `Verification.expand`."""


class GraphCapturer(Protocol):
    """How work is captured."""

    def capture(self, work: Callable[[], None], warmup: Callable[[], None]) -> Replay:
        """Return a function that does the work again and again on the same tensors. warmup: does what cannot be captured, as it
        happens at the first call only, such as loading kernels; it is called before, or the work itself is."""

    def reset(self) -> None:
        """All captures have been dropped: their memory may be released."""


class CudaGraphCapturer:
    """CUDA graphs in one memory pool, captured on a stream of their own.

    calls: counters that the work increments on the host (the collectives of a group); a replay adds what the captured work did.
    progress: likewise, records the calls of collectives.
    """

    def __init__(
        self, device: torch.device, calls: dict[str, int] | None = None, progress: RankProgress | None = None
    ) -> None:  # fmt: skip
        self._calls = {} if calls is None else calls
        self._progress = RankProgress() if progress is None else progress
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def capture(self, work: Callable[[], None], warmup: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            warmup()
            self._stream.synchronize()
            graph, before = torch.cuda.CUDAGraph(), self._calls.copy()
            # "thread_local": other threads, such as NCCL's watchdog, may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with self._progress.capturing() as recorded:
                    work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool = self._pool or graph.pool()
        increments = [(name, new) for name, count in self._calls.items() if (new := count - before.get(name, 0))]

        def replay() -> None:
            self._progress.replay(recorded)
            graph.replay()
            for name, count in increments:
                self._calls[name] += count

        return replay

    def reset(self) -> None:
        self._pool = None  # it is released with its last graph


class EagerCapturer:
    """Captures nothing: a replay does the work again. For CPU, and where nothing is replayed."""

    def capture(self, work: Callable[[], None], warmup: Callable[[], None]) -> Replay:
        work()
        return work

    def reset(self) -> None:
        return


class StepCounts:
    """How steps ran: of each of STEP_KINDS the steps, their tokens, and the tokens of padding. The heartbeat's thread reads it."""

    def __init__(self) -> None:
        self._of = {kind: [0, 0, 0] for kind in STEP_KINDS}

    def add(self, size: GraphSize | None, tokens: int) -> None:
        """Count a step of so many tokens, run by the graph of a size, or eagerly."""
        if size is None:
            counts = self._of[EAGER]
        else:
            counts = self._of[MIXED_GRAPH if size.prefill_rows else DECODE_GRAPH]
            counts[2] += size.tokens - tokens
        counts[0] += 1
        counts[1] += tokens

    @property
    def by_name(self) -> dict[str, int]:
        """As in `Stats.ran`."""
        return {f"{kind}/{name}": n for kind, counts in self._of.items() for name, n in zip(_COUNTED, counts, strict=True)}


_COUNTED = ("steps", "tokens", "padding")


class StepGraphs:
    """The captured forwards of one rank's model.

    last_tokens [slots] int64: the token that was sampled last, by slot; written on the last stage, and read on the first where it
    has them: it is the last, too, or `returns_tokens` (see `token_return`). max_rows: decode rows of a step; with pipeline stages
    fewer than the slots, with drafts more. max_num_tokens: of a step; 0 for decode graphs only. inner_layers:
    before which the residual stream is kept, see `InnerStates`. proposer: its
    work behind a step is captured, too. adapters: those of the model.
    """

    def __init__(
        self, model: Decoder, backend: AttentionBackend, tables: BlockTables, last_tokens: Tensor, capturer: GraphCapturer, *,
        first: bool, last: bool, dtype: torch.dtype, max_rows: int, max_num_tokens: int = 0, returns_tokens: bool = False,
        inner_layers: tuple[int, ...] = (), proposer: Proposer | None = None, adapters: ModelAdapters | None = None,
    ) -> None:  # fmt: skip
        self._model, self._backend, self._tables, self._capturer = model, backend, tables, capturer
        self._proposer, self._adapters = proposer, adapters
        self._last_tokens, self._reads_tokens = last_tokens, first and (last or returns_tokens)
        device = last_tokens.device
        assert backend.graphs is not None, f"attention back end {backend.name} supports no graphs"
        self._graph_support = backend.graphs
        max_tokens = min(max_num_tokens, max_graph_tokens(model)) if self._graph_support.captures_prefill else 0
        decode_sizes, mixed_sizes = graph_sizes(max_rows, max_tokens, adapted=adapters is not None)
        self.sizes = [*decode_sizes, *mixed_sizes]
        self.largest = [*{(size.prefill_rows > 0, size.adapted): size for size in self.sizes}.values()]
        self.decode_buffers = DecodeGraphBuffers(max_rows, model, first=first, last=last, dtype=dtype, device=device)
        self.mixed_buffers: MixedGraphBuffers | None = None
        if mixed_sizes:
            self.mixed_buffers = MixedGraphBuffers(mixed_sizes[-1], model, first=first, dtype=dtype, device=device)
        indices, width = model.context.dp.size, max(size.tokens for size in self.sizes)
        self.dp_tokens = DpGraphTokens(indices, width, device) if indices > 1 else None
        self._adapter_inputs = None if adapters is None else AdapterInputs(width, adapters.batch.slots, device)
        self._inner: InnerStates | None = None
        if inner_layers:
            shape = width, len(inner_layers) * model.shape.hidden_size
            self._inner = InnerStates(inner_layers, torch.zeros(shape, dtype=dtype, device=device))
        self._captured: dict[GraphSize, Replay] = {}
        self._batches: dict[GraphSize, Batch] = {}
        self._short: dict[GraphSize, tuple[int, Replay]] = {}  # the limit of the KV length, and the graph for shorter rows
        self._ready_decode: dict[bool, list[GraphSize]] = {}  # the captured sizes, in order; by whether they are adapted
        self._ready_mixed: dict[bool, list[GraphSize]] = {}
        self._max_prefill_pairs = math.inf  # of a step that a mixed graph runs

    def capture(self, caches: Sequence[LayerCache], sizes: Sequence[GraphSize]) -> Iterator[GraphSize]:
        """Capture the forwards of these sizes over these caches. Decode graphs, which gain most, come first; of each kind the
        largest comes first, since the others share its memory. Yields each size once its graphs are captured, and captures those of
        the proposer at the end. Collective: all ranks capture the same sizes, as their heads and GPUs are alike."""
        for size in sorted(sizes, key=lambda size: (size.prefill_rows > 0, size.adapted, -size.tokens)):
            batch = self.buffers(size).batch(size, self._tables.device, self._last_tokens if self._reads_tokens else None)
            if self._inner is not None:
                batch.inner = replace(self._inner, out=self._inner.out[: size.tokens])
            self._batches[size], self._captured[size] = batch, self._capture(size, batch, caches)
            limit = self._short_kv_limit(size)  # known once a forward has met all kinds of layers
            if limit:
                self._short[size] = limit, self._capture(size, replace(batch, short=True), caches)
            kind, ready = bool(size.prefill_rows), self._ready_mixed if size.prefill_rows else self._ready_decode
            alike = (each for each in self._captured if (bool(each.prefill_rows), each.adapted) == (kind, size.adapted))
            ready[size.adapted] = sorted(alike)
            self._max_prefill_pairs = self._graph_support.max_prefill_pairs()
            yield size
        if self._proposer is not None:
            self._proposer.capture(self._capturer, {size: self._batches[size] for size in sizes if not size.adapted})

    def warm_up(self, caches: Sequence[LayerCache]) -> None:
        """Run the forwards of each size once, without graphs. Collective, as `capture`."""
        capturer, self._capturer = self._capturer, EagerCapturer()
        try:
            for _ in self.capture(caches, self.sizes):
                pass
        finally:
            self.reset()
            self._capturer = capturer

    def reset(self) -> None:
        """Drop all graphs, their memory, and the input of the last step."""
        for inputs in (self.decode_buffers, self.mixed_buffers, self.dp_tokens, self._adapter_inputs):
            if inputs is not None:
                inputs.clear()
        for graphs in (self._captured, self._batches, self._short, self._ready_decode, self._ready_mixed):
            graphs.clear()
        if self._proposer is not None:
            self._proposer.reset()
        self._capturer.reset()

    @property
    def count(self) -> int:
        """Graphs of all sizes, captured or not; known once a forward has met all kinds of layers."""
        proposers = 0 if self._proposer is None else self._proposer.graphs([size for size in self.sizes if not size.adapted])
        return sum(2 if self._short_kv_limit(size) else 1 for size in self.sizes) + proposers

    def _short_kv_limit(self, size: GraphSize) -> int:
        return 0 if size.prefill_rows else self._graph_support.short_kv_limit(size.decode_rows)

    def _capture(self, size: GraphSize, batch: Batch, caches: Sequence[LayerCache]) -> Replay:
        def warmup() -> None:
            # Layers of a kind launch the same kernels: to go through all of them would take as long as the capture itself.
            with self._model.distinct_layers() as layers:
                self._forward(size, batch, [caches[index] for index in layers])

        return self._capturer.capture(partial(self._forward, size, batch, caches), warmup)

    def _forward(self, size: GraphSize, batch: Batch, caches: Sequence[LayerCache]) -> None:
        tokens, buffers, lm_head = size.tokens, self.buffers(size), self._model.lm_head
        columns = buffers.columns
        self._model.progress.layer = BEFORE_LAYERS
        batch.attention = self._backend.plan(batch)  # first: later work reads early what it computes
        kernels.index_put_(self._tables.device.view(-1), columns.table_entries, columns.block_ids)
        batch.dp_tokens = None if self.dp_tokens is None else self.dp_tokens.of(size)
        if self._adapters is not None and self._adapter_inputs is not None and size.adapted:
            self._adapters.batch.rows = self._adapter_inputs.rows(size)
        hidden_states = self._model.hidden_states(batch, caches, None if buffers.hidden is None else buffers.hidden[:tokens])
        batch.attention = batch.dp_tokens = None  # a plan references its batch: both would wait for the cyclic garbage collector
        batch.layer_inputs = None  # else the batch of each size keeps its own, which larger graphs could not reuse
        if self._adapters is not None:
            self._adapters.batch.rows = None
        if buffers.out is not None:
            buffers.out[:tokens].copy_(hidden_states)
        if isinstance(buffers, DecodeGraphBuffers) and buffers.logits is not None and lm_head is not None:
            keys = lm_head.argmax_keys(lm_head.local(hidden_states, out=buffers.logits[:tokens]))
            sampling.decode_keys(keys, buffers.tokens[:tokens], (self._last_tokens, columns.slots[:tokens], batch.kv_slots))

    def buffers(self, size: GraphSize) -> DecodeGraphBuffers | MixedGraphBuffers:
        """What the graph of a size reads and writes."""
        if not size.prefill_rows:
            return self.decode_buffers
        assert self.mixed_buffers is not None
        return self.mixed_buffers

    def batch(self, size: GraphSize) -> Batch:
        """The input of a captured size."""
        return self._batches[size]

    def size_of(self, host_batch: HostBatch, *, adapted: bool = False) -> GraphSize | None:
        """The smallest captured size that can forward these rows: a decode graph if every row is a decode row whose logits are
        wanted, and no other logits are; else a mixed graph. None where there is none, or none that is faster than to forward them
        without one. adapted: some of them have an adapter."""
        rows, tokens = len(host_batch.slots), len(host_batch.token_ids)
        all_decodes = tokens == len(host_batch.sampled_slots) == len(host_batch.logit_rows) == rows
        decodes = count_leading_decodes(host_batch.query_starts) if self._ready_mixed else 0
        pairs = host_batch.prefill_pairs if rows > decodes and self._max_prefill_pairs < math.inf else 0
        return self._smallest(tokens, decodes, rows - decodes, pairs, all_decodes, adapted)

    def size_of_step(self, extent: StepExtent) -> GraphSize | None:
        """As `size_of`, for the parts of all dp indices: the same on every rank."""
        tokens = max(extent.tokens)
        rows = extent.decode_rows, extent.prefill_rows
        return self._smallest(tokens, *rows, extent.prefill_pairs, extent.decodes, extent.adapted)

    def _smallest(
        self, tokens: int, decodes: int, prefills: int, prefill_pairs: int, all_decodes: bool, adapted: bool
    ) -> GraphSize | None:
        if all_decodes:
            ready = self._ready_decode.get(adapted, [])
            index = bisect_left(ready, (tokens,))
            if index < len(ready):
                return ready[index]
        if prefill_pairs > self._max_prefill_pairs:
            return None
        for size in self._ready_mixed.get(adapted, []):
            if tokens <= size.tokens and decodes <= size.decode_rows and prefills <= size.prefill_rows:
                return size
        return None

    def replay(
        self, size: GraphSize, host_batch: HostBatch, new: NewBlocks, receive: Callable[[Tensor], Tensor],
        expand: Expand | None = None, token_adapters: Ints | None = None,
    ) -> None:  # fmt: skip
        """Forward T tokens that the size can hold. The output stays in the buffers until the next replay. new: the blocks that the
        device's tables lack, at most `max_new_blocks`. `receive` fills the residual stream [T, hidden_size] on later stages.
        expand: writes the input of rows that verify drafts. token_adapters [T]: the slot of each token's adapter, -1 for none."""
        limit, short = self._short.get(size, (0, None))
        run = short if short is not None and host_batch.kv_lengths.max(initial=0) <= limit else self._captured[size]
        buffers = self.buffers(size)
        buffers.fill(host_batch, new, size)
        if size.adapted and self._adapter_inputs is not None:
            self._adapter_inputs.fill(token_adapters, size)
        if expand is not None:
            columns = buffers.columns
            expand(columns.token_ids, columns.positions, columns.kv_slots, columns.kv_lengths, list(columns.more_kv_slots))
        if buffers.hidden is not None and len(host_batch.token_ids):
            receive(buffers.hidden[: len(host_batch.token_ids)])
        run()
