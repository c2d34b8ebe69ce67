# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import TokenLogprobs
from phalanx.serve.openai.body import read_body
from phalanx.serve.openai.generate import Deltas, UsageCounter, generate
from phalanx.serve.openai.logprobs import CompletionLogprobsWriter
from phalanx.serve.openai.prompts import encode_prompts, encodes_quickly, prompts_of
from phalanx.serve.openai.sampling import completion_params, structured_output_of
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import CompletionResponse
from phalanx.serve.openai.service import Service, ServingEngine, service_of
from phalanx.serve.openai.stream import DONE, CancellableResponse, EventStream, chunks, event
from phalanx.serve.outputs import CompletionDelta

router = APIRouter()


@router.post(
    "/v1/completions",
    responses=responses_of(CompletionResponse, streams=CompletionResponse),
    openapi_extra=request_body(CompletionRequest),
)
async def create_completion(http_request: Request) -> Response:
    """Continue a prompt, or several."""
    service = service_of(http_request)
    service.admission.require_capacity_for_one()
    request = await read_body(http_request, CompletionRequest)
    work = CompletionHandler(service, service.require_engine(request.model), request)
    if request.stream:
        return EventStream(work.events(), service.api_error)
    return CancellableResponse(work.whole(), service.api_error)


class CompletionHandler:
    """One request on its way: validated, not yet admitted."""

    def __init__(self, service: Service, engine: ServingEngine, request: CompletionRequest) -> None:
        self._service, self._engine, self._request = service, engine, request
        self._accepted = time.monotonic()
        self._prompts = prompts_of(request)
        self._params = completion_params(request, engine.facts)
        self._structured_output = structured_output_of(request, None)
        self._usage: UsageCounter | None = None
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": service.model_name,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """The answer's body."""
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(self._choices()) as pieces:
            async for piece in pieces:
                _join(choices.setdefault(piece["index"], {}), piece)
        return {**self._head, "choices": [choices[i] for i in sorted(choices)], "usage": self._spent()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer's chunks as server-sent events."""
        with_usage = bool(self._request.stream_options and self._request.stream_options.include_usage)
        as_event = chunks({**self._head, "usage": None} if with_usage else self._head)
        async with aclosing(self._choices()) as pieces:
            async for piece in pieces:
                yield as_event(piece)
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._spent()})
        yield DONE

    def _spent(self) -> dict[str, Any] | None:
        if self._usage is None:
            return None
        return self._usage.shown(made=0 if self._request.max_tokens == 0 else None)

    async def _choices(self) -> AsyncGenerator[dict[str, Any], None]:
        """Pieces of the choices, as they are made."""
        service, engine, params = self._service, self._engine, self._params
        with service.admission.enter(len(self._prompts) * params.n) as ticket:
            prompts = await service.run_on_thread(encode_prompts, self._prompts, engine, inline=encodes_quickly(self._prompts))
            params = await service.compiled_params(engine, params, self._structured_output)
            for tokens in prompts:
                engine.client.check(tokens, params)
            ticket.prompt([len(tokens) for tokens in prompts for _ in range(params.n)])
            usage = self._usage = UsageCounter(prompts, params.n)
            echoes = [Echo(prompt, tokens) for prompt, tokens in zip(self._prompts, prompts, strict=True)]
            writers = [Writer(engine, self._request, echo) for echo in echoes for _ in range(params.n)]
            running = generate(engine, prompts, params, ticket, service.metrics, accepted=self._accepted)
            async with aclosing(_prompts_first(running, params)) as pieces:
                async for piece in pieces:
                    usage.add(piece)
                    shown = writers[piece.index].push(piece)
                    if shown is not None:
                        yield shown


def _prompts_first(running: Deltas, params: SamplingParams) -> Deltas:
    return running if params.prompt_logprobs is None or params.n == 1 else _scores_first(running, params)


async def _scores_first(running: Deltas, params: SamplingParams) -> Deltas:
    """The same pieces; where a prompt is scored, those of its other completions come after the one that brings the scores, and
    have them too."""
    scores: dict[int, list[TokenLogprobs | None]] = {}
    held: dict[int, list[CompletionDelta]] = {}
    async with aclosing(running) as pieces:
        async for piece in pieces:
            prompt = piece.index // params.n
            if piece.prompt_logprobs is not None:
                scores[prompt] = piece.prompt_logprobs
                for one in (piece, *held.pop(prompt, ())):
                    yield msgspec.structs.replace(one, prompt_logprobs=scores[prompt])
            elif prompt in scores:
                yield msgspec.structs.replace(piece, prompt_logprobs=scores[prompt])
            else:
                held.setdefault(prompt, []).append(piece)


@dataclass(frozen=True)
class Echo:
    """A prompt as it came, and its token ids."""

    prompt: Any  # a text, or token ids
    token_ids: list[int]


class Writer:
    """Turns one completion's pieces into pieces of its choice: the prompt first, where it is to be echoed."""

    def __init__(self, engine: ServingEngine, request: CompletionRequest, prompt: Echo) -> None:
        self._tokenizer, self._prompt = engine.tokenizer, prompt
        self._echo = bool(request.echo)
        self._silent = request.max_tokens == 0
        self._logprobs = None
        if request.logprobs is not None:
            hidden = () if request.skip_special_tokens is False else engine.tokenizer.special_ids
            self._logprobs = CompletionLogprobsWriter(engine.tokenizer.token_text, hidden=hidden, top=request.logprobs > 0)

    def push(self, piece: CompletionDelta) -> dict[str, Any] | None:
        """The choice's next piece; None while there is nothing to show."""
        text, logprobs = "", None
        if self._echo:
            self._echo = False
            prompt = self._prompt.prompt
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            if self._logprobs is not None:
                logprobs = self._logprobs.push(piece.prompt_logprobs or [], self._prompt.token_ids)
        finish, stop = piece.finish_reason, piece.stop_reason
        if self._silent:
            finish, stop = ("length", None) if finish else (None, None)
        else:
            text += piece.text
            if self._logprobs is not None:
                made = self._logprobs.push(piece.logprobs, piece.token_ids)
                logprobs = made if logprobs is None else {k: _extend(logprobs[k], made[k]) for k in made}
        if not text and logprobs is None and finish is None:
            return None
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}


def _extend(first: list[Any] | None, more: list[Any] | None) -> list[Any] | None:
    return None if first is None or more is None else first + more


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a piece to what there is of its choice. Lists grow in place."""
    if not whole:
        whole.update(piece)
        return
    whole["text"] += piece["text"]
    whole["finish_reason"], whole["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
    more = piece["logprobs"]
    if whole["logprobs"] is None or more is None:
        whole["logprobs"] = whole["logprobs"] or more
        return
    for name, values in more.items():
        if values is not None:
            whole["logprobs"][name].extend(values)
