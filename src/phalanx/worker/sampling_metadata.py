# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters by slot (`SamplingState`), what the rows of a step need of them (`SamplingMetadata`), and the tokens that
requests with penalties have had (`PenaltyCounts`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment

Longs = np.ndarray[Any, np.dtype[np.int64]]
Words64 = np.ndarray[Any, np.dtype[np.uint64]]
Send = Callable[[Any, torch.dtype], Tensor]

_MIN_TEMPERATURE = 1e-30  # a lower temperature would be 0 in fp32


class SamplingState:
    """The sampling parameters of the request in each slot, on the host: an array per parameter, so that the rows of a step are
    looked up at once.

    stop_from: the first position at which a request may stop; 0 where it has no stop tokens. seed: 0 .. 2**64-1. top_k: vocab_size
    is off. logprobs: alternatives, -1 for no logprobs. penalties: repetition, presence, frequency.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.occupied, self.random, self.penalized, self.biased = (np.zeros(slots, dtype=bool) for _ in range(4))
        self.prompt_length, self.stop_from, self.top_k, self.logprobs = (np.zeros(slots, dtype=np.int64) for _ in range(4))
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature, self.min_p = (np.zeros(slots, dtype=np.float32) for _ in range(2))
        self.top_p = np.zeros(slots, dtype=np.float64)
        self.penalties = np.zeros((slots, 3), dtype=np.float32)
        self.stops: list[list[int]] = [[] for _ in range(slots)]
        self.bias: list[list[tuple[int, float]]] = [[] for _ in range(slots)]

    def admit(self, assignment: SlotAssignment) -> None:
        """A request takes a slot."""
        slot, params, size = assignment.slot, assignment.params, self.vocab_size
        self.occupied[slot], self.random[slot] = True, not params.greedy
        self.prompt_length[slot] = assignment.prompt_length
        self.stops[slot] = [token for token in assignment.stop_token_ids if token < size]
        self.stop_from[slot] = assignment.prompt_length + params.min_tokens if self.stops[slot] else 0
        self.bias[slot] = [(token, value) for token, value in (params.logit_bias or {}).items() if token < size]
        self.biased[slot] = bool(self.bias[slot])
        self.seed[slot] = assignment.seed % 2**64
        self.temperature[slot] = max(params.temperature, _MIN_TEMPERATURE)
        self.top_k[slot] = min(params.top_k, size) if params.top_k > 0 else size
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.penalties[slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.penalized[slot] = (self.penalties[slot] != (1.0, 0.0, 0.0)).any()

    def release(self, slot: int) -> None:
        self.occupied[slot] = False


@dataclass(frozen=True)
class SamplingMetadata:
    """What sampling the rows [S] of a step needs, as far as their slots decide it; None or empty where no row needs it."""

    slots: Longs
    prompt_lengths: Longs
    stop_from: Longs
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, tokens, values
    penalized: Tensor | None
    count_rows: Tensor | None  # the penalized rows' rows in PenaltyCounts
    penalties: Tensor | None  # [penalized, 3]
    seeds: Words64
    temperature: Tensor | None  # [S], 0 where a row is greedy
    filters: Tensor | None  # [3, S], as in sampling.filter_thresholds
    reported_rows: Longs  # that want logprobs
    reported: Tensor | None
    logprobs: Longs  # [reported]: how many alternatives
    max_logprobs: int

    @property
    def needs_only_raw_logits(self) -> bool:
        """Whether tokens are sampled from the logits as they are: nothing is added to them, filtered or reported."""
        return self.bias is None and self.penalized is None and self.reported is None and self.filters is None

    @classmethod
    def of(cls, slots: Longs, state: SamplingState, count_rows: list[int], send: Send) -> SamplingMetadata:
        """count_rows: the rows in PenaltyCounts of the penalized slots, in order."""
        index, size = torch.int64, state.vocab_size
        biased = [(row, *entry) for row in np.flatnonzero(state.biased[slots]).tolist() for entry in state.bias[slots[row]]]
        columns = list(zip(*biased, strict=True))
        penalized = np.flatnonzero(state.penalized[slots])
        random = state.random[slots]
        filters = np.stack([state.top_k[slots], state.top_p[slots], state.min_p[slots]])  # fp64 represents each exactly
        filtered = (random & ((filters[0] < size) | (filters[1] < 1.0) | (filters[2] > 0.0))).any()
        reported = np.flatnonzero(state.logprobs[slots] >= 0)
        logprobs = state.logprobs[slots[reported]]
        return cls(
            slots=slots, prompt_lengths=state.prompt_length[slots], stop_from=state.stop_from[slots],
            bias=(send(columns[0], index), send(columns[1], index), send(columns[2], torch.float32)) if columns else None,
            penalized=send(penalized, index) if penalized.size else None,
            count_rows=send(count_rows, index) if penalized.size else None,
            penalties=send(state.penalties[slots[penalized]], torch.float32) if penalized.size else None,
            seeds=state.seed[slots],
            temperature=send(np.where(random, state.temperature[slots], 0.0), torch.float32) if random.any() else None,
            filters=send(filters, torch.float64) if filtered else None,
            reported_rows=reported,
            reported=send(reported, index) if reported.size else None,
            logprobs=logprobs, max_logprobs=int(min(logprobs.max(initial=0), size)),
        )  # fmt: skip


class PenaltyCounts:
    """The tokens that requests with a penalty have had: one row of counts per such slot. The rows are made at first need, doubled
    when full, and dropped with the last of these slots.

    counts [rows, V] int32: times in the output, kept up to date on the device. in_prompt [rows, V] bool.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots, self._vocab_size, self._device = slots, vocab_size, device
        self._row_of_slot = dict[int, int]()
        self._drop()

    def _drop(self) -> None:
        self._free = list[int]()
        self.counts = torch.zeros(0, self._vocab_size, dtype=torch.int32, device=self._device)
        self.in_prompt = torch.zeros(0, self._vocab_size, dtype=torch.bool, device=self._device)

    def open(self, slot: int, token_ids: list[int], prompt_length: int) -> None:
        """Start a slot's row from the tokens known so far."""
        if not self._free:
            self._grow()
        row = self._row_of_slot[slot] = self._free.pop()
        tokens = torch.tensor(token_ids, dtype=torch.int64).to(self.counts.device)
        self.counts[row].zero_()
        self.counts[row].scatter_add_(0, tokens[prompt_length:], torch.ones_like(tokens[prompt_length:], dtype=torch.int32))
        self.in_prompt[row].zero_()
        self.in_prompt[row].index_fill_(0, tokens[:prompt_length], True)

    def close(self, slot: int) -> None:
        """Free the slot's row, if it has one."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self._free.append(row)
            if not self._row_of_slot:
                self._drop()

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The rows of those slots that have one, in the order of the slots."""
        return [self._row_of_slot[slot] for slot in slots if slot in self._row_of_slot]

    def count(self, rows: Tensor, tokens: Tensor, kept: Tensor | None = None) -> None:
        """Count tokens [M] in rows [M], no row twice; or, with `kept` [M] bool, those that are kept, in any rows."""
        if kept is None:
            self.counts[rows, tokens] += 1
        else:
            self.counts.index_put_((rows, tokens), kept.to(self.counts.dtype), accumulate=True)

    def _grow(self) -> None:
        size = len(self.counts)
        more = min(max(size, 4), self._slots - size)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])])
        self._free.extend(range(size + more - 1, size - 1, -1))
