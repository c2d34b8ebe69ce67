# SPDX-License-Identifier: Apache-2.0
"""What a step's sampling yields, on its way from the device to the host: `SampledTokens`, `PromptScores`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engine.messages import RowResult, TokenLogprobs

Longs = np.ndarray[Any, np.dtype[np.int64]]


class PinnedBuffer:
    """Where up to `count` tokens land on the host. `event`: the copy's end, on GPU."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
            self.tokens = torch.empty(count, dtype=torch.int64, pin_memory=on_gpu)
        self.event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]


class PinnedBuffers:
    """Page-locked memory for the tokens of the steps under way: made at need, and used again once it was read."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._free: list[PinnedBuffer] = []

    def take(self) -> PinnedBuffer:
        return self._free.pop() if self._free else PinnedBuffer(self._count, self._device)

    def give(self, home: PinnedBuffer) -> None:
        self._free.append(home)


class SampledTokens:
    """The tokens of one step. `tokens` [S] int64 lies on the device; its copy to the host has begun, with the logprobs' if any.

    `results` waits for that copy alone, not for what was queued on the device since: the step's one host synchronization.
    """

    def __init__(
        self,
        tokens: Tensor,
        homes: PinnedBuffers,
        table: Tensor | None = None,
        rows: Longs | None = None,
        counts: Longs | None = None,
    ) -> None:
        """table: `sampling.score` of some rows, each with as many alternatives as `counts` says."""
        self.tokens = tokens
        self._homes = homes
        self._scores = None if table is None or rows is None or counts is None else (_Copy(table), rows.tolist(), counts.tolist())
        self._home: PinnedBuffer | None = homes.take()
        self._found: Longs | None = None
        self._home.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        if self._home.event is not None:
            self._home.event.record()

    @property
    def ready(self) -> bool:
        """Whether nothing here would wait."""
        home = self._home
        return home is None or home.event is None or bool(home.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Longs:
        """The tokens [S] on the host."""
        if self._home is not None:
            if self._home.event is not None:
                self._home.event.synchronize()
            self._found = self._home.tokens[: len(self.tokens)].numpy().copy()
            self._homes.give(self._home)
            self._home = None
        assert self._found is not None
        return self._found

    def results(self) -> list[RowResult]:
        """One per row, in order; `logprobs` where the request asked for them."""
        tokens = self.wait().tolist()
        found = [RowResult(token=token) for token in tokens]
        if self._scores is not None:
            table, rows, counts = self._scores
            for row, entry in zip(rows, read_scores(table.wait(), [tokens[row] for row in rows], counts), strict=True):
                found[row].logprobs = entry
        return found


class PromptScores:
    """Logprobs of prompt tokens on their way to the host."""

    def __init__(self, table: Tensor, targets: Sequence[int], counts: Sequence[int]) -> None:
        self._copy, self._targets, self._counts = _Copy(table), targets, counts

    def results(self) -> list[TokenLogprobs]:
        """One per position, in order. Waits for the device."""
        return read_scores(self._copy.wait(), self._targets, self._counts)


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
