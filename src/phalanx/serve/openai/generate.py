# SPDX-License-Identifier: Apache-2.0
"""All completions of one request, as pieces: each when its tokens arrive, interleaved, and observed for the metrics.

Whoever stops listening (closes the iterator, or is cancelled because the client has gone) aborts what still runs.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from phalanx.config.sampling_params import SamplingParams
from phalanx.errors import EngineClosed, EngineError
from phalanx.metrics import Metrics
from phalanx.serve.admission import Ticket
from phalanx.serve.completions import Piece, completions
from phalanx.serve.openai.service import Ready

Pieces = AsyncGenerator[Piece, None]


async def generate(
    ready: Ready, prompts: Sequence[list[int]], params: SamplingParams, ticket: Ticket, metrics: Metrics, *, accepted: float
) -> Pieces:
    """n completions of each prompt; those of prompt p have the indices p * n .. p * n + n - 1.

    accepted: when the request came (time.monotonic). Raises what the engine raises, for the first that fails.
    """
    clocks = [Clock(metrics, ticket, index, accepted) for index in range(len(prompts) * params.n)]
    try:
        running = _every(ready, prompts, params) if len(prompts) > 1 else _one(ready, prompts[0], params, 0)
        async with aclosing(running) as pieces:
            async for piece in pieces:
                if piece.finish_reason == "abort":
                    raise EngineClosed("a completion was running", held="the server stopped it")
                clocks[piece.index].tick(piece)
                yield piece
    except EngineError:
        for clock in clocks:
            clock.stop("error")
        raise
    finally:
        for clock in clocks:
            clock.stop("abort")


def _one(ready: Ready, tokens: list[int], params: SamplingParams, prompt: int) -> Pieces:
    pieces = completions(ready.client, ready.tokenizer, uuid.uuid4().hex, tokens, params)
    return pieces if prompt == 0 else _renumbered(pieces, prompt * params.n)


async def _renumbered(pieces: Pieces, first: int) -> Pieces:
    async with aclosing(pieces):
        async for piece in pieces:
            piece.index += first
            yield piece


async def _every(ready: Ready, prompts: Sequence[list[int]], params: SamplingParams) -> Pieces:
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def pump(pieces: Pieces) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    arrived.put_nowait(piece)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(_one(ready, tokens, params, i))) for i, tokens in enumerate(prompts)]
    try:
        left = len(tasks)
        while left:
            got = await arrived.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                left -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Clock:
    """Observes one completion's latencies, and tells the door when it begins."""

    def __init__(self, metrics: Metrics, ticket: Ticket, index: int, accepted: float) -> None:
        self._metrics, self._ticket, self._index, self._accepted = metrics, ticket, index, accepted
        self._latest: float | None = None
        self._stopped = False

    def tick(self, piece: Piece) -> None:
        """A piece arrived."""
        now = time.monotonic()
        if piece.token_ids:
            if self._latest is None:
                self._ticket.started(self._index)
                self._metrics.first_token(now - self._accepted)
            else:
                self._metrics.next_tokens(now - self._latest, len(piece.token_ids))
            self._latest = now
        if piece.finish_reason is not None:
            self.stop(piece.finish_reason)

    def stop(self, reason: str) -> None:
        """The completion has ended. The first reason counts."""
        if not self._stopped:
            self._stopped = True
            self._metrics.finished(reason, time.monotonic() - self._accepted)


class Usage:
    """What a request cost. A prompt counts once, however many completions it has."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int) -> None:
        self._prompt = sum(len(tokens) for tokens in prompts)
        self._n, self._made = n, 0
        self._cached: dict[int, int] = {}

    def add(self, piece: Piece) -> None:
        self._made += len(piece.token_ids)
        # What was cached before the request; later completions find what the first one left.
        self._cached.setdefault(piece.index // self._n, piece.cached_tokens)

    def shown(self, *, made: int | None = None) -> dict[str, Any]:
        """The `usage` of an answer. made: tokens that it shows, where those are not all that were made."""
        made = self._made if made is None else made
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": made,
            "total_tokens": self._prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
