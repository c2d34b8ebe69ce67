# SPDX-License-Identifier: Apache-2.0
"""One rank runs one batch: `ModelRunner.run` turns a StepBatch into a forward, and logits into tokens.

    apply releases and admissions -> arrange (host) -> upload (one copy) -> receive hidden -> forward -> send hidden | sample

Where graphs are captured, the smallest that holds the step forwards it: of rows of one token that all sample, or of any rows. A
step that none holds is forwarded eagerly.

Nothing here waits for the device: tokens stay there, in the slots, where the next step finds them. `StepOutput.results` waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.engine.limits import most_rows
from phalanx.engine.messages import RowResult, StepBatch, StepRow
from phalanx.errors import EngineError
from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.models.registry import Model
from phalanx.worker.cuda_graphs import GraphCapturer, StepCounts, StepGraphs
from phalanx.worker.graph_buffers import DecodeGraphBuffers, GraphSize, MixedGraphBuffers, NewBlocks
from phalanx.worker.input_batch import BlockTables, HostBatch, PromptLogprobs, Upload
from phalanx.worker.sampler import Sampler
from phalanx.worker.sampler_output import PromptScores, SampledTokens


@dataclass
class StepOutput:
    """What a step yields on this rank, on its way from the device. `rows`: how many it has; None before the last stage."""

    rows: int | None = None
    sampling: Sequence[int] = ()  # which rows sample
    sampled: SampledTokens | None = None
    scored: Sequence[tuple[int, int]] = ()  # (row, how many prompt tokens)
    scores: PromptScores | None = None
    event: torch.cuda.Event | None = None  # the end of what `sampled` does not tell of

    @property
    def ready(self) -> bool:
        """Whether `results` would not wait."""
        return (self.sampled is None or self.sampled.ready) and (self.event is None or bool(self.event.query()))  # type: ignore[no-untyped-call]

    def results(self) -> tuple[list[RowResult] | None, int | None]:
        """One RowResult per row, and the CRC-32 of the sampled tokens; both None before the last stage. Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        if self.rows is None:
            return None, None
        found = [] if self.sampled is None else self.sampled.results()
        crc = zlib.crc32(b"" if self.sampled is None else self.sampled.wait().tobytes())
        if len(found) == self.rows:
            rows = found
        else:
            rows = [RowResult() for _ in range(self.rows)]
            for index, result in zip(self.sampling, found, strict=True):
                rows[index] = result
        if self.scores is not None:
            scores, at = self.scores.results(), 0
            for index, count in self.scored:
                rows[index].prompt_logprobs = scores[at : at + count]
                at += count
        return rows, crc


@dataclass
class ForwardOutput:
    """What the last stage's forward left of a step, of which S rows sample.

    slots [S]: theirs. local [S, width]: this rank's logits. tokens [S]: the likeliest, where a graph has found them and written
    them into the slots. stream [T, hidden_size] and scored [P]: the tokens whose successors are prompt tokens to report.
    """

    slots: Tensor
    local: Tensor
    tokens: Tensor | None = None
    stream: Tensor | None = None
    scored: Tensor | None = None


class ModelRunner:
    """One stage of one slice of a model, with its caches and its slots.

    caches: one per layer that the model holds; may be replaced between steps. sampler: on the last stage. pipeline: the group of
    the stages. max_batch_size: slots. tape: what captures steps, where the back end bears it (see `graphs`): those of rows of one
    token, and those of any rows up to max_num_tokens tokens. Every call is made in the order of the steps.

    most_rows: of a step that a scheduler makes for so many stages. Graphs are for no more; what they do not hold runs eagerly.
    """

    def __init__(
        self, model: Model, caches: Sequence[KvCache], backend: AttentionBackend, sampler: Sampler | None, pipeline: Group, *,
        max_batch_size: int, max_seq_len: int, block_size: int, dtype: torch.dtype, device: torch.device, tape: GraphCapturer | None = None,
        max_num_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.caches = caches
        self._model, self._backend, self._sampler, self._pipeline = model, backend, sampler, pipeline
        self._dtype, self._device = dtype, device
        self.most_rows = most_rows(max_batch_size, pipeline.size)
        self._tables = BlockTables(max_batch_size, max_seq_len, block_size, device)
        self._last_tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._prompts = PromptLogprobs()
        self._reporting: set[int] = set()  # slots whose prompt tokens' logprobs are asked for
        self._upload = Upload(device)
        self._first, self._last = pipeline.rank == 0, pipeline.rank == pipeline.size - 1
        self.ran = StepCounts()  # of the steps with rows; may be replaced between steps
        self.graphs: StepGraphs | None = None
        if tape is not None and backend.captures:
            self.graphs = StepGraphs(
                model, backend, self._tables, self._last_tokens, tape, first=self._first, last=self._last, dtype=dtype,
                max_rows=self.most_rows, max_num_tokens=max_num_tokens,
            )  # fmt: skip

    @torch.inference_mode()
    def run(self, step: StepBatch) -> StepOutput:
        """Queue the step's work. Raises EngineError for a step that no scheduler would make."""
        self._apply(step)
        if not step.rows:
            return StepOutput(0 if self._last else None)
        reported = self._reported(step.rows)
        arranged, new = self._arrange(step.rows, reported)
        size = None if self.graphs is None else self.graphs.size_of(arranged)
        self.ran.add(size, len(arranged.token_ids))
        stream, forwarded = self._eager(arranged, new) if size is None else self._replay(size, arranged, new)
        outcome = StepOutput()
        if forwarded is not None:
            outcome = self._choose(step.rows, arranged, reported, forwarded)
        elif stream is not None:
            self._pipeline.send(stream, self._pipeline.rank + 1)
        if self._device.type == "cuda" and (outcome.sampled is None or outcome.scores is not None):
            outcome.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            outcome.event.record()
        return outcome

    def _replay(self, size: GraphSize, arranged: HostBatch, new: NewBlocks) -> tuple[Tensor | None, ForwardOutput | None]:
        """Forward by the graph of a size. Returns the residual stream for the next stage, or what the last one left."""
        assert self.graphs is not None
        places, rows, count = self.graphs.places(size), len(arranged.slots), len(arranged.sampled_slots)
        if len(new[0]) > places.room:
            self._store(new)
            new = new[0][:0], new[1][:0]
        self.graphs.replay(size, arranged, new, self._receive)
        if isinstance(places, DecodeGraphBuffers) and places.logits is not None:
            return None, ForwardOutput(places.slots[:rows], places.logits[:rows], places.tokens[:rows])
        assert places.out is not None
        stream, head = places.out[: len(arranged.token_ids)], self._model.head
        if head is None:
            return stream, None
        assert isinstance(places, MixedGraphBuffers)
        wanted = places.logit_rows[: len(arranged.logit_rows)]
        local = head.local(stream, wanted[:count])
        return None, ForwardOutput(places.sampled_slots[:count], local, stream=stream, scored=wanted[count:])

    def _store(self, new: NewBlocks) -> None:
        """The new blocks' way into the device's tables."""
        if self._device.type == "cuda" and new[0].size:
            self._tables.device.view(-1).index_copy_(0, *self._upload.send([*new]))

    def _eager(self, arranged: HostBatch, new: NewBlocks) -> tuple[Tensor | None, ForwardOutput | None]:
        """Forward without a graph. Returns as `_replay`."""
        self._store(new)
        batch, slots = self._batch(arranged)
        batch.attention = self._backend.plan(batch)
        hidden = None
        if not self._first:
            shape = (int(batch.token_ids.shape[0]), self._model.shape.hidden_size)
            hidden = self._receive(torch.empty(shape, dtype=self._dtype, device=self._device))
        stream, head = self._model.stream(batch, self.caches, hidden), self._model.head
        batch.attention = None  # a plan holds its batch: both would wait for Python to look for cycles
        if head is None:
            return stream, None
        count = len(arranged.sampled_slots)
        return None, ForwardOutput(
            slots, head.local(stream, batch.logit_rows[:count]), stream=stream, scored=batch.logit_rows[count:]
        )  # fmt: skip

    def _apply(self, step: StepBatch) -> None:
        """Requests leave and come, before the step's rows."""
        for slot in step.released:
            self._prompts.release(slot)
            self._reporting.discard(slot)
            if self._sampler is not None:
                self._sampler.release(slot)
        for admission in step.admitted:
            self._tables.clear(admission.slot)
            self._prompts.admit(admission)
            (self._reporting.discard if admission.params.prompt_logprobs is None else self._reporting.add)(admission.slot)
            if self._sampler is not None:
                self._sampler.admit(admission)

    @torch.inference_mode()
    def capture(self, wanted: Sequence[GraphSize] | None = None) -> Iterator[GraphSize]:
        """Capture steps of these sizes, or of all that there are, over the caches as they are now; yields each once it is there.
        Collective."""
        if self.graphs is not None:
            yield from self.graphs.capture(self.caches, self.graphs.sizes if wanted is None else wanted)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Do the forward of each size of graphs once, without a graph. Collective."""
        if self.graphs is not None:
            self.graphs.warm_up(self.caches)

    @contextmanager
    def distinct_layers(self) -> Iterator[None]:
        """Inside, steps go through a few of the layers: enough to meet every kernel."""
        whole = self.caches
        with self._model.distinct_layers() as kept:
            self.caches = [whole[index] for index in kept]
            try:
                yield
            finally:
                self.caches = whole

    def _reported(self, rows: Sequence[StepRow]) -> Sequence[range]:
        """Which of each row's tokens are followed by a prompt token to report."""
        if not self._last or not self._reporting:
            return [range(0)] * len(rows)
        return [self._prompts.reported(row) for row in rows]

    def _receive(self, hidden: Tensor) -> Tensor:
        """Fill the residual stream [T, hidden_size] from the stage before."""
        return self._pipeline.receive(hidden, self._pipeline.rank - 1)

    def _arrange(self, rows: Sequence[StepRow], reported: Sequence[range]) -> tuple[HostBatch, NewBlocks]:
        """The rows' index arrays on the host, and the blocks that the device's tables lack yet."""
        new = self._tables.append(rows)
        arranged = self._tables.arrange(rows, reported)
        if arranged.from_slot.size and self._first and not self._last:
            raise EngineError(
                f"slots {arranged.from_slot.tolist()} were scheduled before their last token is known",
                why="with pipeline stages it is sampled on another rank",
            )
        return arranged, new

    def _batch(self, arranged: HostBatch) -> tuple[Batch, Tensor]:
        """The forward's input, and the slots [S] of the rows that sample."""
        sent = self._upload.send(arranged.arrays)
        slots, sampled_slots, token_ids, positions, kv_slots, logit_rows, from_slot_at, from_slot, query_starts, kv_lengths = sent
        if arranged.from_slot.size and self._first:
            # Ids that only the device knows stand in the slots they were sampled into.
            token_ids.index_copy_(0, from_slot_at, self._last_tokens.index_select(0, from_slot))
        lengths = arranged.kv_lengths.tolist()
        used = -(-max(lengths) // self._tables.block_size)
        batch = Batch(
            token_ids=token_ids, positions=positions, kv_slots=kv_slots, query_starts=query_starts, kv_lengths=kv_lengths,
            block_tables=self._tables.device, table_rows=slots, logit_rows=logit_rows,
            query_starts_cpu=arranged.query_starts.tolist(), kv_lengths_cpu=lengths,
            block_tables_cpu=self._tables.host[arranged.slots, :used],
        )  # fmt: skip
        return batch, sampled_slots

    def _choose(
        self, rows: Sequence[StepRow], arranged: HostBatch, reported: Sequence[range], forwarded: ForwardOutput
    ) -> StepOutput:
        """Sample, write the tokens into the slots, and score prompt tokens. Every rank of the stage takes the same way: what
        decides is in the step."""
        sampler, head = self._sampler, self._model.head
        assert sampler is not None
        assert head is not None
        count = len(arranged.sampled_slots)
        sampling: Sequence[int] = range(count) if count == len(rows) else [i for i, row in enumerate(rows) if row.samples]
        outcome = StepOutput(len(rows), sampling)
        if count:
            positions = arranged.kv_lengths if count == len(rows) else arranged.kv_lengths[sampling]
            asked = (arranged.sampled_slots, positions, [rows[index].mask for index in sampling])
            draws = sampler.draws(*asked)
            if draws is None:
                outcome.sampled = sampler.sample(head.gather(forwarded.local), *asked)
            elif draws.temperature is not None and draws.noise is not None:
                outcome.sampled = sampler.taken(head.drawn(forwarded.local, draws.temperature, draws.noise))
            elif forwarded.tokens is None:
                outcome.sampled = sampler.taken(head.likeliest(forwarded.local))
            else:
                outcome.sampled = sampler.taken(forwarded.tokens)
            if outcome.sampled.tokens is not forwarded.tokens:
                self._last_tokens.index_copy_(0, forwarded.slots, outcome.sampled.tokens)
        outcome.scored = [(index, len(part)) for index, part in enumerate(reported) if part] if self._reporting else []
        if outcome.scored:
            outcome.scores = self._score(rows, outcome.scored, forwarded)
        return outcome

    def _score(self, rows: Sequence[StepRow], scored: Sequence[tuple[int, int]], forwarded: ForwardOutput) -> PromptScores:
        """Begin to report prompt tokens. Their logits are made a run at a time: all of a long prompt's take gigabytes."""
        sampler, head, stream, places = self._sampler, self._model.head, forwarded.stream, forwarded.scored
        assert sampler is not None
        assert head is not None
        assert stream is not None
        assert places is not None
        targets, counts = [], []
        for index, _ in scored:
            tokens, alternatives = self._prompts.targets(rows[index])
            targets += tokens
            counts += alternatives
        return sampler.score_prompt(lambda part: head.gather(head.local(stream, places[part])), targets, counts)
