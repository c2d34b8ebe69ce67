# SPDX-License-Identifier: Apache-2.0
"""What each request asked for, by slot, and what a step's rows need of the sampler: `SamplingState`, `SamplingMetadata`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment

Longs = np.ndarray[Any, np.dtype[np.int64]]
Words64 = np.ndarray[Any, np.dtype[np.uint64]]
Send = Callable[[Any, torch.dtype], Tensor]

_COLDEST = 1e-30  # a lower temperature would be 0 in fp32


class SamplingState:
    """What the host knows of the request in each slot: a column for each parameter, so that a step's rows are looked up at once.

    free_from: the first position at which a request may stop; 0 where it has nothing to stop at. seed: 0 .. 2**64-1. top_k:
    vocab_size is off. logprobs: alternatives, -1 for none at all. penalties: repetition, presence, frequency.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.held, self.random, self.penalized, self.biased = (np.zeros(slots, dtype=bool) for _ in range(4))
        self.prompt_length, self.free_from, self.top_k, self.logprobs = (np.zeros(slots, dtype=np.int64) for _ in range(4))
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature, self.min_p = (np.zeros(slots, dtype=np.float32) for _ in range(2))
        self.top_p = np.zeros(slots, dtype=np.float64)
        self.penalties = np.zeros((slots, 3), dtype=np.float32)
        self.stops: list[list[int]] = [[] for _ in range(slots)]
        self.bias: list[list[tuple[int, float]]] = [[] for _ in range(slots)]

    def admit(self, admission: SlotAssignment) -> None:
        """A request takes a slot."""
        slot, asked, size = admission.slot, admission.params, self.vocab_size
        self.held[slot], self.random[slot] = True, not asked.greedy
        self.prompt_length[slot] = admission.prompt_length
        self.stops[slot] = [token for token in admission.stop_token_ids if token < size]
        self.free_from[slot] = admission.prompt_length + asked.min_tokens if self.stops[slot] else 0
        self.bias[slot] = [(token, value) for token, value in (asked.logit_bias or {}).items() if token < size]
        self.biased[slot] = bool(self.bias[slot])
        self.seed[slot] = admission.seed % 2**64
        self.temperature[slot] = max(asked.temperature, _COLDEST)
        self.top_k[slot] = min(asked.top_k, size) if asked.top_k > 0 else size
        self.top_p[slot], self.min_p[slot] = asked.top_p, asked.min_p
        self.logprobs[slot] = -1 if asked.logprobs is None else asked.logprobs
        self.penalties[slot] = asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty
        self.penalized[slot] = (self.penalties[slot] != (1.0, 0.0, 0.0)).any()

    def release(self, slot: int) -> None:
        self.held[slot] = False


@dataclass(frozen=True)
class SamplingMetadata:
    """What the rows [S] of a step need, as far as their slots decide it; None or empty where no row needs it."""

    slots: Longs
    prompt_lengths: Longs
    free_from: Longs
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, tokens, values
    penalized: Tensor | None
    tally_rows: Tensor | None  # the penalized rows' places in the tally
    penalties: Tensor | None  # [penalized, 3]
    seeds: Words64
    temperature: Tensor | None  # [S], 0 where a row is greedy
    filters: Tensor | None  # [3, S], as in sampling.floors
    reported_rows: Longs  # that ask for logprobs
    reported: Tensor | None
    logprobs: Longs  # [reported]: how many alternatives
    most_logprobs: int

    @property
    def order_counts(self) -> bool:
        """Whether nothing counts but the order of the logits, and of what runs the race if a row draws: nothing is added to them,
        filtered or reported."""
        return self.bias is None and self.penalized is None and self.reported is None and self.filters is None

    @classmethod
    def of(cls, slots: Longs, book: SamplingState, tally: list[int], send: Send) -> SamplingMetadata:
        """tally: the places in the tally of the penalized slots, in order."""
        index, size = torch.int64, book.vocab_size
        biased = [(row, *each) for row in np.flatnonzero(book.biased[slots]).tolist() for each in book.bias[slots[row]]]
        columns = list(zip(*biased, strict=True))
        penalized = np.flatnonzero(book.penalized[slots])
        random = book.random[slots]
        filters = np.stack([book.top_k[slots], book.top_p[slots], book.min_p[slots]])  # fp64 holds each exactly
        filtered = (random & ((filters[0] < size) | (filters[1] < 1.0) | (filters[2] > 0.0))).any()
        reported = np.flatnonzero(book.logprobs[slots] >= 0)
        logprobs = book.logprobs[slots[reported]]
        return cls(
            slots=slots, prompt_lengths=book.prompt_length[slots], free_from=book.free_from[slots],
            bias=(send(columns[0], index), send(columns[1], index), send(columns[2], torch.float32)) if columns else None,
            penalized=send(penalized, index) if penalized.size else None,
            tally_rows=send(tally, index) if penalized.size else None,
            penalties=send(book.penalties[slots[penalized]], torch.float32) if penalized.size else None,
            seeds=book.seed[slots],
            temperature=send(np.where(random, book.temperature[slots], 0.0), torch.float32) if random.any() else None,
            filters=send(filters, torch.float64) if filtered else None,
            reported_rows=reported,
            reported=send(reported, index) if reported.size else None,
            logprobs=logprobs, most_logprobs=int(min(logprobs.max(initial=0), size)),
        )  # fmt: skip
