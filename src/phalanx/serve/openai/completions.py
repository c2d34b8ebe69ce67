# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
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
from phalanx.serve.completions import MAX_BURST
from phalanx.serve.openai.body import RequestRoute
from phalanx.serve.openai.generate import Deltas, UsageCounter, generate
from phalanx.serve.openai.logprobs import CompletionLogprobsWriter, EchoedText, prompt_logprobs
from phalanx.serve.openai.long_answers import PART, JsonParts, discard, off_loop
from phalanx.serve.openai.prepare import COMPLETIONS, Prepared
from phalanx.serve.openai.respond import Handler, respond
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import CompletionResponse
from phalanx.serve.openai.service import Service, ServingEngine
from phalanx.serve.openai.stream import Event, choice_events
from phalanx.serve.outputs import CompletionDelta
from phalanx.serve.tokenizer import Tokenizer

router = APIRouter(route_class=RequestRoute)


@router.post(
    COMPLETIONS.path,
    responses=responses_of(CompletionResponse, streams=CompletionResponse),
    openapi_extra=request_body(CompletionRequest),
)
async def create_completion(http_request: Request) -> Response:
    """Complete one or several prompts."""
    return await respond(http_request, COMPLETIONS, CompletionHandler)


class CompletionHandler(Handler):
    """The completions of one or several prompts."""

    def __init__(self, service: Service, engine: ServingEngine, prepared: Prepared[CompletionRequest]) -> None:
        self._service, self._engine, self._prepared, self._request = service, engine, prepared, prepared.request
        self._accepted = time.monotonic()
        self._prompts = prepared.prompts
        self._params = service.with_adapter(prepared.params, prepared.request.model)
        self._structured_output = prepared.structured_output
        self.streams = bool(prepared.request.stream)
        self._usage: UsageCounter | None = None
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": service.name_in_answers(prepared.request.model),
        }  # fmt: skip

    async def body(self) -> dict[str, Any]:
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(self._choices()) as choice_deltas:
            async for choice in choice_deltas:
                _join(choices.setdefault(choice["index"], {}), choice)
        return {**self._head, "choices": [choices[i] for i in sorted(choices)], "usage": self._usage_body()}

    def events(self) -> AsyncGenerator[Event, None]:
        request, count = self._request, len(self._prompts) * self._params.n
        texts_only = request.logprobs is None and request.prompt_logprobs is None
        return choice_events(self._head, self._choices(), count, request.stream_options, self._usage_body, lambda _: texts_only)

    def _usage_body(self) -> dict[str, Any] | None:
        if self._usage is None:
            return None
        return self._usage.body(completion_tokens=0 if self._request.max_tokens == 0 else None)

    async def _choices(self) -> AsyncGenerator[dict[str, Any], None]:
        """Deltas of the choices as they are generated."""
        service, engine, params = self._service, self._engine, self._params
        with service.admission.enter(len(self._prompts) * params.n) as ticket:
            prompts = await service.token_ids(self._prepared, engine)
            params = await service.compiled_params(engine, params, self._structured_output)
            await service.check(prompts, params, engine, self._prepared.name)
            ticket.prompt([len(tokens) for tokens in prompts for _ in range(params.n)])
            usage = self._usage = UsageCounter(prompts, params.n)
            echoes = [EchoedPrompt(prompt, tokens) for prompt, tokens in zip(self._prompts, prompts, strict=True)]
            writers = [ChoiceWriter(engine, self._request, echo) for echo in echoes for _ in range(params.n)]
            running = generate(engine, prompts, params, ticket, service.metrics, accepted=self._accepted)
            async with aclosing(_prompts_first(running, params)) as deltas:
                async for delta in deltas:
                    usage.add(delta)
                    writer = writers[delta.index]
                    entries = writer.entries(delta)
                    try:
                        choice = writer.push(delta) if entries <= PART else await off_loop(writer.push, delta, entries=entries)
                    finally:
                        if params.n == 1:
                            discard(delta.prompt_logprobs)
                    if choice is not None:
                        yield choice


def _prompts_first(running: Deltas, params: SamplingParams) -> Deltas:
    return running if params.prompt_logprobs is None or params.n == 1 else _scores_first(running, params)


async def _scores_first(running: Deltas, params: SamplingParams) -> Deltas:
    """The same deltas. If a prompt is scored, those of its other completions follow the one with the scores, and get them, too."""
    scores: dict[int, list[TokenLogprobs | None]] = {}
    waiting: dict[int, list[CompletionDelta]] = {}
    try:
        async with aclosing(running) as deltas:
            async for delta in deltas:
                prompt = delta.index // params.n
                if delta.prompt_logprobs is not None:
                    scores[prompt] = delta.prompt_logprobs
                    for number, each in enumerate((delta, *waiting.pop(prompt, ()))):
                        if number % MAX_BURST == 0:
                            await asyncio.sleep(0)
                        yield msgspec.structs.replace(each, prompt_logprobs=scores[prompt])
                elif prompt in scores:
                    yield msgspec.structs.replace(delta, prompt_logprobs=scores[prompt])
                else:
                    waiting.setdefault(prompt, []).append(delta)
    finally:
        for one in scores.values():
            discard(one)


@dataclass
class EchoedPrompt:
    """A prompt as it was sent, and its token ids. scores: those of its tokens as JSON, which all its completions share."""

    prompt: Any  # a text, or token ids
    token_ids: list[int]
    scores: JsonParts | None = None

    def echoed(self, tokenizer: Tokenizer, request: CompletionRequest) -> EchoedText:
        """What `echo` says: a text as it was sent, unless only its last tokens were kept; else the text of the tokens."""
        tokens, prompt = self.token_ids, self.prompt
        if not isinstance(prompt, str):
            skip = request.skip_special_tokens is not False
            return EchoedText(tokenizer.decode(tokens, skip_special_tokens=skip), 0, len(tokens), skip)
        before, after = ([], []) if request.add_special_tokens is False else tokenizer.tokens_around
        begin = len(before) if tokens[: len(before)] == before else 0
        end = len(tokens) - len(after)
        end = end if end >= begin and tokens[end:] == after else len(tokens)
        if request.truncate_prompt_tokens is not None:
            prompt = tokenizer.decode(tokens[begin:end], skip_special_tokens=False)
        return EchoedText(prompt, begin, end, skip_special_tokens=False)


class ChoiceWriter:
    """Turns the deltas of one completion into deltas of its choice; the prompt comes first if it is echoed."""

    def __init__(self, engine: ServingEngine, request: CompletionRequest, prompt: EchoedPrompt) -> None:
        self._tokenizer, self._request, self._prompt = engine.tokenizer, request, prompt
        self._echo = bool(request.echo)
        self._silent = request.max_tokens == 0
        self._scores = request.prompt_logprobs is not None
        self._logprobs = None
        if request.logprobs is not None:
            skip = request.skip_special_tokens is not False
            self._logprobs = CompletionLogprobsWriter(engine.tokenizer, skip_special_tokens=skip, top=request.logprobs > 0)

    def entries(self, delta: CompletionDelta) -> int:
        """How many tokens `push` looks at."""
        prompt = len(self._prompt.token_ids) if self._echo else 0
        if self._logprobs is None and not self._scores:
            return prompt
        return prompt + len(delta.prompt_logprobs or ()) * self._scores + len(delta.logprobs)

    def push(self, delta: CompletionDelta) -> dict[str, Any] | None:
        """The next delta of the choice; None if there is nothing new."""
        text, logprobs = "", None
        if self._echo:
            self._echo = False
            echoed = self._prompt.echoed(self._tokenizer, self._request)
            text = echoed.text
            if self._logprobs is not None:
                logprobs = self._logprobs.echo(delta.prompt_logprobs or [], self._prompt.token_ids, echoed)
        finish, stop = delta.finish_reason, delta.stop_reason
        if self._silent:
            finish, stop = ("length", None) if finish else (None, None)
        else:
            text += delta.text
            if self._logprobs is not None:
                new = self._logprobs.push(delta.logprobs, delta.token_ids)
                logprobs = new if logprobs is None else {name: _extend(logprobs[name], new[name]) for name in new}
        scores = self._scores and delta.prompt_logprobs is not None
        if not text and logprobs is None and finish is None and not scores:
            return None
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        if scores:
            self._scores = False
            if self._prompt.scores is None:
                self._prompt.scores = prompt_logprobs(delta.prompt_logprobs or [], self._tokenizer.token_text)
            choice["prompt_logprobs"] = self._prompt.scores
        return choice


def _extend(first: list[Any] | None, more: list[Any] | None) -> list[Any] | None:
    return None if first is None or more is None else first + more


def _join(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    """Append a delta to its choice. Lists grow in place."""
    if not choice:
        choice.update(delta)
        return
    choice["text"] += delta["text"]
    if "prompt_logprobs" in delta:
        choice.setdefault("prompt_logprobs", delta["prompt_logprobs"])
    choice["finish_reason"], choice["stop_reason"] = delta["finish_reason"], delta["stop_reason"]
    more = delta["logprobs"]
    if choice["logprobs"] is None or more is None:
        choice["logprobs"] = choice["logprobs"] or more
        return
    for name, values in more.items():
        if values is not None:
            choice["logprobs"][name].extend(values)
