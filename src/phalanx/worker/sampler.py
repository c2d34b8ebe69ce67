# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, on the device: `Sampler`.

What each request asked for is held per slot. A step decides from what the host knows which parts it needs: where all rows are
greedy it is one argmax, without filters nothing is looked for, without penalties no counts exist. A token depends on
(seed, position, logits) only: the noise is a hash of (seed, position, token), so that the rest of the batch, a preemption and the
number of ranks change nothing, and every rank that holds the logits draws the same token without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import SlotAssignment
from phalanx.kernels.sampling import sampling
from phalanx.worker.input_batch import Upload
from phalanx.worker.penalty_counts import PenaltyCounts
from phalanx.worker.sampler_output import PinnedBuffers, PromptScores, SampledTokens
from phalanx.worker.sampling_metadata import Longs, SamplingMetadata, SamplingState, Words64

Ints = np.ndarray[Any, np.dtype[np.int32]]
Rows = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
Masks = Sequence[bytes | None]

_CHUNK = 2**24  # logits per pass of an op that makes temporaries: 64 MiB of fp32


@dataclass(frozen=True)
class ShardSampling:
    """How each row gets its token: temperature [S] fp32, 0 for the likeliest, and noise [2, S] int32 (see `sampling.race`); both
    None where every row gets the likeliest."""

    temperature: Tensor | None
    noise: Tensor | None


class Sampler:
    """One rank's sampler: `slots` requests at most, logits of `vocab_size`, on `device`.

    Every call is made in the order of the steps, on one stream. Ids in logit_bias and stop_token_ids that the vocabulary does not
    have are left out here: the engine refuses such a request before it is admitted.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._book = SamplingState(slots, vocab_size)
        self._tally = PenaltyCounts(slots, vocab_size, self._device)
        self._needs: SamplingMetadata | None = None
        self._homes = PinnedBuffers(slots, self._device)
        self._keys = Upload(self._device)

    def admit(self, admission: SlotAssignment) -> None:
        """A request takes a slot. After a preemption `token_ids` hold its output too, and its state is rebuilt from them."""
        self.release(admission.slot)
        self._book.admit(admission)
        if self._book.penalized[admission.slot]:
            self._tally.open(admission.slot, admission.token_ids, admission.prompt_length)

    def release(self, slot: int) -> None:
        """The slot's request has left; a free slot may be released again."""
        self._book.release(slot)
        self._tally.close(slot)
        self._needs = None

    def draws(self, slots: Rows, positions: Rows, masks: Masks) -> ShardSampling | None:
        """How tokens come straight from the logits as they are, so that ranks which share a vocabulary need not gather them; None
        where `sample` must have them all. The arguments, and the errors, are those of `sample`. The same on every rank."""
        needs = self._gather(slots)
        if _guided(masks) or self._short(needs, positions).size or not needs.order_counts:
            return None
        return ShardSampling(needs.temperature, None if needs.temperature is None else self._noise(needs, positions))

    def taken(self, tokens: Tensor) -> SampledTokens:
        """The step's tokens [S], where somebody found them as `draws` says."""
        return SampledTokens(tokens, self._homes)

    def sample(self, logits: Tensor, slots: Rows, positions: Rows, masks: Masks) -> SampledTokens:
        """A token for each of the S rows, and what was asked to be reported of it. `logits` [S, V] stay as they are; fp32, or
        narrower, and then widened where more than their order counts.

        slots: the row's slot, each at most once. positions: the place that the new token takes in its sequence, so the number of
        tokens before it; the first one is at prompt_length. masks: xgrammar's bitmask (Row.mask) or None. Order: logprobs are of
        the raw logits; then bias, mask, min_tokens, penalties, temperature, top-k, top-p, min-p. Greedy ties go to the lowest id.

        Raises ValueError for a slot that is free, a position inside the prompt, a mask of the wrong size: the caller's mistakes.
        """
        needs = self._gather(slots)
        adjusted = self._adjust(logits, needs, self._short(needs, positions), masks)
        tokens = self._choose(adjusted, needs, positions)
        if needs.tally_rows is not None and needs.penalized is not None:
            self._tally.count(needs.tally_rows, tokens[needs.penalized])
        table = None
        if needs.reported is not None:
            rows = needs.reported
            table = _score(lambda part: logits[rows[part]], tokens[rows], needs.most_logprobs, self._vocab_size)
        return SampledTokens(tokens, self._homes, table, needs.reported_rows, needs.logprobs)

    def score_prompt(self, logits: Callable[[slice], Tensor], targets: Sequence[int], counts: Sequence[int]) -> PromptScores:
        """Begin to report P prompt tokens, which are the targets, each with so many alternatives (0..20). logits: gives those of a
        run of them, [.., V]; asked for one bounded run after the other, since all may be more than memory holds."""
        ids = self._send(targets, torch.int64)
        most = min(max(counts, default=0), self._vocab_size)
        return PromptScores(_score(logits, ids, most, self._vocab_size), targets, counts)

    def _gather(self, slots: Rows) -> SamplingMetadata:
        """What these slots need; kept while the same slots come again, as they do from decode to decode."""
        slots = np.asarray(slots, dtype=np.int64)
        if self._needs is None or not np.array_equal(self._needs.slots, slots):
            if not self._book.held[slots].all() or len(np.unique(slots)) < len(slots):
                raise ValueError(f"slots {slots.tolist()}: each must hold a request, and be there once")
            penalized = slots[self._book.penalized[slots]]
            self._needs = SamplingMetadata.of(slots.copy(), self._book, self._tally.rows(penalized.tolist()), self._send)
        return self._needs

    def _short(self, needs: SamplingMetadata, positions: Rows) -> Longs:
        """The rows that may not stop yet, and have something to stop at."""
        positions = np.asarray(positions, dtype=np.int64)
        if (positions < needs.prompt_lengths).any():
            raise ValueError(f"positions {positions.tolist()} reach into the prompts of slots {needs.slots.tolist()}")
        return np.flatnonzero(positions < needs.free_from)

    def _adjust(self, logits: Tensor, needs: SamplingMetadata, short: Longs, masks: Masks) -> Tensor:
        """The logits that are drawn from: bias, grammar mask, min_tokens and penalties, in fp32; the same tensor where there are
        none."""
        guided = _guided(masks)
        if needs.bias is None and not guided and not short.size and needs.penalized is None:
            return logits
        logits = sampling.widened(logits, copy=True)  # one copy, changed in place: of 512 rows it takes a quarter of a gigabyte
        if needs.bias is not None:
            rows, tokens, values = needs.bias
            logits.index_put_((rows, tokens), values, accumulate=True)
        if guided:
            words = self._send(_words([mask for mask in masks if mask is not None], self._vocab_size), torch.int32)
            _on_rows(logits, self._send(guided, torch.int64), sampling.allow, words)
        if short.size:
            pairs = [(row, token) for row in short.tolist() for token in self._book.stops[needs.slots[row]]]
            rows, tokens = (self._send(column, torch.int64) for column in zip(*pairs, strict=True))
            sampling.forbid(logits, rows, tokens)
        if needs.penalized is not None and needs.tally_rows is not None and needs.penalties is not None:
            counts, in_prompt = self._tally.counts, self._tally.in_prompt

            def penalize(part: Tensor, tally_rows: Tensor, penalties: Tensor) -> Tensor:
                return sampling.penalize(part, counts[tally_rows], in_prompt[tally_rows], *penalties.unbind(1))

            _on_rows(logits, needs.penalized, penalize, needs.tally_rows, needs.penalties)
        return logits

    def _choose(self, logits: Tensor, needs: SamplingMetadata, positions: Rows) -> Tensor:
        """tokens [S] int64: the likeliest in greedy rows, a draw in the others."""
        if needs.temperature is None:
            return sampling.likeliest(logits)
        return sampling.drawn(logits, needs.temperature, self._noise(needs, positions), needs.filters)

    def _noise(self, needs: SamplingMetadata, positions: Rows) -> Tensor:
        """The rows' keys [2, S] int32: see `sampling.draw`."""
        (keys,) = self._keys.send([_noise_keys(needs.seeds, np.asarray(positions, dtype=np.uint64))])
        return keys

    def _send(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Host values as a tensor on the device, without waiting for it."""
        host = torch.as_tensor(values, dtype=dtype)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host.to(self._device)


def _score(logits: Callable[[slice], Tensor], targets: Tensor, most: int, width: int) -> Tensor:
    """`sampling.score` of what `logits` gives for runs of the targets [M], a bounded number at a time."""
    parts = [sampling.score(logits(part).float(), targets[part], most) for part in _parts(len(targets), width)]
    return torch.cat(parts) if parts else torch.empty(0, 2 + 2 * most, dtype=torch.float64, device=targets.device)


def _guided(masks: Masks) -> list[int]:
    """The rows that have a mask."""
    return [i for i, mask in enumerate(masks) if mask is not None] if any(masks) else []


def _on_rows(logits: Tensor, rows: Tensor, op: Callable[..., Tensor], *per_row: Tensor) -> None:
    """Put op(logits[rows], *per_row) into those rows of the logits, worked out a bounded number of rows at a time."""
    for part in _parts(len(rows), logits.shape[1]):
        logits.index_copy_(0, rows[part], op(logits[rows[part]], *(x[part] for x in per_row)))


def _parts(rows: int, width: int) -> Iterator[slice]:
    size = max(1, _CHUNK // max(width, 1))
    return (slice(start, start + size) for start in range(0, rows, size))


def _words(masks: list[bytes], vocab_size: int) -> Ints:
    """The masks as int32 [M, (vocab_size + 31) // 32]."""
    width = (vocab_size + 31) // 32
    if any(len(mask) != 4 * width for mask in masks):
        raise ValueError(f"masks of {sorted({len(mask) for mask in masks})} bytes; {vocab_size} tokens take {4 * width}")
    return np.frombuffer(b"".join(masks), dtype="<i4").reshape(len(masks), width).astype(np.int32)


def _noise_keys(seeds: Words64, positions: Words64) -> Ints:
    """keys [2, R] int32 of seeds and positions [R] uint64: two rounds of splitmix64 (Steele et al. 2014)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _splitmix(_splitmix(seeds + golden) + (positions + np.uint64(1)) * golden)
    keys: Ints = np.stack([mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)]).astype(np.uint32).view(np.int32)
    return keys


def _splitmix(x: Words64) -> Words64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
