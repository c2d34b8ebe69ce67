# SPDX-License-Identifier: Apache-2.0
"""One prompt becomes n completions, and their tokens become text: what offline use and the HTTP API share, and `RequestOutput`, in
which offline use collects it.

Completion i of request "id" is the engine's request "id-i" with seed + i. Stop strings end a completion here, where text is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from phalanx.config import SamplingParams
from phalanx.engine.messages import RequestUpdate, TokenLogprobs
from phalanx.serve.client import Engine
from phalanx.serve.detokenize import Detokenizer
from phalanx.serve.tokenizer import Tokenizer

_SEEDS = 1 << 63


@dataclass
class CompletionOutput:
    """One completion, as far as it has come.

    token_ids: every new token, the one that ended it included. text: their text, without the stop string or stop token that ended
    it (unless include_stop_str_in_output) and, with skip_special_tokens, without special tokens; "" where there is no tokenizer.
    logprobs: one entry per token where asked for, with .token, .logprob, .rank (1: the likeliest) and .top [(token, logprob)].
    cumulative_logprob: their sum, else None. finish_reason: None while it runs, then "stop" (a stop string, a stop token or eos),
    "length" or "abort". stop_reason: the stop string or the stop token's id; None for eos.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt and its completions.

    prompt: the text that was tokenized (a chat's rendered template); None for a prompt of token ids. prompt_logprobs: one entry per
    prompt token where asked for; the first is None, since nothing stands before it. num_cached_tokens: prompt tokens that the
    prefix cache held, for the first completion. finished: all completions are.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


class Piece(msgspec.Struct):
    """What one completion grew by. The last one of each completion has a finish_reason.

    text may be "" while characters or possible stop strings are held back, and may belong to tokens of earlier pieces. logprobs:
    one per token, where asked for. prompt_logprobs: once, in the first piece of completion 0. cached_tokens: of the prompt.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0


def completions(
    engine: Engine, tokenizer: Tokenizer | None, request_id: str, token_ids: Sequence[int], params: SamplingParams,
    *, patient: bool = False,
) -> AsyncGenerator[Piece]:  # fmt: skip
    """The pieces of all params.n completions, as they come; in order within each.

    Without a tokenizer, or with params.detokenize off, texts are "". patient: nobody looks before the end, so that a completion
    without stop strings may come in few pieces. Leaving early (close it: `contextlib.aclosing`) aborts what still runs. The first
    error of any completion is raised, and the others are aborted. Raises what `Engine.add` raises.
    """
    patient = patient and not params.stops
    if params.n == 1:
        return _completion(engine, tokenizer, f"{request_id}-0", token_ids, params, 0, patient)
    return _side_by_side(engine, tokenizer, request_id, token_ids, params, patient)


async def _side_by_side(
    engine: Engine, tokenizer: Tokenizer | None, request_id: str, token_ids: Sequence[int], params: SamplingParams, patient: bool
) -> AsyncGenerator[Piece]:
    ready: asyncio.Queue[Piece | BaseException] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            part = _completion(engine, tokenizer, f"{request_id}-{index}", token_ids, _params_of(params, index), index, patient)
            async with aclosing(part):
                async for piece in part:
                    ready.put_nowait(piece)
        except Exception as error:
            ready.put_nowait(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(params.n)]
    try:
        running = params.n
        while running:
            item = await ready.get()
            if isinstance(item, BaseException):
                raise item
            running -= item.finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _completion(
    engine: Engine, tokenizer: Tokenizer | None, request_id: str, token_ids: Sequence[int], params: SamplingParams, index: int,
    patient: bool,
) -> AsyncGenerator[Piece]:  # fmt: skip
    text = Detokenizer(tokenizer, params) if tokenizer is not None and params.detokenize else None
    updates = engine.add(request_id, token_ids, params, patient=patient)
    async with aclosing(updates):
        async for update in updates:
            piece = _piece(update, text, params, index)
            yield piece
            if piece.finish_reason is not None:
                return


def _piece(update: RequestUpdate, text: Detokenizer | None, params: SamplingParams, index: int) -> Piece:
    finish = update.finish_reason
    piece = Piece(
        index, "", update.tokens, update.logprobs, update.prompt_logprobs, finish, update.stop_reason, update.cached_tokens
    )  # fmt: skip
    if text is None:
        return piece
    before = text.count
    if finish is None:
        piece.text = text.push(update.tokens)
    else:
        # "stop" of the engine is a stop token, the last one; its text is no part of the answer.
        silent = int(finish == "stop" and not params.include_stop_str_in_output)
        piece.text = text.push(update.tokens, silent=silent) + text.finish()
    if text.stop_reason is not None:
        taken = text.count - before
        piece.token_ids, piece.logprobs = update.tokens[:taken], update.logprobs[:taken]
        piece.finish_reason, piece.stop_reason = "stop", text.stop_reason
    return piece


def _params_of(params: SamplingParams, index: int) -> SamplingParams:
    """Those of one completion of several: its own seed; the prompt's logprobs are needed once."""
    seed = None if params.seed is None else (params.seed + index + _SEEDS) % (2 * _SEEDS) - _SEEDS
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return msgspec.structs.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


def grow(output: RequestOutput, piece: Piece) -> None:
    """Add a piece to the output of its request."""
    made = output.outputs[piece.index]
    made.text += piece.text
    made.token_ids.extend(piece.token_ids)
    if piece.logprobs:
        if made.logprobs is None:
            made.logprobs = []
        made.logprobs.extend(piece.logprobs)
        made.cumulative_logprob = (made.cumulative_logprob or 0.0) + sum(entry.logprob for entry in piece.logprobs)
    made.finish_reason, made.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.index == 0:
        output.prompt_logprobs = piece.prompt_logprobs or output.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, piece.cached_tokens)
    output.finished = all(part.finished for part in output.outputs)


def empty_output(request_id: str, prompt: str | None, token_ids: Sequence[int], n: int) -> RequestOutput:
    """An output that nothing has been added to."""
    return RequestOutput(request_id, prompt, list(token_ids), [CompletionOutput(index) for index in range(n)])
