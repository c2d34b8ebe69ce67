# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens, on the device: `Sampler`.

What each request asked for is held per slot. A step decides from what the host knows which parts it needs: where all rows are
greedy it is one argmax, without top-k and top-p nothing is sorted, without penalties no counts exist. A token depends on
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

from phalanx.config.sampling import SamplingParams
from phalanx.engine.messages import Admission, RowResult, TokenLogprobs
from phalanx.kernels import sampling

Ints = np.ndarray[Any, np.dtype[np.int32]]
Words64 = np.ndarray[Any, np.dtype[np.uint64]]
Send = Callable[[Any, torch.dtype], Tensor]

_CHUNK = 2**24  # logits per pass of an op that makes temporaries: 64 MiB of fp32
_COLDEST = 1e-30  # a lower temperature would be 0 in fp32


class Sampled:
    """The tokens of one step. `tokens` [S] int64 lies on the device; its copy to the host has begun, with the logprobs' if any.

    `results` waits for that copy alone, not for what was queued on the device since: the step's one host synchronization.
    """

    def __init__(self, tokens: Tensor, table: Tensor | None, asked: Sequence[int | None]) -> None:
        self.tokens = tokens
        self._asked = asked
        self._width = table.shape[1] if table is not None else 0
        self._copy = _Copy(tokens if table is None else torch.cat([tokens.to(torch.float64), table.reshape(-1)]))

    def results(self) -> list[RowResult]:
        """One per row, in order; `logprobs` where the request asked for them."""
        flat = self._copy.wait()
        count = len(self._asked)
        tokens = [int(token) for token in flat[:count].tolist()]
        found = [RowResult(token=token) for token in tokens]
        rows = [i for i, n in enumerate(self._asked) if n is not None]
        if rows:
            table = flat[count:].reshape(len(rows), self._width)
            for i, entry in zip(
                rows, read_scores(table, [tokens[i] for i in rows], [self._asked[i] or 0 for i in rows]), strict=True
            ):
                found[i].logprobs = entry
        return found


class PromptScores:
    """Logprobs of prompt tokens on their way to the host."""

    def __init__(self, table: Tensor, targets: Sequence[int], counts: Sequence[int]) -> None:
        self._copy, self._targets, self._counts = _Copy(table), targets, counts

    def results(self) -> list[TokenLogprobs]:
        """One per position, in order. Waits for the device."""
        return read_scores(self._copy.wait(), self._targets, self._counts)


class Sampler:
    """One rank's sampler: `slots` requests at most, logits of `vocab_size`, on `device`.

    Every call is made in the order of the steps, on one stream. Ids in logit_bias and stop_token_ids that the vocabulary does not
    have are left out here: the engine refuses such a request before it is admitted.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._held: list[_Held | None] = [None] * slots
        self._tally = _Tally(slots, vocab_size, self._device)
        self._needs: _Needs | None = None

    def admit(self, admission: Admission) -> None:
        """A request takes a slot. After a preemption `token_ids` hold its output too, and its state is rebuilt from them."""
        self.release(admission.slot)
        held = _Held.of(admission, self._vocab_size)
        self._held[admission.slot] = held
        if held.penalized:
            self._tally.open(admission.slot, admission.token_ids, admission.prompt_length)

    def release(self, slot: int) -> None:
        """The slot's request has left; a free slot may be released again."""
        self._held[slot] = None
        self._tally.close(slot)
        self._needs = None

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], masks: Sequence[bytes | None]) -> Sampled:
        """A token for each of the S rows, and what was asked to be reported of it. `logits` [S, V] fp32 stay as they are.

        slots: the row's slot, each at most once. positions: the place that the new token takes in its sequence, so the number of
        tokens before it; the first one is at prompt_length. masks: xgrammar's bitmask (Row.mask) or None. Order: logprobs are of
        the raw logits; then bias, mask, min_tokens, penalties, temperature, top-k, top-p, min-p. Greedy ties go to the lowest id.

        Raises ValueError for a slot that is free, a position inside the prompt, a mask of the wrong size: the caller's mistakes.
        """
        needs = self._gather(slots)
        if any(position < held.prompt_length for position, held in zip(positions, needs.held, strict=True)):
            raise ValueError(f"positions {list(positions)} reach into the prompts of slots {list(slots)}")
        adjusted = self._adjust(logits, needs, positions, masks)
        tokens = self._choose(adjusted, needs, positions)
        if needs.tally_rows is not None and needs.penalized is not None:
            self._tally.count(needs.tally_rows, tokens[needs.penalized])
        table = None
        if needs.reported is not None:
            table = _score(logits, needs.reported, tokens[needs.reported], needs.most_logprobs)
        return Sampled(tokens, table, [held.params.logprobs for held in needs.held])

    def score_prompt(self, logits: Tensor, targets: Sequence[int], counts: Sequence[int]) -> PromptScores:
        """Begin to report prompt tokens: logits [P, V] fp32, the P tokens that follow, how many alternatives each (0..20)."""
        ids = self._send(targets, torch.int64)
        table = _score(logits, None, ids, min(max(counts, default=0), self._vocab_size))
        return PromptScores(table, targets, counts)

    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """`score_prompt`, waited for."""
        return self.score_prompt(logits, targets, counts).results()

    def _gather(self, slots: Sequence[int]) -> _Needs:
        """What these slots need; kept while the same slots come again, as they do from decode to decode."""
        if self._needs is None or self._needs.slots != list(slots):
            held = [self._held[slot] for slot in slots]
            if any(x is None for x in held) or len(set(slots)) < len(slots):
                raise ValueError(f"slots {list(slots)}: each must hold a request, and be there once")
            self._needs = _Needs.of(
                list(slots), [x for x in held if x is not None], self._tally.rows(slots), self._vocab_size, self._send
            )
        return self._needs

    def _adjust(self, logits: Tensor, needs: _Needs, positions: Sequence[int], masks: Sequence[bytes | None]) -> Tensor:
        """The logits that are drawn from: bias, grammar mask, min_tokens and penalties; the same tensor where there are none."""
        if needs.bias is not None:
            rows, tokens, values = needs.bias
            logits = logits.index_put((rows, tokens), values, accumulate=True)
        guided = [i for i, mask in enumerate(masks) if mask is not None]
        if guided:
            words = self._send(_words([mask for mask in masks if mask is not None], self._vocab_size), torch.int32)
            logits = _on_rows(logits, self._send(guided, torch.int64), sampling.allow, words)
        short = [i for i, held in enumerate(needs.held) if positions[i] < held.free_from and held.stops]
        if short:
            pairs = [(row, token) for row, i in enumerate(short) for token in needs.held[i].stops]
            rows, tokens = (self._send(column, torch.int64) for column in zip(*pairs, strict=True))
            index = self._send(short, torch.int64)
            logits = logits.index_copy(0, index, sampling.forbid(logits[index], rows, tokens))
        if needs.penalized is not None and needs.tally_rows is not None:
            counts, in_prompt = self._tally.counts, self._tally.in_prompt

            def penalize(part: Tensor, tally_rows: Tensor, penalties: Tensor) -> Tensor:
                return sampling.penalize(part, counts[tally_rows], in_prompt[tally_rows], *penalties.unbind(1))

            logits = _on_rows(logits, needs.penalized, penalize, needs.tally_rows, needs.penalties)
        return logits

    def _choose(self, logits: Tensor, needs: _Needs, positions: Sequence[int]) -> Tensor:
        """tokens [S] int64: the likeliest in greedy rows, a draw in the others."""
        if not needs.random_rows:
            return sampling.likeliest(logits)
        seeds = np.array([needs.held[i].seed for i in needs.random_rows], dtype=np.uint64)
        places = np.array([positions[i] for i in needs.random_rows], dtype=np.uint64)
        keys = self._send(_noise_keys(seeds, places), torch.int32)
        drawn = []
        for part in _parts(len(needs.random_rows), self._vocab_size):
            rows = logits[part] if needs.random is None else logits[needs.random[part]]
            scaled = sampling.scale(rows, needs.temperature[part])
            if needs.most_likely:
                top_k, top_p, min_p = (None if x is None else x[part] for x in (needs.top_k, needs.top_p, needs.min_p))
                scaled = sampling.keep_likely(scaled, needs.most_likely, top_k, top_p, min_p)
            drawn.append(sampling.draw(scaled, keys[:, part]))
        tokens = torch.cat(drawn)
        return tokens if needs.random is None else sampling.likeliest(logits).index_copy(0, needs.random, tokens)

    def _send(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Host values as a tensor on the device, without waiting for it."""
        host = torch.as_tensor(values, dtype=dtype)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host.to(self._device)


@dataclass(frozen=True)
class _Held:
    """What the host knows of the request in a slot."""

    params: SamplingParams
    seed: int  # 0 .. 2**64-1
    prompt_length: int
    free_from: int  # the first position at which it may stop
    stops: list[int]
    bias: list[tuple[int, float]]
    penalized: bool
    top_k: int  # vocab_size: off

    @classmethod
    def of(cls, admission: Admission, vocab_size: int) -> _Held:
        asked = admission.params
        return cls(
            params=asked,
            seed=admission.seed % 2**64,
            prompt_length=admission.prompt_length,
            free_from=admission.prompt_length + asked.min_tokens,
            stops=[token for token in admission.stop_token_ids if token < vocab_size],
            bias=[(token, value) for token, value in (asked.logit_bias or {}).items() if token < vocab_size],
            penalized=(asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) != (1.0, 0.0, 0.0),
            top_k=min(asked.top_k, vocab_size) if asked.top_k > 0 else vocab_size,
        )


@dataclass(frozen=True)
class _Needs:
    """What the rows of a step need, as far as their slots decide it; None or empty where no row needs it."""

    slots: list[int]
    held: list[_Held]
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, tokens, values
    penalized: Tensor | None
    tally_rows: Tensor | None  # the penalized rows' places in the tally
    penalties: Tensor  # [penalized, 3]: repetition, presence, frequency
    random_rows: list[int]
    random: Tensor | None  # the same on the device; None where all rows are
    temperature: Tensor  # [random], as are the filters
    most_likely: int  # as in sampling.keep_likely; 0: no filter at all
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    reported: Tensor | None  # rows that ask for logprobs
    most_logprobs: int

    @classmethod
    def of(cls, slots: list[int], held: list[_Held], tally: list[int], vocab_size: int, send: Send) -> _Needs:
        bias = [(row, token, value) for row, x in enumerate(held) for token, value in x.bias]
        columns = list(zip(*bias, strict=True))
        index, real = torch.int64, torch.float32
        asked = [x.params for x in held if x.penalized]
        random = [row for row, x in enumerate(held) if not x.params.greedy]
        drawn = [held[row] for row in random]
        k_on = [x.top_k < vocab_size for x in drawn]
        p_on = [x.params.top_p < 1.0 for x in drawn]
        m_on = [x.params.min_p > 0.0 for x in drawn]
        all_k = all(k for k, p in zip(k_on, p_on, strict=True) if p)
        most = max((x.top_k for x, k in zip(drawn, k_on, strict=True) if k), default=1) if all_k else vocab_size
        reported = [row for row, x in enumerate(held) if x.params.logprobs is not None]
        return cls(
            slots=slots,
            held=held,
            bias=(send(columns[0], index), send(columns[1], index), send(columns[2], real)) if bias else None,
            penalized=send([row for row, x in enumerate(held) if x.penalized], index) if asked else None,
            tally_rows=send(tally, index) if asked else None,
            penalties=send([(x.repetition_penalty, x.presence_penalty, x.frequency_penalty) for x in asked], real),
            random_rows=random,
            random=send(random, index) if len(random) < len(held) else None,
            temperature=send([max(x.params.temperature, _COLDEST) for x in drawn], real),
            most_likely=most if any(k_on + p_on + m_on) else 0,
            top_k=send([x.top_k for x in drawn], index) if any(k_on) else None,
            top_p=send([x.params.top_p if p else 2.0 for x, p in zip(drawn, p_on, strict=True)], torch.float64)
            if any(p_on)
            else None,
            min_p=send([x.params.min_p for x in drawn], real) if any(m_on) else None,
            reported=send(reported, index) if reported else None,
            most_logprobs=min(max((held[row].params.logprobs or 0 for row in reported), default=0), vocab_size),
        )


class _Tally:
    """Which tokens a request has had: one row of counts for each slot with a penalty, made at first need, doubled when full.

    counts [rows, V] int32: times in the output, kept up to date on the device. in_prompt [rows, V] bool.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots, self._places = slots, dict[int, int]()
        self._free = list[int]()
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def open(self, slot: int, token_ids: list[int], prompt_length: int) -> None:
        """Start a slot's row from the tokens known so far."""
        if not self._free:
            self._grow()
        row = self._places[slot] = self._free.pop()
        known = torch.tensor(token_ids, dtype=torch.int64).to(self.counts.device)
        self.counts[row].zero_()
        self.counts[row].scatter_add_(0, known[prompt_length:], torch.ones_like(known[prompt_length:], dtype=torch.int32))
        self.in_prompt[row].zero_()
        self.in_prompt[row].index_fill_(0, known[:prompt_length], True)

    def close(self, slot: int) -> None:
        row = self._places.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The places of those slots that have one, in the order of the slots."""
        return [self._places[slot] for slot in slots if slot in self._places]

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """One more of tokens [M] in rows [M]; no row twice."""
        self.counts[rows, tokens] += 1

    def _grow(self) -> None:
        had = len(self.counts)
        more = min(max(had, 4), self._slots - had)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self.in_prompt = torch.cat([self.in_prompt, self.in_prompt.new_zeros(more, self.in_prompt.shape[1])])
        self._free.extend(range(had + more - 1, had - 1, -1))


class _Copy:
    """A tensor whose copy to the host has begun."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)  # into pinned memory, so that it does not wait
        self._done = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done.record()

    def wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host


def read_scores(table: Tensor, targets: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The rows of a table of `sampling.score` on the host, each with as many alternatives as it asked for."""
    most = (table.shape[1] - 2) // 2
    found = []
    for row, target, count in zip(table.tolist(), targets, counts, strict=True):
        n = min(count, most)
        top = [(int(token), value) for token, value in zip(row[2 : 2 + n], row[2 + most : 2 + most + n], strict=True)]
        found.append(TokenLogprobs(token=target, logprob=row[0], rank=int(row[1]), top=top))
    return found


def _score(logits: Tensor, rows: Tensor | None, targets: Tensor, most: int) -> Tensor:
    """`sampling.score` of these rows of the logits (None: all), a bounded number at a time."""
    parts = [
        sampling.score(logits[part] if rows is None else logits[rows[part]], targets[part], most)
        for part in _parts(len(targets), logits.shape[1])
    ]
    return torch.cat(parts) if parts else logits.new_empty(0, 2 + 2 * most, dtype=torch.float64)


def _on_rows(logits: Tensor, rows: Tensor, op: Callable[..., Tensor], *per_row: Tensor) -> Tensor:
    """A copy of logits with op(logits[rows], *per_row) in those rows, worked out a bounded number of rows at a time."""
    changed = logits.clone()
    for part in _parts(len(rows), logits.shape[1]):
        changed.index_copy_(0, rows[part], op(logits[rows[part]], *(x[part] for x in per_row)))
    return changed


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
