# SPDX-License-Identifier: Apache-2.0
"""An executor without a model: `FakeExecutor`, for tests of all that is above the ranks, and `StepChecker`, the rules a rank relies
on.

The fake keeps a KV cache of numbers. Each position has a number that is computed from its token and from the number at the position
before it, which is read through the block table, as a model would read it; a sampled token is a function of that number. So
whatever way a request takes through steps, chunks, shared blocks and preemptions, its tokens equal `fake_tokens` exactly when every
block had the right content.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.limits import depth_of, token_lag
from phalanx.engine.messages import (
    NO_DRAFT,
    BlockCopy,
    PlaceAdapter,
    RankFacts,
    RankStats,
    RowOutput,
    RowResult,
    SlotAssignment,
    Step,
    StepBatch,
    StepResult,
    StepRow,
    TokenLogprobs,
)
from phalanx.errors import PhalanxError, StepDiverged
from phalanx.layout.adapter import AdapterFile
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache

FakeProposer = Callable[[SlotAssignment, Sequence[int]], Sequence[int]]
"""Drafts of what follows these tokens of a request."""

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's output function: 64 bits in, 64 well-mixed bits out (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _extend(before: int, token: int) -> int:
    return _mix(before ^ (token + 1))


def _choose(at: int, params: SamplingParams, seed: int, vocab_size: int, forbidden: Sequence[int], mask: bytes | None) -> int:
    """The token that follows the position whose cache has `at`. Greedy requests ignore their seed."""
    token = _mix(at ^ (0 if params.greedy else seed & _MASK)) % vocab_size
    for shift in range(vocab_size):
        candidate = (token + shift) % vocab_size
        if candidate not in forbidden and (mask is None or mask[candidate // 8] >> candidate % 8 & 1):
            return candidate
    return token


def _begin(adapter: bytes) -> int:
    """The number before the first position, for the digest of an adapter: its keys and values are its own from the first token."""
    return int.from_bytes(adapter[:8], "little")


def fake_tokens(
    prompt: Sequence[int], params: SamplingParams, *, seed: int, vocab_size: int, count: int, stop_token_ids: Sequence[int] = (),
    adapter: bytes = b"",
) -> list[int]:  # fmt: skip
    """The first `count` tokens that follow a prompt, computed alone: the output of a FakeExecutor for an unconstrained request.
    adapter: the digest of its adapter."""
    at = _begin(adapter)
    for token in prompt:
        at = _extend(at, token)
    tokens: list[int] = []
    while len(tokens) < count:
        forbidden = stop_token_ids if len(tokens) < params.min_tokens else ()
        tokens.append(_choose(at, params, seed, vocab_size, forbidden, None))
        at = _extend(at, tokens[-1])
    return tokens


@dataclass
class _Slot:
    """What a rank knows of one slot. `cells[p]` is what the KV cache must have at position p."""

    assignment: SlotAssignment
    tokens: list[int]
    adapter: bytes
    cells: list[int] = field(default_factory=list)
    computed: int = 0
    sampled_in: int | None = None  # the last step that sampled into it
    begun: bool = False
    drafts: list[int] = field(default_factory=list)
    over: bool = False  # its tokens fill its blocks: the engine does not know yet that it has ended
    tables: list[list[int]] = field(default_factory=list)  # of each group
    first_live: list[int] = field(default_factory=list)


@lru_cache(maxsize=16)
def _numbers(tokens: tuple[int, ...], adapter: bytes) -> list[int]:
    """The number of each position. Kept, since several completions of one long prompt must not hold up a step for each of them."""
    numbers, at = [], _begin(adapter)
    for token in tokens:
        at = _extend(at, token)
        numbers.append(at)
    return numbers


class StepChecker:
    """Applies steps to a model of what ranks keep, and raises StepDiverged at the first step that breaks a rule of messages.Step.

    Sizes and windows as in SchedulerOptions. `run` returns the result that the ranks would give. `thorough` checks every position
    that a row looks back to, otherwise the last one only. token_lag: as in SchedulerOptions. propose: the drafts; none
    without it. state_snapshots: as in SchedulerOptions; with some, each slot has a state as well. host_blocks, host_states:
    as there.
    """

    def __init__(
        self, *, vocab_size: int, num_blocks: int, block_size: int, max_batch_size: int, max_num_tokens: int, max_seq_len: int,
        windows: Sequence[int | None] = (None,), thorough: bool = True, token_lag: int | None = 1,
        propose: FakeProposer | None = None, state_snapshots: int = 0, host_blocks: int = 0, host_states: int = 0,
    ) -> None:  # fmt: skip
        self._token_lag, self._propose = token_lag, propose
        self._states: list[tuple[int, int] | None] | None = None  # (position, number), as in a cell, of slots and of prefixes
        if state_snapshots:
            self._states = [None] * (max_batch_size + state_snapshots)
        self._reaches = [(window or max_seq_len) if thorough else 2 for window in windows]
        self.vocab_size, self.block_size, self.windows = vocab_size, block_size, windows
        self.max_batch_size, self.max_num_tokens, self.max_seq_len = max_batch_size, max_num_tokens, max_seq_len
        self.slots: dict[int, _Slot] = {}
        self.placed: dict[int, bytes] = {}
        """The digest of the adapter in each slot for adapters."""
        self._holders: list[set[tuple[int, int]]] = [set() for _ in range(num_blocks)]  # (slot, group)
        self._cells: list[tuple[int, int, int] | None] = [None] * (num_blocks * block_size)  # (group, position, number)
        self.host: list[tuple[int, list[tuple[int, int, int] | None]]] = [(0, [])] * host_blocks
        """Of each slot of host memory: the generation, and the cells of a block."""
        self.host_states: list[tuple[int, tuple[int, int] | None]] = [(0, None)] * host_states
        self._number = 0

    def run(self, step: Step) -> StepResult:
        """Check and apply one step."""
        self._number += 1
        self._require(step.number == self._number, f"it is number {step.number}, and {self._number} is due")
        self._require(len(step.batches) == 1, f"it has {len(step.batches)} batches for 1 dp index")
        batch = step.batches[0]
        for copy in batch.saved:
            self._copy_block(copy, saves=True)
        self._copy_states(batch)
        for slot in batch.released:
            self._require(slot in self.slots, f"it releases slot {slot}, which is free")
            state = self.slots.pop(slot)
            self._drop(slot, state, [len(table) for table in state.tables])
        for copy in batch.loaded:
            self._copy_block(copy, saves=False)
        for assignment in batch.admitted:
            self._admit(assignment)
        self._check_rows(batch.rows)
        results = [_output(self._run_row(row, batch.propose)) for row in batch.rows]
        for row in batch.rows:
            state = self.slots[row.slot]
            self._drop(row.slot, state, self._live(state.computed))
        return StepResult(step.number, [results])

    def _copy_block(self, copy: BlockCopy, *, saves: bool) -> None:
        """To a slot of host memory, or back. The request that gets the block has not begun to read it, and nobody else has it."""
        exists = 0 <= copy.block < len(self._holders) and 0 <= copy.slot < len(self.host)
        self._require(exists, f"it copies block {copy.block} and slot {copy.slot} of host memory")
        first, size = copy.block * self.block_size, self.block_size
        if saves:
            self.host[copy.slot] = copy.generation, self._cells[first : first + size]
            return
        generation, cells = self.host[copy.slot]
        self._require(generation == copy.generation, f"it reads write {copy.generation} of slot {copy.slot}, not {generation}")
        self._require(not self._holders[copy.block], f"it copies to block {copy.block} of slots {self._holders[copy.block]}")
        self._cells[first : first + size] = cells

    def _copy_states(self, batch: StepBatch) -> None:
        """To slots of host memory, then among those of the device, then back to slots that requests get."""
        states, host, admitted = self._states or [], self.host_states, {each.slot for each in batch.admitted}
        for copy in batch.saved_states:
            exists = 0 <= copy.block < len(states) and 0 <= copy.slot < len(host)
            self._require(exists, f"it copies state {copy.block} to slot {copy.slot} of host memory")
            host[copy.slot] = copy.generation, states[copy.block]
        for source, target in batch.state_copies:
            self._require(0 <= source < len(states) and 0 <= target < len(states), f"it copies state {source} to {target}")
            states[target] = states[source]
        for copy in batch.loaded_states:
            self._require(0 <= copy.slot < len(host), f"it reads the state in slot {copy.slot} of host memory")
            generation, state = host[copy.slot]
            self._require(generation == copy.generation, f"it reads write {copy.generation} of a state, not {generation}")
            self._require(copy.block in admitted, f"it copies a state to slot {copy.block}, which no request gets")
            states[copy.block] = state

    def _advance_state(self, slot: int, state: _Slot, start: int, end: int) -> None:
        """The state of the slot takes these positions in. A request's first position begins with another state."""
        if self._states is not None:
            latest, due = self._states[slot], (start, state.cells[start - 1])
            self._require(not start or latest == due, f"slot {slot} has the state {latest} where {due} should be")
            self._states[slot] = (end, state.cells[end - 1])

    def _admit(self, assignment: SlotAssignment) -> None:
        slot = assignment.slot
        self._require(0 <= slot < self.max_batch_size, f"slot {slot} is not one of {self.max_batch_size}")
        self._require(slot not in self.slots, f"slot {slot} is taken twice")
        self._require(1 <= assignment.prompt_length <= len(assignment.token_ids), f"slot {slot} has no prompt")
        number = assignment.adapter
        self._require(number < 0 or number in self.placed, f"slot {slot} has the adapter of slot {number}, in which there is none")
        adapter = b"" if number < 0 else self.placed[number]
        state = self.slots[slot] = _Slot(assignment, list(assignment.token_ids), adapter)
        state.cells += _numbers(tuple(state.tokens), adapter)
        state.tables, state.first_live = [[] for _ in self.windows], [0] * len(self.windows)

    def _check_rows(self, rows: Sequence[StepRow]) -> None:
        counts = [row.count for row in rows]
        decodes = sum(row.decodes for row in rows)
        self._require(all(count >= 1 for count in counts), "a row is empty")
        self._require(sum(counts) <= self.max_num_tokens, f"it has {sum(counts)} tokens, more than {self.max_num_tokens}")
        self._require(all(row.decodes for row in rows[:decodes]), "decode rows do not come first")
        if any(row.drafts or row.late for row in rows):
            verifying = sum(row.verifies for row in rows)
            self._require(all(row.verifies and row.samples for row in rows[:verifying]), "rows that verify do not come first")
            self._require(len({row.drafts for row in rows[:verifying]}) == 1, "rows verify different numbers of drafts")
        self._require(all(row.count == 1 + row.drafts for row in rows if row.drafts), "a row has tokens beside its drafts")
        self._require(len({row.slot for row in rows}) == len(rows), "a slot has two rows")

    def _run_row(self, row: StepRow, propose: int) -> RowResult:
        self._require(row.slot in self.slots, f"a row refers to slot {row.slot}, which is free")
        state = self.slots[row.slot]
        if state.adapter:
            placed = self.placed[state.assignment.adapter]
            self._require(placed == state.adapter, f"the adapter of slot {row.slot} has left while its request runs")
        if row.verifies:
            return self._verify_row(row, state, propose)
        self._check_start(row, state)
        self._check_tokens(row, state)
        self._extend_table(row, state)
        capacity = len(state.tables[0]) * self.block_size
        self._require(row.start + row.count <= capacity, f"slot {row.slot} has blocks for {capacity} positions")
        self._read(row, state, row.start)
        self._write(row, state, row.start, state.cells[row.start : row.start + row.count])
        state.computed = end = row.start + row.count
        self._advance_state(row.slot, state, row.start, end)
        result = RowResult()
        if state.assignment.params.prompt_logprobs is not None:
            last = min(end, state.assignment.prompt_length - 1)
            result.prompt_logprobs = [self._logprobs(state.tokens[p], state) for p in range(row.start + 1, last + 1)]
        if row.samples:
            if state.assignment.params.pooling is not None:
                length = len(state.assignment.params.pooled_tokens or "four")
                result.pooled = array("f", (state.tokens * length)[:length]).tobytes()
            self._sample(row, state, result)
            self._finish(row, state, result, propose)
        return result

    def _verify_row(self, row: StepRow, state: _Slot, propose: int) -> RowResult:
        """A row whose start, last token or drafts may be in the slot. A draft is verified where it has a block, and every draft
        before it; the tokens up to the first that differs from its draft are the result."""
        self._check_tokens(row, state)
        self._extend_table(row, state)
        start, capacity = len(state.tokens) - 1, len(state.tables[0]) * self.block_size
        if not state.over:
            late = f"slot {row.slot} may start at {row.start - row.late} to {row.start}, and goes on at {start}"
            self._require(row.start - row.late <= start <= row.start, late)
        state.over |= start >= min(capacity, self.max_seq_len - 1)
        self._require(
            not state.over or row.late > 0, f"slot {row.slot} has blocks for {capacity} positions, and goes on at {start}"
        )
        if state.over:  # whatever is sampled belongs to a request that has ended
            return RowResult([0])
        own = row.tokens[1:] if row.tokens else state.drafts
        drafts = (own + [NO_DRAFT] * row.drafts)[: min(row.drafts, capacity - 1 - start)]
        cells = [state.cells[start]]
        for draft in drafts:
            cells.append(_extend(cells[-1], draft))
        self._read(row, state, start)
        self._write(row, state, start, cells)
        result = RowResult(drafted=sum(draft != NO_DRAFT for draft in drafts))
        for number, draft in enumerate([*drafts, NO_DRAFT]):
            self._sample(row, state, result, row.masks[number] if row.masks else None)
            if draft != state.tokens[-1]:
                break
        state.computed = len(state.tokens) - 1
        self._advance_state(row.slot, state, start, state.computed)
        self._finish(row, state, result, propose)
        return result

    def _finish(self, row: StepRow, state: _Slot, result: RowResult, propose: int) -> None:
        """Propose drafts of what follows."""
        state.sampled_in = self._number
        state.drafts = [] if self._propose is None else list(self._propose(state.assignment, state.tokens))[:propose]
        if row.masks or self._token_lag is None:
            result.drafts = state.drafts

    def _check_start(self, row: StepRow, state: _Slot) -> None:
        if state.begun:
            self._require(row.start == state.computed, f"slot {row.slot} goes on at {row.start}, and has {state.computed} computed")
        else:
            self._require(row.start % self.block_size == 0, f"slot {row.slot} begins at {row.start}, inside a block")
        state.begun = True
        end = row.start + row.count
        self._require(end <= len(state.tokens), f"slot {row.slot} computes position {end - 1} of {len(state.tokens)} tokens")
        self._require(end < self.max_seq_len, f"slot {row.slot} would grow beyond {self.max_seq_len} tokens")
        self._require(
            row.samples == (end == len(state.tokens)), f"slot {row.slot} samples={row.samples} at {end} of {len(state.tokens)}"
        )

    def _check_tokens(self, row: StepRow, state: _Slot) -> None:
        if row.tokens:
            first, count = row.start, row.count - row.drafts
            self._require(row.tokens[:count] == state.tokens[first : first + count], f"slot {row.slot} has other tokens")
            self._require(len(row.tokens) == row.count, f"slot {row.slot} has {len(row.tokens)} tokens for {row.count} positions")
        else:
            sampled, lag = state.sampled_in, self._token_lag
            known = sampled is not None and row.decodes and row.samples
            self._require(known, f"slot {row.slot} has no tokens, and none was sampled into it")
            in_time = sampled is not None and lag is not None and self._number - sampled >= lag
            self._require(in_time, f"slot {row.slot} takes the token of step {sampled}, and may do so {lag} steps later")

    def _extend_table(self, row: StepRow, state: _Slot) -> None:
        live, groups = self._live(row.start - row.late), len(self.windows)
        self._require(len(row.blocks) % groups == 0, f"slot {row.slot} gets {len(row.blocks)} blocks for {groups} groups")
        for number, block in enumerate(row.blocks):
            self._require(0 <= block < len(self._holders), f"block {block} does not exist")
            group = number % groups
            if len(state.tables[group]) >= live[group]:
                self._holders[block].add((row.slot, group))
            state.tables[group].append(block)
        state.first_live = list(map(max, state.first_live, live))

    def _live(self, start: int) -> list[int]:
        """Of each group: its first block that a row from `start` on may read."""
        return [0 if window is None else max(0, start - window) // self.block_size for window in self.windows]

    def _read(self, row: StepRow, state: _Slot, start: int) -> None:
        """Everything that the row's attention looks back to must be there, and be this request's own past."""
        size = self.block_size
        for group, (table, reach) in enumerate(zip(state.tables, self._reaches, strict=True)):
            for position in range(max(0, start - reach + 1), start):
                cell = self._cells[table[position // size] * size + position % size]
                expected = (group, position, state.cells[position])
                self._require(cell == expected, f"slot {row.slot} reads {cell} where {expected} should be")

    def _write(self, row: StepRow, state: _Slot, start: int, cells: Sequence[int]) -> None:
        size = self.block_size
        for group, table in enumerate(state.tables):
            for index in range(start // size, (start + len(cells) - 1) // size + 1):
                holders = self._holders[table[index]]
                alone = holders == {(row.slot, group)}
                self._require(alone, f"slot {row.slot} writes block {table[index]}, held by slots, for groups {holders}")
            for position, cell in enumerate(cells, start):
                self._cells[table[position // size] * size + position % size] = (group, position, cell)

    def _sample(self, row: StepRow, state: _Slot, result: RowResult, mask: bytes | None = None) -> None:
        assignment = state.assignment
        params, out = assignment.params, len(state.tokens) - assignment.prompt_length
        forbidden = assignment.stop_token_ids if out < params.min_tokens else ()
        mask = mask or (row.masks[0] if row.masks else None)
        token = _choose(state.cells[-1], params, assignment.seed, self.vocab_size, forbidden, mask)
        state.cells.append(_extend(state.cells[-1], token))
        state.tokens.append(token)
        result.tokens.append(token)
        if params.logprobs is not None:
            result.logprobs.append(self._logprobs(token, state))

    def _logprobs(self, token: int, state: _Slot) -> TokenLogprobs:
        """Plausible numbers: the chosen token is the most likely, and each alternative is half as likely as the one before it."""
        wanted = state.assignment.params.logprobs or state.assignment.params.prompt_logprobs or 0
        top = [((token + n) % self.vocab_size, -0.7 * (n + 1)) for n in range(min(wanted, self.vocab_size))]
        return TokenLogprobs(token, -0.7, 1, top)

    def _drop(self, slot: int, state: _Slot, live: Sequence[int]) -> None:
        """The slot releases, of each group, the blocks before entry `live` of its table."""
        for group, (table, first, last) in enumerate(zip(state.tables, state.first_live, live, strict=True)):
            for block in table[first:last]:
                self._holders[block].discard((slot, group))
        state.first_live = list(map(max, state.first_live, live))

    def _require(self, valid: bool, violation: str) -> None:
        if not valid:
            raise StepDiverged(f"step {self._number} breaks a rule", why=violation, next="report this with the log")


def _output(result: RowResult) -> RowOutput:
    """As ranks report it."""
    return result.tokens[0] if len(result.tokens) == 1 and result == RowResult(result.tokens) else result


class FakeExecutor:
    """An Executor with one imagined rank per stage. Every step is checked, by the checker of each dp index; results come `latency`
    seconds after a step began.

    Stages overlap: with n of them, n steps take little longer than one. Other sizes as in StepChecker.
    """

    def __init__(
        self, *checkers: StepChecker, num_blocks: int, pipeline_stages: int = 1, latency: float = 0.0, returns_tokens: bool = False
    ) -> None:  # fmt: skip
        self.returns_tokens = returns_tokens
        self.depth = depth_of(pipeline_stages, returns_tokens=returns_tokens)
        self.checkers = checkers
        self._num_blocks, self._stages, self._latency = num_blocks, pipeline_stages, latency
        self._due: deque[tuple[float, StepResult]] = deque()  # by time.monotonic()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._changed = threading.Condition()
        self._ready: deque[StepResult] = deque()
        self._adapters: dict[int, bytes] = {}  # by key, their digests
        self._adapters_read: list[tuple[int, PhalanxError | None]] = []
        self._closed = False
        if latency:
            threading.Thread(target=self._wait, name="fake ranks", daemon=True).start()

    @classmethod
    def from_options(cls, options: EngineOptions, shape: ModelShape, settings: dict[str, Any]) -> FakeExecutor:
        """settings: "num_blocks", "latency", "returns_tokens", "host_blocks" and "host_states", all optional."""
        assert options.max_seq_len is not None
        assert options.max_num_tokens is not None
        blocks = settings.get("num_blocks", 512 + 8 * options.max_seq_len // options.block_size)
        return cls.of(
            vocab_size=shape.vocab_size, num_blocks=blocks, block_size=options.block_size,
            max_batch_size=options.index_batch_size, max_num_tokens=options.index_num_tokens or options.max_num_tokens,
            max_seq_len=options.max_seq_len, windows=group_windows(model_cache(shape)),
            pipeline_stages=options.pipeline_parallel_size, latency=settings.get("latency", 0.0),
            indices=options.expert_parallel_size, returns_tokens=settings.get("returns_tokens", False),
            state_snapshots=options.index_snapshots, host_blocks=settings.get("host_blocks", 0),
            host_states=settings.get("host_states", 0),
        )  # fmt: skip

    @classmethod
    def of(
        cls, *, vocab_size: int, num_blocks: int = 512, block_size: int = 16, max_batch_size: int = 256, max_num_tokens: int = 2048,
        max_seq_len: int = 4096, windows: Sequence[int | None] = (None,), pipeline_stages: int = 1, latency: float = 0.0,
        thorough: bool = False, indices: int = 1, returns_tokens: bool = False, propose: FakeProposer | None = None,
        state_snapshots: int = 0, host_blocks: int = 0, host_states: int = 0,
    ) -> FakeExecutor:  # fmt: skip
        """From sizes alone, of each of `indices` dp indices."""
        checkers = [
            StepChecker(
                vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size, max_batch_size=max_batch_size,
                max_num_tokens=max_num_tokens, max_seq_len=max_seq_len, windows=windows, thorough=thorough,
                token_lag=token_lag(pipeline_stages, returns_tokens=returns_tokens), propose=propose,
                state_snapshots=state_snapshots, host_blocks=host_blocks, host_states=host_states,
            )
            for _ in range(indices)
        ]  # fmt: skip
        return cls(
            *checkers, num_blocks=num_blocks, pipeline_stages=pipeline_stages, latency=latency, returns_tokens=returns_tokens
        )

    def start(self) -> tuple[list[RankFacts], int]:
        facts = [
            RankFacts(
                rank, 0, "fake", (rank, rank + 1), {"weights": 0, "kv": 0, "total": 0}, attention="fake", allreduce="seed",
                host_blocks=len(self.checkers[0].host), host_states=len(self.checkers[0].host_states),
            )
            for rank in range(self._stages)
        ]  # fmt: skip
        return facts, self._num_blocks

    def submit(self, step: Step) -> None:
        result = self._run(step)
        if not self._latency:
            self._ready.append(result)
            os.write(self._write, b".")
            return
        with self._changed:
            free = self._due[-1][0] - self._latency + self._latency / self._stages if self._due else 0.0
            self._due.append((max(time.monotonic(), free) + self._latency, result))
            self._changed.notify()

    def _place(self, work: PlaceAdapter) -> None:
        for checker in self.checkers:
            checker.placed[work.slot] = self._adapters[work.key]

    def _run(self, step: Step) -> StepResult:
        if len(step.batches) != len(self.checkers):
            raise StepDiverged(f"step {step.number} has {len(step.batches)} batches for {len(self.checkers)} dp indices")
        for work in step.before:
            if isinstance(work, PlaceAdapter):
                self._place(work)
        pairs = zip(self.checkers, step.batches, strict=True)
        return StepResult(step.number, [checker.run(Step(step.number, [batch])).batches[0] for checker, batch in pairs])

    def _wait(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                due = self._due[0][0] if self._due else 0.0
            time.sleep(max(0.0, due - time.monotonic()))
            with self._changed:
                if self._closed:  # and so is the pipe
                    return
                self._ready.append(self._due.popleft()[1])
                os.write(self._write, b".")

    def collect(self) -> list[StepResult]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)  # before looking: what comes later wakes the poller again
        results = []
        while self._ready:
            results.append(self._ready.popleft())
        return results

    def read_adapter(self, key: int, file: AdapterFile) -> None:
        self._adapters[key] = file.digest
        self._adapters_read.append((key, None))
        os.write(self._write, b".")

    def drop_adapter(self, key: int) -> None:
        del self._adapters[key]

    def adapters_read(self) -> list[tuple[int, PhalanxError | None]]:
        read, self._adapters_read = self._adapters_read, []
        return read

    def waitables(self) -> list[Any]:
        return [self._read]

    def stats(self) -> RankStats:
        return RankStats({rank: {"total": 0} for rank in range(self._stages)}, {}, {}, {})

    def shutdown(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._changed.notify()
                os.close(self._read)
                os.close(self._write)
