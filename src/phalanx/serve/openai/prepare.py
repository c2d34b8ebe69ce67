# SPDX-License-Identifier: Apache-2.0
"""What a validated request says: its sampling parameters and structured output, and, of a large body, its token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.config.sampling_params import SamplingParams
from phalanx.serve.openai.prompt_context import PromptContext
from phalanx.serve.openai.prompts import prompts_of
from phalanx.serve.openai.request_params import StructuredOutputField, chat_params, completion_params, structured_output_of
from phalanx.serve.openai.responses.conversation import Items, chat_request, input_items
from phalanx.serve.openai.responses.store import EncodedItems, Item
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.responses_request import ResponsesRequest


@dataclass(frozen=True)
class PreparedCompletion:
    """prompts: as they were sent: texts, or token ids. token_ids: those of each prompt; None: they are not encoded yet.

    The request of a large body has no prompt, and nothing that `structured_output` says.
    """

    request: CompletionRequest
    params: SamplingParams
    structured_output: StructuredOutputField | None
    prompts: Sequence[str] | Sequence[list[int]]
    token_ids: list[list[int]] | None = None


@dataclass(frozen=True)
class PreparedChat:
    """token_ids: those of the prompt; None: it is not encoded yet. The request of a large body has no messages."""

    request: ChatRequest
    params: SamplingParams
    structured_output: StructuredOutputField | None
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class PreparedResponse:
    """items: those of the input. The request of a large body has no input."""

    request: ResponsesRequest
    items: Sequence[Item] | EncodedItems
    chat: PreparedChat


def prepare_completion(request: CompletionRequest, context: PromptContext) -> PreparedCompletion:
    """Raises ApiError 400 naming the field."""
    prompts = prompts_of(request)
    params = completion_params(request, context.facts)
    return PreparedCompletion(request, params, structured_output_of(request, context.output), prompts)


def prepare_chat(request: ChatRequest, context: PromptContext) -> PreparedChat:
    """Raises ApiError 400 naming the field."""
    params = chat_params(request, context.facts)
    return PreparedChat(request, params, structured_output_of(request, context.output))


def prepare_response(request: ResponsesRequest, context: PromptContext, stored: Items) -> PreparedResponse:
    """stored: the items of earlier responses. Raises ApiError 400 naming the field."""
    previous: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        previous = stored.conversation(request.previous_response_id)
    items = input_items(request, stored)
    return PreparedResponse(request, items, prepare_chat(chat_request(request, [*previous, *items]), context))
