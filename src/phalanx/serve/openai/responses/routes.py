# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`: create, retrieve, cancel, delete, and list the items of an input."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.serve.openai.api_errors import RESPONSES, ApiError, bad_request, clip
from phalanx.serve.openai.chat import ChatHandler
from phalanx.serve.openai.long_answers import encode_small, entries_of, off_loop
from phalanx.serve.openai.prepare import STORED_RESPONSES, PreparedResponse
from phalanx.serve.openai.respond import TypedEvents, respond
from phalanx.serve.openai.responses.output import Event, ResponseWriter
from phalanx.serve.openai.responses.store import ResponseStore, StoredResponse
from phalanx.serve.openai.responses.stored_items import previous_response
from phalanx.serve.openai.schema.openapi import query_parameter, request_body, responses_of
from phalanx.serve.openai.schema.responses_object import DeletedResponse, InputItemList, ResponseObject, ResponseStreamEvent
from phalanx.serve.openai.schema.responses_request import FunctionTool, ResponsesRequest
from phalanx.serve.openai.service import Service, ServingEngine, service_of
from phalanx.serve.openai.stream import JsonBody

router = APIRouter()

MAX_LISTED, DEFAULT_LISTED = 100, 20
_QUEUED_EVENTS = 8
"""Events that wait for a slow reader; then the generation waits."""


@router.post(
    RESPONSES,
    responses=responses_of(ResponseObject, streams=ResponseStreamEvent, done=False),
    openapi_extra=request_body(ResponsesRequest),
)
async def create_response(http_request: Request) -> Response:
    """Answer an input, and store the answer."""
    return await respond(http_request, STORED_RESPONSES, ResponseHandler)


@router.get("/v1/responses/{response_id}", responses=responses_of(ResponseObject, body=False, refuses=True))
async def retrieve_response(http_request: Request, response_id: str) -> Response:
    """A stored response, as it is now."""
    if http_request.query_params.get("stream") == "true":
        raise bad_request(
            "stream: a stored response is not streamed again; remove it", param="stream", code="unsupported_parameter"
        )
    return await _as_it_is(_stored(service_of(http_request).responses, response_id))


@router.delete("/v1/responses/{response_id}", responses=responses_of(DeletedResponse, body=False))
async def delete_response(http_request: Request, response_id: str) -> Response:
    """Remove a stored response; one in progress is stopped."""
    store = service_of(http_request).responses
    stored = _stored(store, response_id)
    if stored.cancel is not None:
        stored.cancel()
    store.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", responses=responses_of(ResponseObject, body=False, refuses=True))
async def cancel_response(http_request: Request, response_id: str) -> Response:
    """Stop a response in progress."""
    stored = _stored(service_of(http_request).responses, response_id)
    if stored.cancel is not None:
        stored.cancel()
        stored.response["status"] = "cancelled"
    if stored.status != "cancelled":
        raise bad_request(f"the response is {stored.status}; only one in progress can be cancelled", code="not_cancellable")
    return await _as_it_is(stored)


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=responses_of(InputItemList, body=False, refuses=True),
    openapi_extra={
        "parameters": [
            query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}),
            query_parameter("order", {"enum": ["asc", "desc"]}),
            query_parameter("after", {"type": "string"}),
        ]
    },
)
async def list_input_items(http_request: Request, response_id: str) -> Response:
    """The items of a stored response's conversation up to its output: latest first, or in order with `order=asc`."""
    query = http_request.query_params
    limit, order, after = query.get("limit", str(DEFAULT_LISTED)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MAX_LISTED):
        raise bad_request(f"limit must be a number from 1 to {MAX_LISTED}", param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        raise bad_request("order must be 'asc' or 'desc'", param="order", code="invalid_value")
    stored = _stored(service_of(http_request).responses, response_id)
    try:
        page = stored.input_page(int(limit) + 1, latest_first=order == "desc", after=after)
    except LookupError:
        raise bad_request(f"after: the response has no input item {clip(after or '')!r}", param="after", code="not_found") from None
    more, page = len(page) > int(limit), page[: int(limit)]
    ends = {"first_id": page[0][0] if page else None, "last_id": page[-1][0] if page else None}
    head = b'{"object":"list","data":['
    tail = b"]," + encode_small({**ends, "has_more": more})[1:]
    parts: list[bytes | memoryview] = [head, *(part for _, text in page for part in (b",", text))]
    del parts[1:2]
    return JsonBody([*parts, tail])  # together they may have hundreds of megabytes


async def _as_it_is(stored: StoredResponse) -> Response:
    """The body of a stored response."""
    content = stored.content
    return await JsonBody.of(dict(content)) if isinstance(content, dict) else JsonBody([content])


def _stored(store: ResponseStore, response_id: str) -> StoredResponse:
    stored = store.get(response_id)
    if stored is None:
        message = f"there is no stored response {clip(response_id)!r}: it was not stored, was deleted, or its time is over"
        raise ApiError(404, message, param="response_id", code="response_not_found")
    return stored


class ResponseHandler(TypedEvents):
    """A response."""

    def __init__(self, service: Service, engine: ServingEngine, prepared: PreparedResponse) -> None:
        store, request = service.responses, prepared.request
        previous = None if request.previous_response_id is None else previous_response(store, request.previous_response_id)
        self._service = service
        self._chat = ChatHandler(service, engine, prepared.chat)
        self.streams = bool(request.stream)
        stores = store.stores and request.store is not False
        self.answer = _head(service, request, store=stores)
        before = () if previous is None else previous.conversation
        self._stored = StoredResponse(self.answer, prepared.items, before) if stores else None
        self._writer = ResponseWriter(self.answer)
        self._cancelled = False

    async def typed_events(self) -> AsyncGenerator[Event, None]:
        """A task of its own makes them, so that a cancellation stops it, and not the HTTP response."""
        events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_QUEUED_EVENTS)
        task = asyncio.create_task(self._generate(events))
        if self._stored is not None:
            self._stored.cancel = lambda: self._cancel(task)
        try:
            while (one := await events.get()) is not None:
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if self._stored is not None:
                self._stored.cancel = None

    def _cancel(self, task: asyncio.Task[None]) -> None:
        self._cancelled = True
        task.cancel()

    async def _generate(self, events: asyncio.Queue[Event | BaseException | None]) -> None:
        began, reason = False, None
        try:
            async with aclosing(self._chat.deltas()) as deltas:
                async for choice in deltas:
                    if not began:
                        began = True
                        await self._keep()
                        for one in self._writer.begin():
                            await events.put(one)
                    for one in self._writer.push(choice):
                        await events.put(one)
                    reason = choice["finish_reason"] or reason
            if reason == "length":
                await self._end("incomplete", events, reason="max_output_tokens")
            else:
                await self._end("incomplete" if reason == "stop" and self._writer.in_call else "completed", events)
        except asyncio.CancelledError:
            if not self._cancelled:  # the client has gone
                for _ in self._writer.end("cancelled", self._usage(), now=time.time()):
                    pass
                await self._keep(again=True)
                raise
            await self._end("cancelled", events)
        except Exception as error:
            if not began or not self.streams:
                if self._stored is not None:
                    self._service.responses.delete(self.answer["id"])
                await events.put(error)
                return
            api_error = self._service.api_error(error)
            await self._end("failed", events, error={"code": "server_error", "message": api_error.message})
        await events.put(None)

    async def _end(self, status: str, events: asyncio.Queue[Event | BaseException | None], **more: Any) -> None:
        last = list(self._writer.end(status, self._usage(), now=time.time(), **more))
        await self._keep(again=True)  # first: whoever has the last event may go on after this response
        for one in last:
            await events.put(one)

    def _usage(self) -> dict[str, Any] | None:
        return None if self._chat.usage is None else self._chat.usage.body()

    async def _keep(self, *, again: bool = False) -> None:
        """Store the response as it is now. again: unless it was deleted since."""
        store, stored = self._service.responses, self._stored
        if stored is None or (again and store.get(stored.id) is None):
            return
        if stored.status != "in_progress":
            stored.cancel = None
            await off_loop(stored.complete, entries=entries_of(self.answer))
        if not again or store.get(stored.id) is not None:
            store.put(stored)


def _head(service: Service, request: ResponsesRequest, *, store: bool) -> dict[str, Any]:
    """The body of a response that has begun."""
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in request.tools or ()
        if isinstance(tool, FunctionTool)
    ]
    choice, defaults = request.tool_choice, service.require_engine().facts.sampling_defaults
    answer = request.text.format if request.text is not None else None
    return {
        "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "completed_at": None,
        "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
        "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
        "model": service.name_in_answers(request.model), "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "service_tier": "default", "store": store,
        "temperature": defaults.get("temperature", 1.0) if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"} if answer is None else answer.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools, "top_logprobs": request.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if request.top_p is None else request.top_p,
        "truncation": "disabled", "usage": None,
        "metadata": {name: value for name, value in (request.metadata or {}).items() if value is not None},
    }  # fmt: skip
