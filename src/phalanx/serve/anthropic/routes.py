# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.anthropic.conversation import MESSAGE_CHATS, TOKEN_COUNTS
from phalanx.serve.anthropic.output import BlockWriter, Event
from phalanx.serve.anthropic.schema import (
    CountTokensRequest,
    MessageEvent,
    MessageObject,
    MessagesErrorResponse,
    MessagesRequest,
    TokenCount,
)
from phalanx.serve.openai.body import RequestRoute
from phalanx.serve.openai.chat import ChatHandler
from phalanx.serve.openai.prepare import Prepared
from phalanx.serve.openai.respond import TypedEvents, answer, respond
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.service import Service, ServingEngine

router = APIRouter(route_class=RequestRoute)


@router.post(
    MESSAGE_CHATS.path,
    responses=responses_of(MessageObject, streams=MessageEvent, done=False, error=MessagesErrorResponse),
    openapi_extra=request_body(MessagesRequest),
)
async def create_message(http_request: Request) -> Response:
    """Answer a conversation, in the form of Anthropic's API."""
    return await respond(http_request, MESSAGE_CHATS, MessageHandler)


@router.post(
    TOKEN_COUNTS.path,
    responses=responses_of(TokenCount, error=MessagesErrorResponse),
    openapi_extra=request_body(CountTokensRequest),
)
async def count_tokens(http_request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    return await answer(http_request, TOKEN_COUNTS)


class MessageHandler(TypedEvents):
    """A message."""

    def __init__(self, service: Service, engine: ServingEngine, prepared: Prepared[ChatRequest]) -> None:
        self._chat = ChatHandler(service, engine, prepared)
        self.streams = self._chat.streams
        self.answer = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant",
            "model": service.name_in_answers(prepared.request.model), "content": [],
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    async def typed_events(self) -> AsyncGenerator[Event, None]:
        writer, began = BlockWriter(self.answer), False
        async with aclosing(self._chat.deltas()) as deltas:
            async for choice in deltas:
                for one in [*(() if began else writer.begin(self._usage())), *writer.push(choice)]:
                    yield one
                began = True
        for one in writer.end(self._usage()):
            yield one

    def _usage(self) -> dict[str, Any]:
        assert self._chat.usage is not None
        return self._chat.usage.body()
