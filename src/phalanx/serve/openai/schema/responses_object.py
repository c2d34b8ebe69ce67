# SPDX-License-Identifier: Apache-2.0
"""The bodies of `/v1/responses`' answers, for `/openapi.json`; the tests validate answers against them."""

from __future__ import annotations

from typing import Any, Literal

from phalanx.serve.openai.schema.responses import ResponseModel, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(ResponseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningTextPart(ResponseModel):
    """The text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseModel):
    """A message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextPart]


class OutputFunctionCall(ResponseModel):
    """A call by the model. `arguments` is JSON as text."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class OutputReasoning(ResponseModel):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningTextPart]
    status: ItemStatus


class ResponseFailure(ResponseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(ResponseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(ResponseModel):
    """Input tokens from the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(ResponseModel):
    """Output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Number of tokens of the response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ReasoningEcho(ResponseModel):
    """The reasoning settings of the request."""

    effort: str | None
    summary: None


class ResponseObject(ResponseModel):
    """A response. Fields of the request come back with the values that were used."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputFunctionCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningEcho
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str | None]


class ResponseStreamEvent(ResponseModel):
    """One event of a stream; `type` says which of OpenAI's events it is, and which other fields it has."""

    type: Literal[
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.content_part.done",
        "response.output_item.done", "response.completed", "response.incomplete", "response.failed",
    ]  # fmt: skip
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputMessage | OutputFunctionCall | OutputReasoning | None = None
    part: OutputTextPart | ReasoningTextPart | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[TokenLogprob] | None = None


class DeletedResponse(ResponseModel):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(ResponseModel):
    """Items of an input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
