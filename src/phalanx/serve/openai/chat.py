# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.openai.body import read_body
from phalanx.serve.openai.generate import UsageCounter, generate
from phalanx.serve.openai.logprobs import chat_logprobs
from phalanx.serve.openai.prompts import encode_chat, renders_quickly
from phalanx.serve.openai.sampling import chat_params, structured_output_of
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ChatCompletionResponse
from phalanx.serve.openai.service import Service, ServingEngine, service_of
from phalanx.serve.openai.stream import DONE, CancellableResponse, EventStream, chunks, event
from phalanx.serve.openai.tools.calls import Argued, Called, CallReader, Event, Said
from phalanx.serve.outputs import CompletionDelta

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    responses=responses_of(ChatCompletionResponse, streams=ChatCompletionChunk),
    openapi_extra=request_body(ChatRequest),
)
async def create_chat_completion(http_request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(http_request)
    service.admission.require_capacity_for_one()
    request = await read_body(http_request, ChatRequest)
    work = ChatHandler(service, service.require_engine(request.model), request)
    if request.stream:
        return EventStream(work.events(), service.api_error)
    return CancellableResponse(work.whole(), service.api_error)


class ChatHandler:
    """One request on its way: validated, not yet admitted."""

    def __init__(self, service: Service, engine: ServingEngine, request: ChatRequest) -> None:
        self._service, self._engine, self._request = service, engine, request
        self._accepted = time.monotonic()
        self._params = chat_params(request, engine.facts)
        self._structured_output = structured_output_of(request, engine.tool_format)
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._usage: UsageCounter | None = None

    async def whole(self) -> dict[str, Any]:
        """The answer's body."""
        choices = [ChoiceAssembler(i) for i in range(self._params.n)]
        async with aclosing(self._deltas()) as deltas:
            async for choice in deltas:
                choices[choice["index"]].add(choice)
        return {
            **self._head("chat.completion"),
            "choices": [one.shown() for one in choices],
            "usage": self._usage and self._usage.shown(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer's chunks as server-sent events."""
        with_usage = bool(self._request.stream_options and self._request.stream_options.include_usage)
        head = self._head("chat.completion.chunk")
        as_event = chunks({**head, "usage": None} if with_usage else head)
        async with aclosing(self._deltas()) as deltas:
            async for choice in deltas:
                yield as_event(choice)
        if with_usage:
            yield event({**head, "choices": [], "usage": self._usage and self._usage.shown()})
        yield DONE

    async def _deltas(self) -> AsyncGenerator[dict[str, Any], None]:
        """Pieces of the choices, as they are made."""
        service, engine = self._service, self._engine
        with service.admission.enter(self._params.n) as ticket:
            tokens = await service.run_on_thread(encode_chat, self._request, engine, inline=renders_quickly(self._request))
            params = await service.compiled_params(engine, self._params, self._structured_output)
            engine.client.check(tokens, params)
            ticket.prompt([len(tokens)] * params.n)
            usage = self._usage = UsageCounter([tokens], params.n)
            writers = [Writer(engine, self._request, i) for i in range(params.n)]
            running = generate(engine, [tokens], params, ticket, service.metrics, accepted=self._accepted)
            async with aclosing(running) as pieces:
                async for piece in pieces:
                    usage.add(piece)
                    for choice in writers[piece.index].push(piece):
                        yield choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._service.model_name}


class Writer:
    """Turns one completion's pieces into deltas of its message: the role first, then text and calls, then how it ended."""

    def __init__(self, engine: ServingEngine, request: ChatRequest, index: int) -> None:
        self._index, self._text_of = index, engine.tokenizer.token_text
        self._with_logprobs = bool(request.logprobs)
        self._one_call = request.parallel_tool_calls is False
        self._began = False
        self._reader = None
        if request.tools and request.tool_choice != "none" and engine.tool_format is not None:
            self._reader = CallReader(engine.tool_format, {tool.function.name for tool in request.tools})

    def push(self, piece: CompletionDelta) -> list[dict[str, Any]]:
        """The choice's next pieces."""
        if self._began and self._reader is None and not self._with_logprobs and piece.finish_reason is None:
            return [self._choice({"content": piece.text})] if piece.text else []
        deltas = self._changes(piece)
        logprobs = None
        if self._with_logprobs and piece.token_ids:
            logprobs = chat_logprobs(piece.logprobs, self._text_of)
            deltas = deltas or [{"content": ""}]
        if not self._began:
            self._began = True
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        shown = [self._choice(delta) for delta in deltas]
        if logprobs is not None:
            shown[-1]["logprobs"] = logprobs
        if piece.finish_reason is not None:
            called = self._reader is not None and self._reader.calls > 0
            reason = "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason
            shown.append({**self._choice({}), "finish_reason": reason, "stop_reason": piece.stop_reason})
        return shown

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _changes(self, piece: CompletionDelta) -> list[dict[str, Any]]:
        if self._reader is None:
            return [{"content": piece.text}] if piece.text else []
        events = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            events += self._reader.finish()
        return [self._delta(one) for one in events if not (self._one_call and getattr(one, "index", 0) > 0)]

    @staticmethod
    def _delta(one: Event) -> dict[str, Any]:
        match one:
            case Said(text):
                return {"content": text}
            case Called(index, name):
                call = {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                return {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}
            case Argued(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChoiceAssembler:
    """A choice put together from its pieces, so that what is streamed and what is not are the same."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[Any] | None = None
        self._last: dict[str, Any] = {}

    def add(self, choice: dict[str, Any]) -> None:
        """The next piece, as it would have been streamed."""
        delta = choice["delta"]
        if delta.get("content"):
            self._content.append(delta["content"])
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                self._calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                self._calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["logprobs"] is not None:
            self._logprobs = [*(self._logprobs or []), *choice["logprobs"]["content"]]
        self._last = choice

    def shown(self) -> dict[str, Any]:
        """The choice of the answer's body."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._calls:
            message = {**message, "content": message["content"] or None, "tool_calls": self._calls}
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        ended = {name: self._last.get(name) for name in ("finish_reason", "stop_reason")}
        return {"index": self._index, "message": message, "logprobs": logprobs, **ended}
