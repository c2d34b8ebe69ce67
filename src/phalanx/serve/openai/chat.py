# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.openai.body import RequestRoute
from phalanx.serve.openai.generate import UsageCounter, generate
from phalanx.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from phalanx.serve.openai.long_answers import JsonParts, discard, off_loop
from phalanx.serve.openai.prepare import CHATS, Prepared
from phalanx.serve.openai.prompts import reasoning_variables
from phalanx.serve.openai.request_params import (
    StructuredOutputField,
    callable_names,
    is_forced,
    may_call,
    schemas_of,
)
from phalanx.serve.openai.respond import Handler, respond
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import ChatCompletionChunk, ChatCompletionResponse
from phalanx.serve.openai.service import Service, ServingEngine
from phalanx.serve.openai.stream import Event as StreamEvent
from phalanx.serve.openai.stream import choice_events
from phalanx.serve.output_parsing import CallArguments, CallBegin, ContentText, Event, OutputFormat, OutputParser, ReasoningText
from phalanx.serve.output_parsing.formats import forced_format
from phalanx.serve.output_parsing.json_call import ends_arguments
from phalanx.serve.output_parsing.reasoning import Begin
from phalanx.serve.output_parsing.structural_tags import after_reasoning
from phalanx.serve.outputs import CompletionDelta

router = APIRouter(route_class=RequestRoute)


@router.post(
    CHATS.path,
    responses=responses_of(ChatCompletionResponse, streams=ChatCompletionChunk),
    openapi_extra=request_body(ChatRequest),
)
async def create_chat_completion(http_request: Request) -> Response:
    """Answer a conversation."""
    return await respond(http_request, CHATS, ChatHandler)


class ChatHandler(Handler):
    """A chat, also that of a response or of a message of Anthropic's API."""

    def __init__(self, service: Service, engine: ServingEngine, prepared: Prepared[ChatRequest]) -> None:
        self._service, self._engine, self._prepared, self._request = service, engine, prepared, prepared.request
        self._accepted = time.monotonic()
        self._params = service.with_adapter(prepared.params, prepared.request.model)
        self._structured_output = prepared.structured_output
        self.streams = bool(prepared.request.stream)
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.usage: UsageCounter | None = None
        self._prompt_logprobs: JsonParts | None = None

    async def body(self) -> dict[str, Any]:
        choices = [ChoiceAssembler(i) for i in range(self._params.n)]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                choices[delta["index"]].add(delta)
        return {
            **self._head("chat.completion"),
            "choices": [choice.body() for choice in choices],
            "usage": self._usage_body(),
            **({} if self._params.prompt_logprobs is None else {"prompt_logprobs": self._prompt_logprobs}),
        }

    def events(self) -> AsyncGenerator[StreamEvent, None]:
        head, options = self._head("chat.completion.chunk"), self._request.stream_options
        short = lambda choice: choice["logprobs"] is None  # noqa: E731
        return choice_events(head, self.deltas(), self._params.n, options, self._usage_body, short)

    def _usage_body(self) -> dict[str, Any] | None:
        return None if self.usage is None else self.usage.body()

    async def deltas(self) -> AsyncGenerator[dict[str, Any], None]:
        """Deltas of the choices as they are generated."""
        service, engine = self._service, self._engine
        with service.admission.enter(self._params.n) as ticket:
            tokens, *predictions = await service.token_ids(self._prepared, engine)
            if self._request.reasoning_effort is not None and not reasoning_variables(self._request, engine):
                service.metrics.accepted_field("ChatRequest.reasoning_effort")
            begin = engine.output.begin(tokens)
            params = await service.compiled_params(engine, self._params, self._structured_output_after(begin))
            for prediction in predictions:
                params = msgspec.structs.replace(params, prediction=prediction)
                if not engine.facts.max_prediction:
                    service.metrics.accepted_field("ChatRequest.prediction")
            await service.check([tokens], params, engine, self._prepared.name)
            ticket.prompt([len(tokens)] * params.n)
            output, request = engine.output, self._request
            makes = (output.token_counter(begin, calls=may_call(request)) for _ in range(params.n))
            counters = [counter for counter in makes if counter is not None]
            usage = self.usage = UsageCounter([tokens], params.n, reasoning=counters, predicted=bool(predictions))
            either = self._structured_output is not None and self._structured_output.is_calls_or_answer
            parsers = [parser_of(output, request, begin, calls_or_answer=either) for _ in range(params.n)]
            writers = [MessageWriter(engine, request, i, parser) for i, parser in enumerate(parsers)]
            shown = None if parsers[0] is None else output.markers.shown
            running = generate(engine, [tokens], params, ticket, service.metrics, accepted=self._accepted, shown=shown)
            async with aclosing(running) as deltas:
                async for delta in deltas:
                    usage.add(delta)
                    if delta.prompt_logprobs is not None:
                        scores, text_of = delta.prompt_logprobs, engine.tokenizer.token_text
                        try:
                            self._prompt_logprobs = await off_loop(prompt_logprobs, scores, text_of, entries=len(scores))
                        finally:
                            discard(scores)
                    for choice in writers[delta.index].push(delta):
                        yield choice

    def _structured_output_after(self, begin: Begin) -> StructuredOutputField | None:
        """The structured output of the request, which begins after the reasoning."""
        field = self._structured_output
        if field is None:
            return None
        structured_output = after_reasoning(self._engine.output, field.structured_output, begin, calls=field.is_calls)
        return StructuredOutputField(structured_output, field.param)

    def _head(self, kind: str) -> dict[str, Any]:
        name = self._service.name_in_answers(self._request.model)
        return {"id": self._id, "object": kind, "created": self._created, "model": name}


def parser_of(output: OutputFormat, request: ChatRequest, begin: Begin, *, calls_or_answer: bool) -> OutputParser | None:
    """The parser of one completion of this request; None if all its text is content.

    calls_or_answer: as of `OutputFormat.parser`.
    """
    tools, choice = output.tools, request.tool_choice
    if not may_call(request) or tools is None:
        return output.parser(begin, {}, tools=None)
    if is_forced(choice):
        tools = forced_format(tools)
    names, schemas = callable_names(request), schemas_of(request.tools or ())
    functions = {name: schema for name, schema in schemas.items() if name in names}
    return output.parser(begin, functions, tools=tools, calls_or_answer=calls_or_answer)


class MessageWriter:
    """Turns the deltas of one completion into deltas of its message: role, reasoning, text, calls and finish reason."""

    def __init__(self, engine: ServingEngine, request: ChatRequest, index: int, parser: OutputParser | None) -> None:
        self._index, self._tokenizer = index, engine.tokenizer
        self._with_logprobs = bool(request.logprobs)
        self._with_reasoning = request.include_reasoning is not False
        self._one_call = request.parallel_tool_calls is False
        self._has_role = self._called = False
        self._arguments: list[str] = []  # of the last call
        self._parser = parser
        # Templates of Mistral take ids of nine letters and digits only.
        self._id_form = ("", 9) if engine.output.tools == "mistral" else ("call_", 24)
        markers = engine.output.markers
        self._clean = markers.decode if request.skip_special_tokens is False else markers.remove

    def push(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        """The next deltas of the choice."""
        if self._has_role and self._parser is None and not self._with_logprobs and delta.finish_reason is None:
            return [self._choice({"content": delta.text})] if delta.text else []
        deltas = self._message_deltas(delta)
        logprobs = None
        if self._with_logprobs and delta.token_ids:
            logprobs = chat_logprobs(delta.logprobs, self._tokenizer)
            deltas = deltas or [{"content": ""}]
        if not self._has_role:
            self._has_role = True
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        choices = [self._choice(message) for message in deltas]
        if logprobs is not None:
            choices[-1]["logprobs"] = logprobs
        if delta.finish_reason is not None:
            called = self._called and delta.finish_reason == "stop" and not self._is_cut_off(delta)
            reason = "tool_calls" if called else delta.finish_reason
            choices.append({**self._choice({}), "finish_reason": reason, "stop_reason": delta.stop_reason})
        return choices

    def _is_cut_off(self, delta: CompletionDelta) -> bool:
        """Whether a stop of the request ended the answer within its last call. An end token of the model ends its call."""
        return delta.stop_reason is not None and not ends_arguments("".join(self._arguments))

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _message_deltas(self, delta: CompletionDelta) -> list[dict[str, Any]]:
        if self._parser is None:
            events: list[Event] = [ContentText(delta.text)]
        else:
            events = self._parser.push(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.finish()
        return [message for event in events if (message := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        """The delta of an event; None if the client does not get it."""
        match event:
            case CallBegin(index, name, written):
                if self._one_call and index > 0:
                    return None
                self._called, self._arguments = True, []
                prefix, length = self._id_form
                call = {"index": index, "id": written or prefix + uuid.uuid4().hex[:length], "type": "function"}
                return {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}
            case CallArguments(index, text):
                if self._one_call and index > 0:
                    return None
                text = self._clean(text)
                self._arguments.append(text)
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ReasoningText(text):
                text = self._clean(text)
                return {"reasoning_content": text} if text and self._with_reasoning else None
            case ContentText(text):
                text = self._clean(text)
                return {"content": text} if text else None


class ChoiceAssembler:
    """Assembles a choice from its deltas, so that streamed and other responses are the same."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[Any] | None = None
        self._last: dict[str, Any] = {}

    def add(self, choice: dict[str, Any]) -> None:
        """Append a delta in the form in which it would be streamed."""
        delta = choice["delta"]
        if delta.get("content"):
            self._content.append(delta["content"])
        if delta.get("reasoning_content"):
            self._reasoning.append(delta["reasoning_content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += choice["logprobs"]["content"]
        self._last = choice

    def body(self) -> dict[str, Any]:
        """The choice in the body of the response."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._calls:
            message = {**message, "content": message["content"] or None, "tool_calls": self._calls}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        finish = {name: self._last.get(name) for name in ("finish_reason", "stop_reason")}
        return {"index": self._index, "message": message, "logprobs": logprobs, **finish}
