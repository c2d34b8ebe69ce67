# SPDX-License-Identifier: Apache-2.0
"""What all endpoints with a body share: read and prepare it (`Endpoint`), then answer, whole or as a stream (`Handler`).

`respond` is the whole way of a request; errors have the names and the form of its API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from phalanx.serve.openai.body import read_request
from phalanx.serve.openai.long_answers import PART, JsonParts, discard, encode_parts, encode_small, entries_of, off_loop
from phalanx.serve.openai.prepare import Answer, Endpoint, Request, Result
from phalanx.serve.openai.responses.stored_items import StoredItems
from phalanx.serve.openai.schema.responses_request import ResponsesRequest
from phalanx.serve.openai.service import Service, ServingEngine, service_of
from phalanx.serve.openai.stream import CancellableResponse, Event, EventStream


class Handler:
    """One request: validated, not yet accepted by admission control."""

    streams = False

    async def body(self) -> Any:
        """The body of the answer. Raises the error that ends it."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[Event, None]:
        """The answer as server-sent events. Raises the error that ends it."""
        raise NotImplementedError


class TypedEvents(Handler):
    """An answer that the events of its stream complete; each has a type. answer: its body."""

    answer: dict[str, Any]

    def typed_events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events as they come. They belong to the answer's body, too."""
        raise NotImplementedError

    async def body(self) -> dict[str, Any]:
        async with aclosing(self.typed_events()) as events:
            async for _ in events:
                pass
        return self.answer

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(self.typed_events()) as events:
                async for one in events:
                    entries, head = entries_of(one), b"event: %b\ndata: " % one["type"].encode()
                    if entries <= PART:
                        yield b"%b%b\n\n" % (head, encode_small(one))
                    else:
                        yield [head, *(await off_loop(encode_parts, one, entries=entries)), b"\n\n"]
        finally:
            discard(self.answer)


async def respond(
    http_request: HttpRequest, endpoint: Endpoint[Request, Result], handler: Callable[[Service, ServingEngine, Result], Handler]
) -> Response:
    """The answer of an endpoint that generates. Raises ApiError for a body that it refuses, Overloaded where the queue is full."""
    service = service_of(http_request)
    service.admission.require_capacity_for_one()
    prepared = await _read(http_request, endpoint, service)
    answering = handler(service, service.require_engine(), prepared)
    errors = service.api_error_at(endpoint.path)
    return EventStream(answering.events(), errors) if answering.streams else CancellableResponse(answering.body(), errors)


async def answer(http_request: HttpRequest, endpoint: Endpoint[Request, Answer]) -> Response:
    """The answer of an endpoint that does not generate. Raises ApiError for a body that it refuses."""
    service = service_of(http_request)
    prepared = await _read(http_request, endpoint, service)

    async def content() -> JsonParts:
        return JsonParts([await service.run_on_thread(prepared.content)])

    return CancellableResponse(content(), service.api_error_at(endpoint.path))


async def _read(http_request: HttpRequest, endpoint: Endpoint[Request, Result], service: Service) -> Result:
    stored = StoredItems(service.responses)
    return await read_request(
        http_request,
        endpoint.request,
        lambda request: endpoint.prepare(request, service.require_engine(getattr(request, "model", None)), stored),
        lambda body: service.large_bodies.read(endpoint, body, stored.find),
        refers_to_much=lambda request: isinstance(request, ResponsesRequest) and stored.are_large(request),
    )
