# SPDX-License-Identifier: Apache-2.0
"""One rank runs one batch: `ModelRunner.run` turns a StepBatch into a forward, and logits into tokens.

    apply releases and assignments -> build (host) -> upload (one copy) -> receive hidden -> forward -> send hidden | sample

In a pipeline, tokens may return from the last stage to the first before that: see `token_return`.

Where graphs are captured, the smallest that holds the step runs its forward: a decode graph where every row is a decode row that
samples, else a mixed graph. A step that no graph holds runs eagerly.

Nothing here waits for the device's work: tokens stay there, in the slots, where the next step finds them. `StepOutput.results`
waits for them, and `Upload` for the copy of some steps before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.engine.messages import RowOutput, RowResult, StepBatch, StepExtent, StepRow, max_rows_per_step, row_result
from phalanx.errors import EngineError
from phalanx.kernels.speculation.drafts import DRAFTS, LAST
from phalanx.layout.graphs import max_decode_rows
from phalanx.models.adapters import ModelAdapters
from phalanx.models.batch import Batch, DpTokens, GroupTables, InnerStates, tokens_of
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.worker.cuda_graphs import Expand, GraphCapturer, StepCounts, StepGraphs
from phalanx.worker.graph_buffers import NO_BLOCKS, DecodeGraphBuffers, GraphSize, MixedGraphBuffers, NewBlocks
from phalanx.worker.host_blocks import HostBlockStore, copy_states
from phalanx.worker.input_batch import BlockTables, HostBatch, Ints, PromptLogprobs, Upload
from phalanx.worker.pooling import PooledStates
from phalanx.worker.sampler import Masks, Rows, Sampler
from phalanx.worker.sampler_output import PromptScores, SampledTokens
from phalanx.worker.speculation.proposer import Proposer, SampledRows
from phalanx.worker.speculation.verification import Verification, verifying_rows
from phalanx.worker.token_return import TokenReturn


@dataclass
class StepOutput:
    """The output of a step on this rank, on its way from the device. `rows`: how many the step has; None before the last stage."""

    rows: int | None = None
    sampling: Sequence[int] = ()  # which rows sample
    sampled: SampledTokens | None = None
    drafts: Tensor | None = None  # [S, k] on the host, once `event` has passed: where the engine must know them
    scored: Sequence[tuple[int, int]] = ()  # (row, how many prompt tokens)
    scores: PromptScores | None = None
    pooling: Sequence[tuple[int, int]] = ()  # (row, length) of prompts that have a vector
    pooled: Tensor | None = None  # these vectors, joined, fp32, on the host once `event` has passed
    event: torch.cuda.Event | None = None  # the end of the work that `sampled` does not cover

    @property
    def ready(self) -> bool:
        """Whether `results` would not wait."""
        return (self.sampled is None or self.sampled.ready) and (self.event is None or bool(self.event.query()))  # type: ignore[no-untyped-call]

    def results(self) -> tuple[list[RowResult] | None, int | None]:
        """`outputs` with all fields."""
        rows, crc = self.outputs()
        return None if rows is None else [row_result(output) for output in rows], crc

    def outputs(self) -> tuple[list[RowOutput] | None, int | None]:
        """One per row, and the CRC-32 of the sampled tokens; both None before the last stage. Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        if self.rows is None:
            return None, None
        sampled: list[RowOutput] = [] if self.sampled is None else self.sampled.outputs()
        crc = 0 if self.sampled is None else zlib.crc32(self.sampled.wait().data)
        if self.drafts is None and self.pooled is None and self.scores is None:
            return self._in_order(sampled), crc
        rows = [row_result(output) for output in self._in_order(sampled)]
        if self.drafts is not None:
            for index, drafts in zip(self.sampling, self.drafts.tolist(), strict=True):
                rows[index].drafts = drafts
        if self.pooled is not None:
            ends = np.cumsum([length for _, length in self.pooling])
            for (index, length), end in zip(self.pooling, ends, strict=True):
                rows[index].pooled = self.pooled.numpy()[end - length : end].astype("<f4").tobytes()
        if self.scores is not None:
            scores, begin = self.scores.results(), 0
            for index, count in self.scored:
                rows[index].prompt_logprobs = scores[begin : begin + count]
                begin += count
        return [*rows], crc

    def _in_order(self, sampled: list[RowOutput]) -> list[RowOutput]:
        """The outputs of all rows; given: of those that sample."""
        if len(sampled) == self.rows:
            return sampled
        rows: list[RowOutput] = [RowResult() for _ in range(self.rows or 0)]
        for index, output in zip(self.sampling, sampled, strict=True):
            rows[index] = output
        return rows


@dataclass
class ForwardOutput:
    """The output of the last stage's forward of a step, of which S rows sample.

    batch: the input. size: of the graph that ran it. slots [S]: of these rows. local [S, width]: this rank's logits. tokens [S]:
    the argmax tokens, where a graph has computed them and written them into the slots. hidden_states [T, hidden_size] and
    scored [P]: the tokens followed by prompt tokens to report.
    """

    batch: Batch
    slots: Tensor
    local: Tensor
    tokens: Tensor | None = None
    hidden_states: Tensor | None = None
    scored: Tensor | None = None
    size: GraphSize | None = None


class ModelRunner:
    """One stage of one slice of a model, with its caches and its slots.

    caches: see `take_caches`. sampler: on the last stage. pipeline: the group of the
    stages. max_batch_size: slots. capturer: captures graphs, where the attention back end supports them; mixed graphs have up to
    max_num_tokens tokens. ends: the group of the first and the last stage, in which tokens return to the first; None where a
    request waits for its token. Every call is made in the order of the steps.

    max_rows: of a step, as a scheduler makes it for this many stages. Graphs have no more rows. max_drafts: that a row of a step
    verifies. proposer: of drafts, on the last stage. inner_layers: those of the proposer, on each stage; the inner states so far
    travel behind the residual stream. acceptance: rates that decide instead of the tokens, for measurements: see `accept_drafts`.
    adapters: those of the model.

    Where the model is `row_by_row` (see `LayerContext`), each token is a forward of its own, so that nothing else of the step has a
    part in it. Not with drafts, and not with several dp indices.
    """

    def __init__(
        self, model: Decoder, caches: Sequence[LayerCache], backend: AttentionBackend, sampler: Sampler | None, pipeline: Group, *,
        max_batch_size: int, max_seq_len: int, block_size: int, dtype: torch.dtype, device: torch.device,
        capturer: GraphCapturer | None = None, max_num_tokens: int = 0, ends: Group | None = None, max_drafts: int = 0,
        proposer: Proposer | None = None, inner_layers: tuple[int, ...] = (), acceptance: Tensor | None = None,
        adapters: ModelAdapters | None = None,
    ) -> None:  # fmt: skip
        self._model, self._backend, self._sampler, self._pipeline = model, backend, sampler, pipeline
        self._row_by_row = model.context.row_by_row
        self._dtype, self._device = dtype, device
        self._indices = model.context.dp.size
        self.max_rows = max_rows_per_step(max_batch_size, pipeline.size)
        self._tables = BlockTables(max_batch_size, max_seq_len, block_size, device, model.cache_groups)
        self._state = torch.zeros(1 if not max_drafts else DRAFTS + max_drafts, max_batch_size, dtype=torch.int64, device=device)
        self._last_tokens = self._state[LAST]
        self.max_drafts, self._proposer, self._acceptance = max_drafts, proposer, acceptance
        self._verified = Upload(device)
        self._adapters, self._adapter_of = adapters, np.full(max_batch_size, -1, dtype=np.int64)  # by slot
        self._token_adapters: Ints | None = None  # of the step that is being run, where it has any
        self._layers = len(model.layers)
        self.take_caches(caches)
        stage = model.layer_range
        if proposer is None:  # the state before the next stage's first layer is the residual stream that this one sends
            inner_layers = tuple(layer for layer in inner_layers if layer < stage.stop)
        else:
            inner_layers = proposer.inner_layers
        self._inner_layers, self._inner_before = inner_layers, tuple(layer for layer in inner_layers if layer < stage.start)
        self._token_return = None
        if ends is not None and ends.size > 1:
            self._token_return = TokenReturn(ends, self._state, pipeline.size)
        self._prompts, self._pooled = PromptLogprobs(), PooledStates()
        self._reporting: set[int] = set()  # slots whose prompt logprobs are wanted
        self._upload = Upload(device)
        self._first, self._last = pipeline.rank == 0, pipeline.rank == pipeline.size - 1
        self.ran = StepCounts()  # of the steps with rows; may be replaced between steps
        self.host_states: HostBlockStore | None = None  # of prefixes
        self.graphs: StepGraphs | None = None
        if capturer is not None and backend.graphs is not None:
            self.graphs = StepGraphs(
                model, backend, self._tables, self._last_tokens, capturer, first=self._first, last=self._last, dtype=dtype,
                max_rows=max_decode_rows(self.max_rows, max_drafts), max_num_tokens=max_num_tokens,
                returns_tokens=self._token_return is not None, inner_layers=inner_layers, proposer=proposer, adapters=adapters,
            )  # fmt: skip

    def take_caches(self, caches: Sequence[LayerCache]) -> None:
        """The caches from now on: those of the stage's layers, then those that the proposer declares."""
        self.caches = caches[: self._layers]
        if self._proposer is not None:
            self._proposer.caches = caches[self._layers :]

    @property
    def all_caches(self) -> list[LayerCache]:
        """As `take_caches` takes them."""
        return [*self.caches, *([] if self._proposer is None else self._proposer.caches)]

    @torch.inference_mode()
    def run(self, step: StepBatch, extent: StepExtent | None = None) -> StepOutput:
        """Queue the step's work on the device. extent: of the parts of all dp indices; None where all have this part. Raises
        EngineError for a step that no scheduler would make."""
        if self._token_return is None:
            return self._run(step, extent)
        if not all(row.tokens for row in step.rows):
            self._token_return.return_tokens()
        output = self._run(step, extent)
        self._token_return.step_queued()
        return output

    def _run(self, step: StepBatch, extent: StepExtent | None) -> StepOutput:
        self._apply(step)
        if self._indices > 1 and extent is None:
            extent = StepExtent.of([step] * self._indices)
        if not step.rows:
            return self._without_rows(extent)
        reported = self._reported(step.rows)
        verifying = verifying_rows(step.rows) if self.max_drafts else 0
        host_batch, new = self._build(step.rows, reported, verifying)
        verification = self._verification(step.rows, host_batch, verifying)
        expand = None if verification is None or not verifying else partial(self._expand, step.rows, verification)
        size = self._graph_size(host_batch, extent, step.adapted)
        if size is not None and not size.prefill_rows and self._pooled.any_of(step.rows):
            size = None  # a decode graph leaves no hidden states
        self.ran.add(size, len(host_batch.token_ids))
        with self._adapting(step, host_batch):
            if size is None:
                states, forwarded = self._eager(host_batch, new, extent, expand)
            else:
                states, forwarded = self._replay(size, host_batch, new, expand)
        output = StepOutput()
        if forwarded is not None:
            output = self._sample(step.rows, host_batch, reported, forwarded, verification)
            if self._proposer is not None:
                self._propose(self._proposer, step, forwarded, verification, output)
        for each in states:
            self._pipeline.send(each, self._pipeline.rank + 1)
        if self._device.type == "cuda" and (
            output.sampled is None or output.scores is not None or output.drafts is not None or output.pooled is not None
        ):
            output.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            output.event.record()
        return output

    def _verification(self, rows: Sequence[StepRow], host_batch: HostBatch, verifying: int) -> Verification | None:
        """The rows of the step that sample; None where there is no speculation, or nothing of it in this step on this stage."""
        sampling = [row for row in rows if row.samples] if self.max_drafts else []
        if not sampling or not (verifying or self._last):
            return None
        return Verification(self._state, self._tables, self._verified, sampling, verifying, host_batch, self._acceptance)

    def _expand(
        self, rows: Sequence[StepRow], verification: Verification, token_ids: Tensor, positions: Tensor, kv_slots: Tensor,
        kv_lengths: Tensor, more_kv_slots: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Write the input of rows that verify. A stage between the first and the last one has no state of slots: with late rows,
        each stage tells the next one where they start."""
        stage, stages = self._pipeline.rank, self._pipeline.size
        relays = stages > 2 and any(row.late for row in rows)
        if relays and not self._first:
            starts = torch.empty(verification.rows, dtype=torch.int64, device=self._device)
            verification.take_starts(self._pipeline.receive(starts, stage - 1))
        verification.expand(token_ids, positions, kv_slots, kv_lengths, more_kv_slots)
        if relays and not self._last:
            self._pipeline.send(verification.starts[: verification.rows], stage + 1)

    def _propose(
        self, proposer: Proposer, step: StepBatch, forwarded: ForwardOutput, verification: Verification | None, output: StepOutput
    ) -> None:
        """Propose drafts of what follows the step's tokens, and put them into the slots. verification: None where none is sampled:
        the proposer may have to read the prompts, too."""
        tokens, batch = sum(row.count for row in step.rows), forwarded.batch
        inner = None if batch.inner is None else batch.inner.out[:tokens]
        if verification is None:
            none = forwarded.slots[:0]
            rows = SampledRows(batch, tokens, none, none.new_empty((0, 2)), none, none, none, inner, forwarded.size)
        else:
            rows = SampledRows(
                batch, tokens, verification.slots, verification.out, verification.lengths, verification.at,
                verification.capacities, inner, forwarded.size,
            )  # fmt: skip
        drafts = proposer.propose(rows, 0 if verification is None else step.propose)
        if drafts is not None and verification is not None:
            if self._acceptance is not None:  # nothing is accepted where there is no draft
                drafts = drafts.clamp(min=0)
            self._state[DRAFTS : DRAFTS + drafts.shape[1], verification.slots] = drafts.T
            if any(row.masks for row in step.rows) or (self._pipeline.size > 1 and self._token_return is None):
                output.drafts = drafts.to("cpu", non_blocking=True)

    def _without_rows(self, extent: StepExtent | None) -> StepOutput:
        """A step in which this dp index has no rows: it computes its experts for the others. Where they replay a graph it replays
        the same one, all of it padding."""
        output = StepOutput(0 if self._last else None)
        if extent is not None and any(extent.tokens):
            host_batch = HostBatch.empty()
            size = self._graph_size(host_batch, extent, adapted=False)
            if size is None:
                self._model.serve_experts(DpTokens.of(extent.tokens))
            else:
                assert self.graphs is not None
                self.graphs.replay(size, host_batch, NO_BLOCKS, partial(self._receive, None))
            if self._device.type == "cuda":
                output.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                output.event.record()
        return output

    def _graph_size(self, host_batch: HostBatch, extent: StepExtent | None, adapted: bool) -> GraphSize | None:
        """The size of the graph that runs the step; None where none does. It is filled with the tokens of each dp index. adapted:
        rows of this index have adapters."""
        if self.graphs is None:
            return None
        if extent is None:
            return self.graphs.size_of(host_batch, adapted=adapted)
        size = self.graphs.size_of_step(extent)
        if size is not None and self.graphs.dp_tokens is not None:
            self.graphs.dp_tokens.fill(extent.tokens)
        return size

    def _replay(
        self, size: GraphSize, host_batch: HostBatch, new: NewBlocks, expand: Expand | None
    ) -> tuple[Sequence[Tensor], ForwardOutput | None]:
        """Forward by the graph of a size. Returns what the next stage receives; on the last stage the ForwardOutput.
        expand: writes the input of rows that verify drafts, for which it reads the device's block tables."""
        assert self.graphs is not None
        buffers, rows, count = self.graphs.buffers(size), len(host_batch.slots), len(host_batch.sampled_slots)
        if len(new[0]) > buffers.max_new_blocks or expand is not None:
            self._store(new)
            new = new[0][:0], new[1][:0]
        batch = self.graphs.batch(size)
        self.graphs.replay(size, host_batch, new, partial(self._receive, batch.inner), expand, self._token_adapters)
        size = size._replace(adapted=False)  # drafts are proposed without adapters
        if isinstance(buffers, DecodeGraphBuffers) and buffers.logits is not None:
            return (), ForwardOutput(batch, buffers.columns.slots[:rows], buffers.logits[:rows], buffers.tokens[:rows], size=size)
        assert buffers.out is not None
        hidden_states, lm_head = buffers.out[: len(host_batch.token_ids)], self._model.lm_head
        if lm_head is None:
            return self._for_next(hidden_states, batch), None
        assert isinstance(buffers, MixedGraphBuffers)
        logit_rows = buffers.columns.logit_rows[: len(host_batch.logit_rows)]
        local = lm_head.local(hidden_states, logit_rows[:count])
        return (), ForwardOutput(
            batch, buffers.columns.sampled_slots[:count], local, hidden_states=hidden_states, scored=logit_rows[count:], size=size,
        )  # fmt: skip

    def _store(self, new: NewBlocks) -> None:
        """Write the new blocks into the device's tables; a graph does this itself."""
        if self._device.type == "cuda" and new[0].size:
            self._tables.device.view(-1).index_copy_(0, *self._upload.send([*new]))

    def _eager(
        self, host_batch: HostBatch, new: NewBlocks, extent: StepExtent | None, expand: Expand | None
    ) -> tuple[Sequence[Tensor], ForwardOutput | None]:
        """Forward without a graph. Returns the same as `_replay`."""
        self._store(new)
        batch, slots = self._batch(host_batch)
        if expand is not None:
            more = [each.kv_slots for each in batch.more_groups]
            expand(batch.token_ids, batch.positions, batch.kv_slots, batch.kv_lengths, more)
            if self._device.type == "cpu" or self._backend.graphs is None:  # attention is planned on the host
                batch.kv_lengths_cpu = batch.kv_lengths.tolist()
        batch.dp_tokens = None if extent is None else DpTokens.of(extent.tokens)
        if self._inner_layers:
            width = len(self._inner_layers) * self._model.shape.hidden_size
            out = torch.empty((len(host_batch.token_ids), width), dtype=self._dtype, device=self._device)
            batch.inner = InnerStates(self._inner_layers, out)
        hidden = None
        if not self._first:
            shape = (int(batch.token_ids.shape[0]), self._model.stream_width)
            hidden = self._receive(batch.inner, torch.empty(shape, dtype=self._dtype, device=self._device))
        parts = [(batch, hidden)] if not self._row_by_row else tokens_of(batch, hidden)
        hidden_states, lm_head = self._forward(parts), self._model.lm_head
        if lm_head is None:
            return self._for_next(hidden_states, batch), None
        count = len(host_batch.sampled_slots)
        return (), ForwardOutput(
            batch, slots, lm_head.local(hidden_states, batch.logit_rows[:count]), hidden_states=hidden_states,
            scored=batch.logit_rows[count:],
        )  # fmt: skip

    def _forward(self, parts: Iterable[tuple[Batch, Tensor | None]]) -> Tensor:
        """The residual stream behind the stage, of batches with their residual streams before it."""
        outputs, begin = [], 0
        for batch, hidden in parts:
            if self._adapters is not None and self._token_adapters is not None:
                end = begin + len(batch.token_ids)
                self._adapters.begin(self._token_adapters[begin:end])
                begin = end
            batch.attention = self._backend.plan(batch)
            outputs.append(self._model.hidden_states(batch, self.caches, hidden))
            batch.attention = None  # a plan references its batch: both would wait for the cyclic garbage collector
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _apply(self, step: StepBatch) -> None:
        """Release and assign slots, and copy states, before the step's rows."""
        copy_states(self.caches, step, self.host_states)
        for slot in step.released:
            self._prompts.release(slot)
            self._pooled.release(slot)
            self._reporting.discard(slot)
            if self._sampler is not None:
                self._sampler.release(slot)
        for assignment in step.admitted:
            self._tables.clear(assignment.slot)
            self._adapter_of[assignment.slot] = assignment.adapter
            self._prompts.admit(assignment)
            self._pooled.admit(assignment)
            (self._reporting.discard if assignment.params.prompt_logprobs is None else self._reporting.add)(assignment.slot)
            if self._sampler is not None:
                self._sampler.admit(assignment)
            if self._proposer is not None:
                self._proposer.admit(assignment)

    @contextmanager
    def _adapting(self, step: StepBatch, host_batch: HostBatch) -> Iterator[None]:
        """Inside, layers add what the adapter of each token's request gives; also for drafts that are verified. Not what proposes
        drafts: it has no adapter."""
        if self._adapters is None or not step.adapted:
            yield
            return
        self._token_adapters = np.repeat(self._adapter_of[host_batch.slots], np.diff(host_batch.query_starts))
        try:
            yield
        finally:
            self._token_adapters = None
            self._adapters.begin(None)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[GraphSize] | None = None) -> Iterator[GraphSize]:
        """Capture the graphs of these sizes, or of all, over the caches as they are now; yields each size once it is captured.
        Collective."""
        if self.graphs is not None:
            yield from self.graphs.capture(self.caches, self.graphs.sizes if sizes is None else sizes)

    def capture_again(self) -> None:
        """Drop all graphs and capture them anew, where memory has moved. Collective."""
        if self.graphs is not None:
            self.graphs.reset()
            self.warm_up_graphs()
            for _ in self.capture():
                pass

    @torch.inference_mode()
    def warm_up_graphs(self) -> None:
        """Run the forward of each graph size once, without a graph. Collective."""
        if self.graphs is not None:
            self.graphs.warm_up(self.caches)

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Inside, steps go through a few of the layers: enough to launch every kernel."""
        caches = self.caches
        with self._model.distinct_layers() as layers:
            self.caches = [caches[index] for index in layers]
            try:
                yield
            finally:
                self.caches = caches

    @contextmanager
    def changed(
        self, *, backend: AttentionBackend | None = None, sampler: Sampler | None = None, graphs: bool = True
    ) -> Iterator[None]:  # fmt: skip
        """Inside, steps run with this attention back end and this sampler, and with graphs=False eagerly."""
        before = self._backend, self._sampler, self.graphs
        self._backend, self._sampler = backend or self._backend, sampler or self._sampler
        self.graphs = self.graphs if graphs else None
        try:
            yield
        finally:
            self._backend, self._sampler, self.graphs = before

    def _reported(self, rows: Sequence[StepRow]) -> Sequence[range]:
        """The tokens of each row that are followed by a prompt token to report."""
        if not self._last or not self._reporting:
            return [range(0)] * len(rows)
        return [self._prompts.reported(row) for row in rows]

    def _receive(self, inner: InnerStates | None, hidden: Tensor) -> Tensor:
        """Fill the residual stream [T, stream_width], and its inner states of earlier stages, from the stage before."""
        before = self._pipeline.rank - 1
        received = self._pipeline.receive(hidden, before)
        if inner is not None and self._inner_before:
            width = len(self._inner_before) * self._model.shape.hidden_size
            states = InnerStates(self._inner_before, hidden.new_empty(len(hidden), width))
            self._pipeline.receive(states.out, before)
            for layer in self._inner_before:
                inner.of(layer)[: len(hidden)].copy_(states.of(layer))
        return received

    @staticmethod
    def _for_next(hidden: Tensor, batch: Batch) -> Sequence[Tensor]:
        """What the next stage receives: the residual stream, and the inner states so far of its tokens."""
        return [hidden] if batch.inner is None else [hidden, batch.inner.out[: len(hidden)]]

    def _build(self, rows: Sequence[StepRow], reported: Sequence[range], verifying: int) -> tuple[HostBatch, NewBlocks]:
        """The index arrays of the rows on the host, and the blocks that the device's tables still lack."""
        new = self._tables.append(rows)
        host_batch = self._tables.build(rows, reported, verifying)
        if rows[0].drafts > self.max_drafts:
            raise EngineError(f"a step verifies {rows[0].drafts} drafts of slot {rows[0].slot}", held=f"at most {self.max_drafts}")
        awaits = self._first and not self._last and self._token_return is None
        if awaits and (unknown := [row.slot for row in rows if not row.tokens]):
            raise EngineError(
                f"slots {unknown} were scheduled before their last token is known",
                why="with pipeline stages it is sampled on another rank",
            )
        return host_batch, new

    def _batch(self, host_batch: HostBatch) -> tuple[Batch, Tensor]:
        """The forward's input, and the slots [S] of the rows that sample."""
        arrays, tables = self._upload.send(host_batch.arrays), self._tables
        slots, sampled_slots, token_ids, positions, kv_slots, logit_rows, *rest = arrays
        from_slot_at, from_slot, query_starts, kv_lengths, *more = rest
        if host_batch.from_slot.size and self._first:
            # Ids that only the device knows are in the slots into which they were sampled.
            token_ids.index_copy_(0, from_slot_at, self._last_tokens.index_select(0, from_slot))
        lengths = host_batch.kv_lengths.tolist()
        used = -(-max(lengths) // tables.block_size)
        of_rows = tables.host[:, host_batch.slots, :used]
        batch = Batch(
            token_ids=token_ids, positions=positions, kv_slots=kv_slots, query_starts=query_starts, kv_lengths=kv_lengths,
            block_tables=tables.device[0], table_rows=slots, logit_rows=logit_rows,
            query_starts_cpu=host_batch.query_starts.tolist(), kv_lengths_cpu=lengths,
            block_tables_cpu=of_rows[0],
            more_groups=[
                GroupTables(kv_slots, tables.device[group], of_rows[group])
                for array in more for group, kv_slots in enumerate(array, start=1)
            ],
        )  # fmt: skip
        return batch, sampled_slots

    def _sample(
        self, rows: Sequence[StepRow], host_batch: HostBatch, reported: Sequence[range], forwarded: ForwardOutput,
        verification: Verification | None,
    ) -> StepOutput:  # fmt: skip
        """Sample, write the tokens into the slots, and score prompt tokens. Every rank of the stage takes the same branch: only the
        step decides."""
        sampler, lm_head = self._sampler, self._model.lm_head
        assert sampler is not None
        assert lm_head is not None
        count = len(host_batch.sampled_slots)
        if verification is None and count == len(rows):
            sampling: Sequence[int] = range(count)
        else:
            sampling = [i for i, row in enumerate(rows) if row.samples]
        output = StepOutput(len(rows), sampling)
        if sampling:
            arguments = self._sampling_arguments(rows, sampling, host_batch, verification)
            shard_sampling = sampler.shard_sampling(*arguments)
            if shard_sampling is None:
                output.sampled = sampler.sample(lm_head.gather(forwarded.local), *arguments)
            elif shard_sampling.temperature is not None and shard_sampling.noise is not None:
                tokens = lm_head.sample(forwarded.local, shard_sampling.temperature, shard_sampling.noise)
                output.sampled = sampler.output_of(tokens, verification)
            elif forwarded.tokens is None:
                output.sampled = sampler.output_of(lm_head.argmax(forwarded.local), verification)
            else:
                output.sampled = sampler.output_of(forwarded.tokens, verification)
            if verification is None and output.sampled.tokens is not forwarded.tokens:
                self._last_tokens.index_copy_(0, forwarded.slots, output.sampled.tokens)
        output.scored = [(index, len(part)) for index, part in enumerate(reported) if part] if self._reporting else []
        if output.scored:
            output.scores = self._score(rows, output.scored, forwarded)
        if self._pooled.any_of(rows):
            assert forwarded.hidden_states is not None
            ended, vectors = self._pooled.pool(rows, forwarded.hidden_states, lambda states: lm_head.gather(lm_head.local(states)))
            output.pooling = list(zip(ended, map(len, vectors), strict=True))
            output.pooled = torch.cat(vectors).to("cpu", non_blocking=True) if vectors else None
        return output

    def _sampling_arguments(
        self, rows: Sequence[StepRow], sampling: Sequence[int], host_batch: HostBatch, verification: Verification | None
    ) -> tuple[Rows, Rows, Masks, Verification | None]:
        """Of `Sampler.sample`, for the rows that sample."""
        if verification is None or not verification.rows:
            lengths = host_batch.kv_lengths
            positions = lengths if len(sampling) == len(rows) else lengths[sampling]
            masks: Masks = [rows[index].masks[0] if rows[index].masks else None for index in sampling]
            return host_batch.sampled_slots, positions, masks, verification
        width = verification.k + 1
        each = [(rows[i].masks + [None] * width)[: width if rows[i].verifies else 1] for i in sampling]
        return host_batch.sampled_slots, verification.lowest, list(chain.from_iterable(each)), verification

    def _score(self, rows: Sequence[StepRow], scored: Sequence[tuple[int, int]], forwarded: ForwardOutput) -> PromptScores:
        """Begin to score prompt tokens. Their logits are computed in parts: those of a long prompt together take gigabytes."""
        sampler, lm_head, hidden_states, tokens = self._sampler, self._model.lm_head, forwarded.hidden_states, forwarded.scored
        assert sampler is not None
        assert lm_head is not None
        assert hidden_states is not None
        assert tokens is not None
        targets, counts = [], []
        for index, _ in scored:
            following, alternatives = self._prompts.targets(rows[index])
            targets += following
            counts += alternatives
        return sampler.score_prompt(lambda part: lm_head.gather(lm_head.local(hidden_states, tokens[part])), targets, counts)
