# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, on the device: `Sampler`.

The sampling parameters of each request are kept per slot. For each step the host knows which operations it needs: where all rows
are greedy it is one argmax; without filters no thresholds are computed; without penalties no counts exist. A token depends only on
(seed, position, logits): the noise is a hash of (seed, position, token). So for equal logits the rest of the batch, a preemption
and the number of ranks change nothing, and every rank that has the logits samples the same token without communication. The logits
themselves depend on the batch in 16 bit on a GPU.
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
from phalanx.kernels.speculation.drafts import noise_keys
from phalanx.worker.input_batch import Upload
from phalanx.worker.sampler_output import PinnedBuffers, PromptScores, SampledTokens
from phalanx.worker.sampling_metadata import Longs, PenaltyCounts, SamplingMetadata, SamplingState, Words64
from phalanx.worker.speculation.verification import Verification

Ints = np.ndarray[Any, np.dtype[np.int32]]
Rows = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
Masks = Sequence[bytes | None]

_CHUNK = 2**24  # logits per pass of an op that makes temporaries: 64 MiB of fp32


@dataclass(frozen=True)
class ShardSampling:
    """How ranks that share a vocabulary sample without gathering the logits: temperature [S] fp32, 0 for argmax, and noise [2, S]
    int32 (see `sampling.gumbel_max`); both None where every row takes the argmax."""

    temperature: Tensor | None
    noise: Tensor | None


class Sampler:
    """One rank's sampler: `slots` requests at most, logits of `vocab_size`, on `device`.

    Every call is made in the order of the steps, on one stream. Ids in logit_bias and stop_token_ids outside the vocabulary are
    ignored here: the engine rejects such a request before it is admitted.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._state = SamplingState(slots, vocab_size)
        self._penalty_counts = PenaltyCounts(slots, vocab_size, self._device)
        self._metadata: SamplingMetadata | None = None
        self._pinned = PinnedBuffers(slots, self._device)
        self._keys = Upload(self._device)

    def admit(self, assignment: SlotAssignment) -> None:
        """A request takes a slot. After a preemption `token_ids` contain its output too, and its state is rebuilt from them."""
        self.release(assignment.slot)
        self._state.admit(assignment)
        if self._state.penalized[assignment.slot]:
            self._penalty_counts.open(assignment.slot, assignment.token_ids, assignment.prompt_length)

    def release(self, slot: int) -> None:
        """The slot's request has left; a free slot may be released again."""
        self._state.release(slot)
        self._penalty_counts.close(slot)
        self._metadata = None

    def shard_sampling(
        self, slots: Rows, positions: Rows, masks: Masks, verification: Verification | None = None
    ) -> ShardSampling | None:
        """How ranks that share a vocabulary sample without gathering the logits; None where `sample` needs all logits. The
        arguments and errors are those of `sample`. The same on every rank."""
        metadata = self._metadata_of(slots, verifies=verification is not None)
        if _masked_rows(masks) or self._below_min_tokens(metadata, positions).size or not metadata.needs_only_raw_logits:
            return None
        if metadata.temperature is None:
            return ShardSampling(None, None)
        return ShardSampling(metadata.temperature, self._noise(metadata, positions, verification))

    def output_of(self, tokens: Tensor, verification: Verification | None = None) -> SampledTokens:
        """The output of a step whose tokens were sampled as `shard_sampling` tells."""
        return SampledTokens(tokens if verification is None else verification.accept(tokens), self._pinned)

    def sample(
        self, logits: Tensor, slots: Rows, positions: Rows, masks: Masks, verification: Verification | None = None
    ) -> SampledTokens:
        """A token for each of the S rows, and the logprobs that it reports. `logits` [S, V] are not changed; fp32, or a narrower
        dtype, which is widened where more than the order of the logits matters.

        slots: of the rows, each at most once. positions: of the new tokens in their sequences, so the number of tokens before them;
        the first one is at prompt_length. masks: one of StepRow.masks, or None. Order: logprobs are of the raw logits;
        then bias, mask, min_tokens, penalties, temperature, top-k, top-p, min-p. Greedy ties go to the lowest id. A row whose
        highest logit is NaN or infinite has no token, but NOT_FINITE.

        verification: of rows that may verify drafts. Then S is the number of its sampled tokens: a slot occurs once for each of
        them, and positions are its `lowest`. Penalties of a token count the drafts before it.

        Raises ValueError for a slot that is free, a position inside the prompt, a mask of the wrong size: mistakes of the caller.
        """
        metadata = self._metadata_of(slots, verifies=verification is not None)
        adjusted = self._adjust(logits, metadata, self._below_min_tokens(metadata, positions), masks, verification)
        tokens = self._choose(adjusted, metadata, positions, verification)
        output = tokens if verification is None else verification.accept(tokens)
        if metadata.count_rows is not None and metadata.penalized is not None:
            kept = None if verification is None else verification.kept[metadata.penalized]
            self._penalty_counts.count(metadata.count_rows, tokens[metadata.penalized].clamp_min(0), kept)
        scores, reported, places = None, metadata.reported_rows, None
        if metadata.reported is not None:
            rows = metadata.reported
            scores = _score(lambda part: logits[rows[part]], tokens[rows].clamp_min(0), metadata.max_logprobs, self._vocab_size)
        if verification is not None:
            reported, places = verification.row[reported], verification.place[reported]
        return SampledTokens(output, self._pinned, scores, reported, metadata.logprobs, places)

    def score_prompt(self, logits: Callable[[slice], Tensor], targets: Sequence[int], counts: Sequence[int]) -> PromptScores:
        """Begin to score P prompt tokens, the targets, each with so many alternatives (0..20). logits: gives the logits [.., V] of
        a slice of them; called for one bounded slice after the other, since all logits may not fit the memory."""
        ids = self._send(targets, torch.int64)
        alternatives = min(max(counts, default=0), self._vocab_size)
        return PromptScores(_score(logits, ids, alternatives, self._vocab_size), targets, counts)

    def _metadata_of(self, slots: Rows, *, verifies: bool = False) -> SamplingMetadata:
        """The metadata of these slots; kept while the same slots come again, as they do from decode to decode. verifies: a slot
        may occur several times."""
        slots = np.asarray(slots, dtype=np.int64)
        if self._metadata is None or not np.array_equal(self._metadata.slots, slots):
            if not self._state.occupied[slots].all() or (not verifies and len(np.unique(slots)) < len(slots)):
                raise ValueError(f"slots {slots.tolist()}: each must have a request, and occur once")
            penalized = slots[self._state.penalized[slots]]
            count_rows = self._penalty_counts.rows(penalized.tolist())
            self._metadata = SamplingMetadata.of(slots.copy(), self._state, count_rows, self._send)
        return self._metadata

    def _below_min_tokens(self, metadata: SamplingMetadata, positions: Rows) -> Longs:
        """The rows that may not stop yet, and have stop tokens."""
        positions = np.asarray(positions, dtype=np.int64)
        if (positions < metadata.prompt_lengths).any():
            raise ValueError(f"positions {positions.tolist()} lie in the prompts of slots {metadata.slots.tolist()}")
        return np.flatnonzero(positions < metadata.stop_from)

    def _adjust(
        self, logits: Tensor, metadata: SamplingMetadata, below_min: Longs, masks: Masks, verification: Verification | None
    ) -> Tensor:
        """The logits from which tokens are sampled: with bias, grammar mask, min_tokens and penalties, in fp32; the same tensor
        where none of these applies."""
        masked = _masked_rows(masks)
        if metadata.bias is None and not masked and not below_min.size and metadata.penalized is None:
            return logits
        # One copy, changed in place: of 512 rows it takes a quarter of a gigabyte.
        logits = sampling.contiguous_fp32(logits, copy=True)
        if metadata.bias is not None:
            rows, tokens, values = metadata.bias
            logits.index_put_((rows, tokens), values, accumulate=True)
        if masked:
            words = self._send(_words([mask for mask in masks if mask is not None], self._vocab_size), torch.int32)
            _on_rows(logits, self._send(masked, torch.int64), sampling.allow, words)
        if below_min.size:
            pairs = [(row, token) for row in below_min.tolist() for token in self._state.stops[metadata.slots[row]]]
            rows, tokens = (self._send(column, torch.int64) for column in zip(*pairs, strict=True))
            sampling.forbid(logits, rows, tokens, self._still_below(metadata, rows, verification))
        if metadata.penalized is not None and metadata.count_rows is not None and metadata.penalties is not None:
            counts, in_prompt = self._penalty_counts.counts, self._penalty_counts.in_prompt

            def penalize(part: Tensor, count_rows: Tensor, penalties: Tensor, drafts: Tensor | None = None) -> Tensor:
                output = counts[count_rows]
                if drafts is not None:
                    output.scatter_add_(1, drafts.clamp(min=0), (drafts >= 0).to(output.dtype))
                return sampling.penalize(part, output, in_prompt[count_rows], *penalties.unbind(1))

            drafts = [] if verification is None or not verification.k else [verification.drafts_before()[metadata.penalized]]
            _on_rows(logits, metadata.penalized, penalize, metadata.count_rows, metadata.penalties, *drafts)
        return logits

    def _still_below(self, metadata: SamplingMetadata, rows: Tensor, verification: Verification | None) -> Tensor | None:
        """Of rows that may lie before the first position at which they may stop: whether they do. None: all do."""
        if verification is None or not verification.rows:
            return None
        return verification.positions[rows] < self._send(metadata.stop_from, torch.int64)[rows]

    def _choose(self, logits: Tensor, metadata: SamplingMetadata, positions: Rows, verification: Verification | None) -> Tensor:
        """tokens [S] int64: the argmax in greedy rows, a random sample in the others."""
        if metadata.temperature is None:
            return sampling.argmax(logits)
        noise = self._noise(metadata, positions, verification)
        return sampling.sample(logits, metadata.temperature, noise, metadata.filters)

    def _noise(self, metadata: SamplingMetadata, positions: Rows, verification: Verification | None) -> Tensor:
        """The keys of the rows' noise [2, S] int32: see `sampling.gumbel_max`."""
        if verification is not None and verification.rows:
            (seeds,) = self._keys.send([metadata.seeds.view(np.int64)])
            return noise_keys(seeds, verification.positions)
        (keys,) = self._keys.send([_noise_keys(metadata.seeds, np.asarray(positions, dtype=np.uint64))])
        return keys

    def _send(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Host values as a tensor on the device, without waiting for it."""
        host = torch.as_tensor(values, dtype=dtype)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host.to(self._device)


def _score(logits: Callable[[slice], Tensor], targets: Tensor, alternatives: int, width: int) -> Tensor:
    """`sampling.score` of the logits of the targets [M], a bounded number of rows at a time."""
    parts = [sampling.score(logits(part).float(), targets[part], alternatives) for part in _parts(len(targets), width)]
    return torch.cat(parts) if parts else torch.empty(0, 2 + 2 * alternatives, dtype=torch.float64, device=targets.device)


def _masked_rows(masks: Masks) -> list[int]:
    """The rows that have a mask."""
    return [i for i, mask in enumerate(masks) if mask is not None] if any(masks) else []


def _on_rows(logits: Tensor, rows: Tensor, op: Callable[..., Tensor], *per_row: Tensor) -> None:
    """Put op(logits[rows], *per_row) into those rows of the logits, a bounded number of rows at a time."""
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
