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

from phalanx.serve.openai.body import read_request
from phalanx.serve.openai.generate import UsageCounter, generate
from phalanx.serve.openai.logprobs import chat_logprobs
from phalanx.serve.openai.prompts import encode_chat, renders_quickly
from phalanx.serve.openai.request_params import chat_params, structured_output_of
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ChatCompletionResponse
from phalanx.serve.openai.service import Service, ServingEngine, service_of
from phalanx.serve.openai.stream import DONE, CancellableResponse, EventStream, chunks, event
from phalanx.serve.openai.tools.calls import CallArguments, CallBegin, CallReader, ContentText, Event
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
    handler = await read_request(
        http_request, ChatRequest, lambda request: ChatHandler(service, service.require_engine(request.model), request)
    )
    if handler.streams:
        return EventStream(handler.events(), service.api_error)
    return CancellableResponse(handler.response(), service.api_error)


class ChatHandler:
    """One request: validated, not yet accepted by admission control."""

    def __init__(self, service: Service, engine: ServingEngine, request: ChatRequest) -> None:
        self._service, self._engine, self._request = service, engine, request
        self._accepted = time.monotonic()
        self._params = chat_params(request, engine.facts)
        self._structured_output = structured_output_of(request, engine.tool_format)
        self.streams = bool(request.stream)
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._usage: UsageCounter | None = None

    async def response(self) -> dict[str, Any]:
        """The body of the response."""
        choices = [ChoiceAssembler(i) for i in range(self._params.n)]
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                choices[delta["index"]].add(delta)
        return {
            **self._head("chat.completion"),
            "choices": [choice.body() for choice in choices],
            "usage": self._usage and self._usage.body(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of the response as server-sent events."""
        with_usage = bool(self._request.stream_options and self._request.stream_options.include_usage)
        head = self._head("chat.completion.chunk")
        as_event = chunks({**head, "usage": None} if with_usage else head)
        async with aclosing(self._deltas()) as deltas:
            async for choice in deltas:
                yield as_event(choice)
        if with_usage:
            yield event({**head, "choices": [], "usage": self._usage and self._usage.body()})
        yield DONE

    async def _deltas(self) -> AsyncGenerator[dict[str, Any], None]:
        """Deltas of the choices as they are generated."""
        service, engine = self._service, self._engine
        with service.admission.enter(self._params.n) as ticket:
            tokens = await service.run_on_thread(encode_chat, self._request, engine, inline=renders_quickly(self._request))
            params = await service.compiled_params(engine, self._params, self._structured_output)
            engine.client.check(tokens, params)
            ticket.prompt([len(tokens)] * params.n)
            usage = self._usage = UsageCounter([tokens], params.n)
            writers = [MessageWriter(engine, self._request, i) for i in range(params.n)]
            running = generate(engine, [tokens], params, ticket, service.metrics, accepted=self._accepted)
            async with aclosing(running) as deltas:
                async for delta in deltas:
                    usage.add(delta)
                    for choice in writers[delta.index].push(delta):
                        yield choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._service.model_name}


class MessageWriter:
    """Turns the deltas of one completion into deltas of its message: the role, then text and tool calls, then the finish reason."""

    def __init__(self, engine: ServingEngine, request: ChatRequest, index: int) -> None:
        self._index, self._text_of = index, engine.tokenizer.token_text
        self._with_logprobs = bool(request.logprobs)
        self._one_call = request.parallel_tool_calls is False
        self._has_role = False
        self._reader = None
        if request.tools and request.tool_choice != "none" and engine.tool_format is not None:
            self._reader = CallReader(engine.tool_format, {tool.function.name for tool in request.tools})

    def push(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The next deltas of the choice."""
        if self._has_role and self._reader is None and not self._with_logprobs and delta.finish_reason is None:
            return [self._choice({"content": delta.text})] if delta.text else []
        deltas = self._message_deltas(delta)
        logprobs = None
        if self._with_logprobs and delta.token_ids:
            logprobs = chat_logprobs(delta.logprobs, self._text_of)
            deltas = deltas or [{"content": ""}]
        if not self._has_role:
            self._has_role = True
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        choices = [self._choice(message) for message in deltas]
        if logprobs is not None:
            choices[-1]["logprobs"] = logprobs
        if delta.finish_reason is not None:
            called = self._reader is not None and self._reader.calls > 0
            reason = "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason
            choices.append({**self._choice({}), "finish_reason": reason, "stop_reason": delta.stop_reason})
        return choices

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _message_deltas(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        if self._reader is None:
            return [{"content": delta.text}] if delta.text else []
        events = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish()
        return [self._delta(event) for event in events if not (self._one_call and getattr(event, "index", 0) > 0)]

    @staticmethod
    def _delta(event: Event) -> dict[str, Any]:
        match event:
            case ContentText(text):
                return {"content": text}
            case CallBegin(index, name):
                call = {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                return {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChoiceAssembler:
    """Assembles a choice from its deltas, so that streamed and other responses are the same."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[Any] | None = None
        self._last: dict[str, Any] = {}

    def add(self, choice: dict[str, Any]) -> None:
        """Append a delta in the form in which it would be streamed."""
        delta = choice["delta"]
        if delta.get("content"):
            self._content.append(delta["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            self._logprobs = [*(self._logprobs or []), *choice["logprobs"]["content"]]
        self._last = choice

    def body(self) -> dict[str, Any]:
        """The choice in the body of the response."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._calls:
            message = {**message, "content": message["content"] or None, "tool_calls": self._calls}
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        finish = {name: self._last.get(name) for name in ("finish_reason", "stop_reason")}
        return {"index": self._index, "message": message, "logprobs": logprobs, **finish}
