# SPDX-License-Identifier: Apache-2.0
"""From one prompt to the text of its n completions: the step between the engine's token ids and offline use or the HTTP API.

Completion i of request "id" is the engine's request "id-i" with seed + i. A stop string ends a completion here: `detokenize` finds
it, because the engine has no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from phalanx.config import SamplingParams
from phalanx.engine.messages import RequestUpdate
from phalanx.serve.client import EngineClient
from phalanx.serve.detokenize import Detokenizer
from phalanx.serve.outputs import CompletionDelta
from phalanx.serve.tokenizer import Tokenizer

_SEEDS = 1 << 63
MAX_BURST = 8
"""Deltas that follow each other at once. Of a client that did not read, or of completions that wait for the scores of their prompt,
tens of thousands may wait; each takes up to half a millisecond of the event loop."""


def stream_completions(
    engine: EngineClient, tokenizer: Tokenizer | None, request_id: str, token_ids: Sequence[int], params: SamplingParams,
    *, coalesce: bool = False, shown: Mapping[int, str] | None = None,
) -> AsyncGenerator[CompletionDelta]:  # fmt: skip
    """The deltas of all params.n completions as they arrive; in order within each completion.

    Without a tokenizer, or with params.detokenize off, texts are "". coalesce: the caller needs only the end, so a completion
    without stop strings may come in few deltas. Closing the generator early (`contextlib.aclosing`) aborts what still runs. The
    first error of any completion is raised, and the others are aborted. Raises what `EngineClient.add` raises. shown: special
    tokens that add these texts (see `Detokenizer`).
    """
    coalesce = coalesce and not params.stops
    if params.n == 1:
        return _completion(engine, tokenizer, f"{request_id}-0", token_ids, params, 0, coalesce, shown)
    return _interleaved(engine, tokenizer, request_id, token_ids, params, coalesce, shown)


def _interleaved(
    engine: EngineClient, tokenizer: Tokenizer | None, request_id: str, token_ids: Sequence[int], params: SamplingParams,
    coalesce: bool, shown: Mapping[int, str] | None,
) -> AsyncGenerator[CompletionDelta]:  # fmt: skip
    return merged(
        partial(
            _completion, engine, tokenizer, f"{request_id}-{index}", token_ids, _params_of(params, index), index, coalesce, shown
        )
        for index in range(params.n)
    )


async def merged(streams: Iterable[Callable[[], AsyncGenerator[CompletionDelta]]]) -> AsyncGenerator[CompletionDelta]:
    """The deltas of several streams as they arrive. Raises the first error of any, and closes the others.

    One stream begins in each iteration of the event loop, since each sends its whole prompt to the engine; and after MAX_BURST
    deltas that had arrived before, others' tasks run.
    """
    arrived: asyncio.Queue[CompletionDelta | Exception | None] = asyncio.Queue()

    async def pump(stream: Callable[[], AsyncGenerator[CompletionDelta]]) -> None:
        try:
            async with aclosing(stream()) as deltas:
                async for delta in deltas:
                    arrived.put_nowait(delta)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks: list[asyncio.Task[None]] = []
    waiting = list(streams)
    ended = burst = 0
    try:
        while ended < len(tasks) or waiting:
            if waiting:
                tasks.append(asyncio.create_task(pump(waiting.pop(0))))
                await asyncio.sleep(0)
                if arrived.empty():
                    continue
            burst = 0 if arrived.empty() else burst + 1
            if burst > MAX_BURST:
                burst = 0
                await asyncio.sleep(0)
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _completion(
    engine: EngineClient, tokenizer: Tokenizer | None, request_id: str, token_ids: Sequence[int], params: SamplingParams,
    index: int, coalesce: bool, shown: Mapping[int, str] | None,
) -> AsyncGenerator[CompletionDelta]:  # fmt: skip
    text = Detokenizer(tokenizer, params, shown=shown) if tokenizer is not None and params.detokenize else None
    updates = engine.add(request_id, token_ids, params, coalesce=coalesce)
    async with aclosing(updates):
        async for update in updates:
            delta = _delta(update, text, params, index)
            yield delta
            if delta.finish_reason is not None:
                return


def _delta(update: RequestUpdate, text: Detokenizer | None, params: SamplingParams, index: int) -> CompletionDelta:
    finish = update.finish_reason
    delta = CompletionDelta(
        index, "", update.tokens, update.logprobs, update.prompt_logprobs, finish, update.stop_reason, update.cached_tokens,
        update.accepted, update.rejected, update.scheduled, update.pooled,
    )  # fmt: skip
    if text is None:
        return delta
    before = text.count
    if finish is None:
        delta.text = text.push(update.tokens)
    else:
        # The engine stops at a stop token, which is the last token; its text is not part of the output.
        silent = int(finish == "stop" and not params.include_stop_str_in_output)
        delta.text = text.push(update.tokens, silent=silent) + text.finish()
    if text.stop_reason is not None:
        count = text.count - before
        delta.token_ids, delta.logprobs = update.tokens[:count], update.logprobs[:count]
        delta.accepted = min(update.accepted, count)  # drafts come first in what a row gives
        delta.rejected += update.accepted - delta.accepted
        delta.finish_reason, delta.stop_reason = "stop", text.stop_reason
    return delta


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of completion `index`: its own seed, and prompt logprobs for the first one only."""
    seed = None if params.seed is None else (params.seed + index + _SEEDS) % (2 * _SEEDS) - _SEEDS
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return msgspec.structs.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)
