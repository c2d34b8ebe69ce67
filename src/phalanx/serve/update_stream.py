# SPDX-License-Identifier: Apache-2.0
"""The updates of one request on their way from the engine's socket to the coroutine that reads them: `UpdateStream`."""

from __future__ import annotations

import asyncio

from phalanx.engine.messages import RequestUpdate
from phalanx.errors import PhalanxError
from phalanx.serve.openai.long_answers import discard

COALESCED_TOKENS = 128
"""Tokens that wake the reader of a stream with `coalesce`."""
MAX_TOKENS, MAX_SCORED_TOKENS = 256, 32
"""Of one update, without and with logprobs. Each may have twenty alternatives, and its reader makes its part of the answer on the
event loop: twenty thousand of them, which a client that had not read for a minute left here, held up every stream for 2 s."""


class UpdateStream:
    """The updates of one request, in order, until one has a finish_reason or an error ends them.

    Updates that arrive while nobody reads are merged into one, and wake the reader once. Those without a token wait for the next.
    Many tokens are read in several updates, between which the event loop runs.
    coalesce: the reader wakes only every `COALESCED_TOKENS` tokens and at the end; the former so that its work does not all pile up
    at the end.
    """

    def __init__(self, *, coalesce: bool = False) -> None:
        self.ended = False
        """The engine sends nothing more for this request."""
        self._min_tokens = COALESCED_TOKENS if coalesce else 1
        self._pending: RequestUpdate | None = None
        self._is_rest = False  # what is pending is the rest of an update whose beginning was read
        self._error: PhalanxError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, update: RequestUpdate) -> None:
        if self.ended:  # a late abort must not change a complete output, nor a late token wake a failed stream
            return
        pending = self._pending
        if pending is None:
            self._pending = pending = update
        else:
            pending.tokens += update.tokens
            pending.logprobs += update.logprobs
            if pending.prompt_logprobs is None:
                pending.prompt_logprobs = update.prompt_logprobs
            else:
                pending.prompt_logprobs += update.prompt_logprobs or ()
            pending.accepted += update.accepted
            pending.rejected += update.rejected
            pending.cached_tokens = pending.cached_tokens or update.cached_tokens
            pending.scheduled = pending.scheduled or update.scheduled
            pending.finish_reason, pending.stop_reason = update.finish_reason, update.stop_reason
        self.ended = update.finish_reason is not None
        if self.ended or len(pending.tokens) >= self._min_tokens:
            self._wake()

    def discard(self) -> None:
        """Free what nobody has read, off the event loop: scores of a long prompt are half a million objects."""
        if self._pending is not None:
            discard(self._pending.prompt_logprobs)
            discard(self._pending.logprobs)

    def fail(self, error: PhalanxError) -> None:
        """End with this error, after the updates that came before it."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake()

    async def next(self) -> RequestUpdate:
        if self._is_rest:
            await asyncio.sleep(0)
        while (pending := self._pending) is None or not (
            self.ended or self._is_rest or len(pending.tokens) >= self._min_tokens
        ):  # fmt: skip
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        limit = MAX_SCORED_TOKENS if pending.logprobs else MAX_TOKENS
        self._is_rest = len(pending.tokens) > limit
        if self._is_rest:
            return _first_of(pending, limit)
        self._pending = None
        return pending

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _first_of(update: RequestUpdate, count: int) -> RequestUpdate:
    """An update with the first tokens of another, which keeps the rest, and its end. The scores of a prompt come first."""
    first = RequestUpdate(
        update.request_id, update.tokens[:count], logprobs=update.logprobs[:count], prompt_logprobs=update.prompt_logprobs,
        cached_tokens=update.cached_tokens, accepted=min(update.accepted, count), scheduled=update.scheduled,
    )  # fmt: skip
    update.accepted -= first.accepted
    del update.tokens[:count], update.logprobs[:count]
    update.prompt_logprobs = None
    return first
