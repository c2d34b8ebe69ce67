# SPDX-License-Identifier: Apache-2.0
"""`ModelProposer`: drafts by a network of its own, a `Drafter`: a small language model, or a head that reads the target's states.

Behind each forward of the target the network takes in the same tokens, at the same positions and in the same KV blocks (`extend`):
so it has keys and values wherever the target has, also of prompts, of chunks of them and of blocks that requests share. Then it
draws one token after the other (`advance`), each for all rows at once: the most likely one.

Both are captured as graphs, where steps are. They read and write at fixed addresses: `Lanes`, and the batch of the step's graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from phalanx.engine.messages import NO_DRAFT, SlotAssignment
from phalanx.layout.cache import Cache, in_group
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.layers.attention.backend import AttentionBackend
from phalanx.worker.speculation.proposer import Proposer, SampledRows
from phalanx.worker.speculation.token_history import TokenHistory

if TYPE_CHECKING:
    from phalanx.worker.cuda_graphs import GraphCapturer, Replay
    from phalanx.worker.graph_buffers import GraphSize


class Drafter(Protocol):
    """A network that predicts tokens, on each rank of the target's tensor-parallel group: every call is collective over it.

    reads_next: what it stores at a position is of the next position's token, beside the target's states of this one; else it is of
    the position's own token. width: of its states.
    """

    reads_next: bool
    width: int
    inner_layers: tuple[int, ...]

    def declared_caches(self) -> list[Cache]:
        """Of its layers, on this rank."""

    def first_states(self, inner: Tensor | None) -> Tensor | None:
        """What `hidden_states` takes behind the target's forward. inner [T, L * hidden_size]: see `Proposer.inner_layers`."""

    def hidden_states(self, batch: Batch, caches: Sequence[LayerCache], states: Tensor | None) -> Tensor:
        """The states [T, width] of a batch, whose keys and values are stored. states [T, width]: those of the position before."""

    def most_likely(self, states: Tensor) -> Tensor:
        """The most likely next token of states [S, width]: ids of the target [S] int64."""


class Lanes:
    """The rows of one token each that `advance` computes, of up to `width` requests, at fixed addresses.

    slots, capacities [width] int64: as in `SampledRows`. positions, tokens [width] int64, states [width, N]: of the next pass.
    """

    def __init__(self, width: int, states: int, dtype: torch.dtype, device: torch.device) -> None:
        matrix = torch.zeros(4, width, dtype=torch.int64, device=device)
        self.slots, self.capacities, self.positions, self.tokens = matrix
        self.states = torch.zeros(width, states, dtype=dtype, device=device)
        self.row_numbers = torch.arange(width + 1, dtype=torch.int64, device=device)
        self.query_starts = self.row_numbers.int()

    def fill(self, rows: SampledRows, padded: int) -> None:
        """Take the rows; those behind them, up to `padded`, have no blocks."""
        count = len(rows.slots)
        self.slots[:count], self.capacities[:count], self.positions[:count] = rows.slots, rows.capacities, rows.lengths
        self.slots[count:padded] = self.capacities[count:padded] = self.positions[count:padded] = self.tokens[count:padded] = 0

    def batch(self, count: int, tables: Tensor, block_size: int, *, fixed: bool) -> Batch:
        """The input of the first `count` rows. A position without a block is stored nowhere, and sees what the last one with a
        block sees. tables: of all slots. fixed: planned on the device."""
        slots, capacities = self.slots[:count], self.capacities[:count]
        positions = torch.minimum(self.positions[:count], capacities - 1).clamp_(min=0)
        kv_lengths = (positions + 1).int()
        blocks = tables[slots, positions // block_size].long()
        kv_slots = torch.where(self.positions[:count] < capacities, blocks * block_size + positions % block_size, -1)
        return Batch(
            token_ids=self.tokens[:count], positions=positions, kv_slots=kv_slots, query_starts=self.query_starts[: count + 1],
            kv_lengths=kv_lengths, block_tables=tables, table_rows=slots, logit_rows=self.row_numbers[:count],
            query_starts_cpu=list(range(count + 1)), kv_lengths_cpu=[1] * count if fixed else kv_lengths.tolist(), fixed=fixed,
            decodes=count if fixed else 0,
        )  # fmt: skip


class ModelProposer(Proposer):
    """max_rows: that a step samples."""

    def __init__(
        self, drafter: Drafter, backend: AttentionBackend, *, slots: int, max_rows: int, max_seq_len: int, block_size: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._drafter, self._backend, self._block_size, self._max_rows = drafter, backend, block_size, max_rows
        self.inner_layers = drafter.inner_layers
        self._history = TokenHistory.empty(slots, max_seq_len, device)
        self._lanes = Lanes(max_rows, drafter.width, dtype, device)
        self._states = self._lanes.states[:0]  # of the largest captured step
        self._extend: dict[GraphSize, Replay] = {}
        self._advance: dict[int, Replay] = {}

    def declared_caches(self) -> list[Cache]:
        """As `Proposer`."""
        return [in_group(cache, 0) for cache in self._drafter.declared_caches()]

    def admit(self, assignment: SlotAssignment) -> None:
        """As `Proposer`."""
        self._history.admit(assignment)

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def capture(self, capturer: GraphCapturer, batches: Mapping[GraphSize, Batch]) -> None:
        """As `Proposer`."""
        largest = max(size.tokens for size in batches)
        if len(self._states) < largest:
            self._states = self._lanes.states.new_zeros(largest, self._drafter.width)
        tables = next(iter(batches.values())).block_tables
        for size, batch in sorted(batches.items(), key=lambda item: -item[0].tokens):
            work = partial(self._extend_into, self._states[: size.tokens], batch)
            self._extend[size] = capturer.capture(work, work)
        for rows in self._row_counts(list(batches)):
            advance = partial(self.advance, rows, tables, fixed=True)
            self._advance[rows] = capturer.capture(advance, advance)

    def graphs(self, sizes: Sequence[GraphSize]) -> int:
        """As `Proposer`."""
        return len(sizes) + len(self._row_counts(sizes))

    def reset(self) -> None:
        """As `Proposer`."""
        self._extend.clear()
        self._advance.clear()

    def _row_counts(self, sizes: Sequence[GraphSize]) -> list[int]:
        """The rows of the passes that are captured, the most first."""
        return sorted({min(size.decode_rows, self._max_rows) for size in sizes if not size.prefill_rows}, reverse=True)

    # ---- passes ------------------------------------------------------------------------------------------------------

    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        """As `Proposer`."""
        self._history.append(rows)
        replay = None if rows.size is None else self._extend.get(rows.size)
        if replay is None:
            states = self.extend(rows.batch)
        else:
            replay()
            states = self._states
        return self._drafts(rows, states, count) if count else None

    def extend(self, batch: Batch) -> Tensor:
        """Take in the tokens of the target's forward: the states [T, width]. Of a draft that was rejected what is stored means
        nothing; it is written again before it is read."""
        assert batch.table_rows is not None
        tokens = torch.arange(len(batch.token_ids), dtype=torch.int32, device=batch.token_ids.device)
        row = torch.bucketize(tokens, batch.query_starts[1:], right=True).clamp_(max=len(batch.table_rows) - 1)
        history = self._history.tokens
        at = (batch.positions + self._drafter.reads_next).clamp_(max=history.shape[1] - 1)
        ids = history[batch.table_rows[row], at].long()
        first = self._drafter.first_states(None if batch.inner is None else batch.inner.out)
        return self._forward(replace(batch, token_ids=ids, attention=None, last=None, inner=None, dp_tokens=None), first)

    def advance(self, count: int, tables: Tensor, *, fixed: bool) -> None:
        """One pass of the first `count` lanes: their tokens and states are replaced by the next ones."""
        lanes = self._lanes
        states = self._forward(lanes.batch(count, tables, self._block_size, fixed=fixed), lanes.states[:count])
        lanes.states[:count] = states
        lanes.tokens[:count] = self._drafter.most_likely(states)
        lanes.positions[:count] += 1

    def _forward(self, batch: Batch, states: Tensor | None) -> Tensor:
        batch.attention = self._backend.plan(batch)
        output = self._drafter.hidden_states(batch, self.caches, states)
        batch.attention = None  # a plan references its batch: both would wait for the cyclic garbage collector
        return output

    def _extend_into(self, states: Tensor, batch: Batch) -> None:
        states.copy_(self.extend(batch))

    def _drafts(self, rows: SampledRows, states: Tensor, count: int) -> Tensor:
        """[S, count]: the tokens behind those that were sampled, one pass after the other."""
        lanes, sampled, history = self._lanes, len(rows.slots), self._history.tokens
        padded = next((size for size in sorted(self._advance) if size >= sampled), sampled)
        lanes.fill(rows, padded)
        drafts = torch.empty((sampled, count), dtype=torch.int64, device=rows.slots.device)
        begin = 0
        if self._drafter.reads_next:
            accepted = (rows.sampled[:, :-1] >= 0).sum(1) - 1
            lanes.states[:sampled] = states.index_select(0, (rows.at + accepted).clamp_(0, rows.tokens - 1))
            lanes.tokens[:sampled] = drafts[:, 0] = self._drafter.most_likely(lanes.states[:sampled])
            begin = 1
        else:
            lanes.tokens[:sampled] = history[rows.slots, rows.lengths.clamp(max=history.shape[1] - 1)].long()
        fixed = self._backend.graphs is not None
        for place in range(begin, count):
            if padded in self._advance:
                self._advance[padded]()
            else:
                self.advance(sampled, rows.batch.block_tables, fixed=fixed)
            drafts[:, place] = lanes.tokens[:sampled]
        at = rows.lengths.unsqueeze(1) - begin + torch.arange(count, device=drafts.device)
        return drafts.masked_fill_(at >= rows.capacities.unsqueeze(1), NO_DRAFT)  # where it could not see the tokens before
