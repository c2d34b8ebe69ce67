# SPDX-License-Identifier: Apache-2.0
"""One rank runs one batch: `Runner.run` turns a StepBatch into a forward, and logits into tokens.

    apply releases and admissions -> arrange (host) -> upload (one copy) -> receive hidden -> forward -> send hidden | sample

A step in which every row is one token that samples is forwarded by a captured graph, where there are any; the others eagerly.

Nothing here waits for the device: tokens stay there, in the slots, where the next step finds them. `Outcome.results` waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.engine.messages import Row, RowResult, StepBatch
from phalanx.engine.ranks.graphs import DecodeGraphs, Tape
from phalanx.engine.ranks.slots import Arranged, Prompts, SlotTables, Upload
from phalanx.engine.sampler import PromptScores, Sampled, Sampler
from phalanx.errors import EngineError
from phalanx.models.batch import Batch, KvCache
from phalanx.models.layers.attention import AttentionBackend
from phalanx.models.registry import Model


@dataclass
class Outcome:
    """What a step yields on this rank, on its way from the device. `rows`: None before the last stage."""

    rows: list[RowResult] | None = None
    sampling: Sequence[int] = ()  # which rows sample
    sampled: Sampled | None = None
    scored: Sequence[tuple[int, int]] = ()  # (row, how many prompt tokens)
    scores: PromptScores | None = None
    event: torch.cuda.Event | None = None

    @property
    def ready(self) -> bool:
        """Whether `results` would not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def results(self) -> tuple[list[RowResult] | None, int | None]:
        """One RowResult per row, and the CRC-32 of the sampled tokens; both None before the last stage. Waits for the device."""
        if self.rows is None:
            if self.event is not None:
                self.event.synchronize()
            return None, None
        if self.sampled is not None:
            for index, result in zip(self.sampling, self.sampled.results(), strict=True):
                self.rows[index].token, self.rows[index].logprobs = result.token, result.logprobs
        if self.scores is not None:
            scores, at = self.scores.results(), 0
            for index, count in self.scored:
                self.rows[index].prompt_logprobs = scores[at : at + count]
                at += count
        tokens = [self.rows[index].token for index in self.sampling]
        return self.rows, zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes())


class Runner:
    """One stage of one slice of a model, with its caches and its slots.

    caches: one per layer that the model holds; may be replaced between steps. sampler: on the last stage. pipeline: the group of
    the stages. max_batch_size: slots. tape: what captures decode steps, where the back end bears it (see `graphs`). Every call is
    made in the order of the steps.
    """

    def __init__(
        self, model: Model, caches: Sequence[KvCache], backend: AttentionBackend, sampler: Sampler | None, pipeline: Group, *,
        max_batch_size: int, max_seq_len: int, block_size: int, dtype: torch.dtype, device: torch.device, tape: Tape | None = None,
    ) -> None:  # fmt: skip
        self.caches = caches
        self._model, self._backend, self._sampler, self._pipeline = model, backend, sampler, pipeline
        self._dtype, self._device = dtype, device
        self._tables = SlotTables(max_batch_size, max_seq_len, block_size, device)
        self._last_tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._prompts = Prompts()
        self._upload = Upload(device)
        self._first, self._last = pipeline.rank == 0, pipeline.rank == pipeline.size - 1
        self.graphs: DecodeGraphs | None = None
        if tape is not None and backend.captures:
            self.graphs = DecodeGraphs(
                model, backend, self._tables, self._last_tokens, tape, first=self._first, last=self._last, dtype=dtype
            )

    @torch.inference_mode()
    def run(self, step: StepBatch) -> Outcome:
        """Queue the step's work. Raises EngineError for a step that no scheduler would make."""
        self._apply(step)
        if not step.rows:
            return Outcome([] if self._last else None)
        reported = [self._prompts.reported(row) if self._last else range(0) for row in step.rows]
        arranged = self._arrange(step.rows, reported)
        size = self._graph_size(arranged)
        if size is not None and self.graphs is not None:
            out = self.graphs.replay(size, arranged, self._receive)
            slots = self.graphs.places.slots[: len(step.rows)]
        else:
            batch, slots = self._batch(arranged)
            batch.attention = self._backend.plan(batch)
            hidden = None
            if not self._first:
                shape = (int(batch.token_ids.shape[0]), self._model.shape.hidden_size)
                hidden = self._receive(torch.empty(shape, dtype=self._dtype, device=self._device))
            out = self._model(batch, self.caches, hidden)
        outcome = Outcome()
        if self._last:
            outcome = self._choose(step.rows, reported, out, slots)
        else:
            self._pipeline.send(out, self._pipeline.rank + 1)
        if self._device.type == "cuda":
            outcome.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            outcome.event.record()
        return outcome

    def _apply(self, step: StepBatch) -> None:
        """Requests leave and come, before the step's rows."""
        for slot in step.released:
            self._prompts.release(slot)
            if self._sampler is not None:
                self._sampler.release(slot)
        for admission in step.admitted:
            self._tables.clear(admission.slot)
            self._prompts.admit(admission)
            if self._sampler is not None:
                self._sampler.admit(admission)

    @torch.inference_mode()
    def capture(self, wanted: Sequence[int] | None = None) -> Iterator[int]:
        """Capture decode steps of these numbers of rows, or of all sizes, over the caches as they are now; yields each once it is
        there. Collective."""
        if self.graphs is not None:
            yield from self.graphs.capture(self.caches, self.graphs.sizes if wanted is None else wanted)

    def _graph_size(self, arranged: Arranged) -> int | None:
        """The size of the graph that can forward these rows: each of one token, whose logits are wanted, and no others."""
        rows = len(arranged.slots)
        alike = len(arranged.token_ids) == len(arranged.sampled_slots) == len(arranged.logit_rows) == rows
        return self.graphs.size_of(rows) if alike and self.graphs is not None else None

    def _receive(self, hidden: Tensor) -> Tensor:
        """Fill the residual stream [T, hidden_size] from the stage before."""
        return self._pipeline.receive(hidden, self._pipeline.rank - 1)

    def _arrange(self, rows: Sequence[Row], reported: Sequence[range]) -> Arranged:
        """The rows' index arrays on the host; their new blocks go to the device's tables too."""
        places, ids = self._tables.append(rows)
        arranged = self._tables.arrange(rows, reported)
        if arranged.from_slot.size and self._first and not self._last:
            raise EngineError(
                f"slots {arranged.from_slot.tolist()} were scheduled before their last token is known",
                why="with pipeline stages it is sampled on another rank",
            )
        if self._device.type == "cuda" and ids.size:
            self._tables.device.view(-1).index_copy_(0, *self._upload.send([places, ids]))
        return arranged

    def _batch(self, arranged: Arranged) -> tuple[Batch, Tensor]:
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
            block_tables=self._tables.device[:, :used].index_select(0, slots), logit_rows=logit_rows,
            query_starts_cpu=arranged.query_starts.tolist(), kv_lengths_cpu=lengths,
            block_tables_cpu=self._tables.host[arranged.slots, :used],
        )  # fmt: skip
        return batch, sampled_slots

    def _choose(self, rows: Sequence[Row], reported: Sequence[range], logits: Tensor, slots: Tensor) -> Outcome:
        """Sample, and write the tokens into the slots [S]. logits [S + P, V]: S rows to sample, P prompt positions to report."""
        assert self._sampler is not None
        sampling = [index for index, row in enumerate(rows) if row.samples]
        outcome = Outcome([RowResult() for _ in rows], sampling)
        count = len(sampling)
        if count:
            chosen = [rows[index] for index in sampling]
            outcome.sampled = self._sampler.sample(
                logits[:count], [row.slot for row in chosen], [row.start + row.count for row in chosen],
                [row.mask for row in chosen],
            )  # fmt: skip
            self._last_tokens.index_copy_(0, slots, outcome.sampled.tokens)
        outcome.scored = [(index, len(part)) for index, part in enumerate(reported) if part]
        if outcome.scored:
            targets, counts = [], []
            for index, _ in outcome.scored:
                tokens, alternatives = self._prompts.targets(rows[index])
                targets += tokens
                counts += alternatives
            outcome.scores = self._sampler.score_prompt(logits[count:], targets, counts)
        return outcome
