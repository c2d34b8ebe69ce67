# SPDX-License-Identifier: Apache-2.0
"""The output of sampling on its way from the device to the host: `SampledTokens`, `PromptScores`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import NO_DRAFT, RowOutput, RowResult, TokenLogprobs
from phalanx.kernels.reference import NOT_FINITE

Longs = np.ndarray[Any, np.dtype[np.int64]]


class PinnedBuffer:
    """Host memory for up to `count` tokens. `event`: the end of their copy, on GPU."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
            self.tokens = torch.empty(count, dtype=torch.int64, pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]


class PinnedBuffers:
    """Page-locked memory for the tokens of the steps in flight: made when needed, and used again once it was read."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._free: list[PinnedBuffer] = []

    def take(self, count: int) -> PinnedBuffer:
        """For so many tokens."""
        if count > self._count:
            self._count = 2 * count
            self._free.clear()
        return self._free.pop() if self._free else PinnedBuffer(self._count, self._device)

    def give(self, buffer: PinnedBuffer) -> None:
        if len(buffer.tokens) == self._count:
            self._free.append(buffer)


class SampledTokens:
    """The tokens of one step. `tokens` is on the device: [S] int64, or, of rows that may verify drafts, [S, k + 2] as
    `accept_drafts` has it. Its copy to the host has begun, and that of the logprobs if any.

    `results` waits for that copy alone, not for the work queued on the device since: the step's one host synchronization.
    """

    def __init__(
        self, tokens: Tensor, buffers: PinnedBuffers, scores: Tensor | None = None, rows: Longs | None = None,
        counts: Longs | None = None, places: Longs | None = None,
    ) -> None:  # fmt: skip
        """scores: `sampling.score` of some of the tokens, each with as many alternatives as `counts` tells. rows: of these tokens;
        places: which of its row's tokens each is, where they are [S, k + 2]."""
        self.tokens = tokens
        self._buffers = buffers
        self._scores = None
        if scores is not None and rows is not None and counts is not None:
            self._scores = _HostCopy(scores), rows.tolist(), (np.zeros_like(rows) if places is None else places).tolist(), counts
        self._buffer: PinnedBuffer | None = buffers.take(tokens.numel())
        self._host_tokens: Longs | None = None
        self._buffer.tokens[: tokens.numel()].copy_(tokens.view(-1), non_blocking=True)
        if self._buffer.event is not None:
            self._buffer.event.record()

    @property
    def ready(self) -> bool:
        """Whether `wait` would not wait."""
        buffer = self._buffer
        return buffer is None or buffer.event is None or bool(buffer.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Longs:
        """The tokens on the host."""
        if self._buffer is not None:
            if self._buffer.event is not None:
                self._buffer.event.synchronize()
            self._host_tokens = self._buffer.tokens[: self.tokens.numel()].numpy().copy().reshape(self.tokens.shape)
            self._buffers.give(self._buffer)
            self._buffer = None
        assert self._host_tokens is not None
        return self._host_tokens

    def outputs(self) -> list[RowOutput]:
        """One per row, in order. A token is negative where there is none, since the logits are not finite."""
        tokens = self.wait()
        if tokens.ndim == 1 and self._scores is None:
            plain: list[RowOutput] = tokens.tolist()
            return plain
        return [*self.results()]

    def results(self) -> list[RowResult]:
        """`outputs` with all fields; `logprobs` where the request wants them."""
        tokens = self.wait()
        if tokens.ndim == 1:
            results = [RowResult([token]) for token in tokens.tolist()]
        else:
            results = [RowResult([token for token in row[:-1] if token != NO_DRAFT], drafted=row[-1]) for row in tokens.tolist()]
        if self._scores is not None:
            scores, rows, places, counts = self._scores
            # Of tokens that are no part of the result, too.
            targets = [
                results[row].tokens[place] if place < len(results[row].tokens) else -1
                for row, place in zip(rows, places, strict=True)
            ]
            for row, entry in zip(rows, read_scores(scores.wait(), targets, counts.tolist()), strict=True):
                if entry.token >= 0 and math.isnan(entry.logprob):  # NaN among logits that could not be chosen
                    results[row].tokens.append(NOT_FINITE)
                elif entry.token >= 0:
                    results[row].logprobs.append(entry)
        return results


class PromptScores:
    """Logprobs of prompt tokens on their way to the host."""

    def __init__(self, scores: Tensor, targets: Sequence[int], counts: Sequence[int]) -> None:
        self._copy, self._targets, self._counts = _HostCopy(scores), targets, counts

    def results(self) -> list[TokenLogprobs]:
        """One per position, in order. Waits for the device."""
        return read_scores(self._copy.wait(), self._targets, self._counts)


class _HostCopy:
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


def read_scores(scores: Tensor, targets: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The rows of `sampling.score`, on the host, each with as many alternatives as its count."""
    columns = (scores.shape[1] - 2) // 2
    entries = []
    for row, target, count in zip(scores.tolist(), targets, counts, strict=True):
        n = min(count, columns)
        top = [(int(token), value) for token, value in zip(row[2 : 2 + n], row[2 + columns : 2 + columns + n], strict=True)]
        entries.append(TokenLogprobs(token=target, logprob=row[0], rank=int(row[1]), top=top))
    return entries
