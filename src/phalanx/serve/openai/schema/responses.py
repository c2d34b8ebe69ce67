# SPDX-License-Identifier: Apache-2.0
"""The bodies of responses, for `/openapi.json`. The handlers build responses without these models, because they are on the path of
every token; the tests validate responses against them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """Base of all responses: no field that is not defined here."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseModel):
    """The error. `param` names the field, `code` the type of error, for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class CachedTokens(ResponseModel):
    """Number of prompt tokens from the prefix cache."""

    cached_tokens: int


class UsageInfo(ResponseModel):
    """Number of tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(ResponseModel):
    """One entry per token. `text_offset` counts characters from the beginning of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One completion of one prompt; the choices of prompt p are p * n .. p * n + n - 1. `stop_reason` is the stop string or id."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None


class CompletionResponse(ResponseModel):
    """The response of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class TopLogprob(ResponseModel):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A sampled token, with its most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """One entry per token of the answer."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class ResponseFunctionCall(ResponseModel):
    """`arguments` is JSON as text."""

    name: str
    arguments: str


class ResponseToolCall(ResponseModel):
    """A call by the model."""

    id: str
    type: Literal["function"]
    function: ResponseFunctionCall


class ChatMessage(ResponseModel):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ResponseToolCall] | None = None


class ChatChoice(ResponseModel):
    """One of n answers. `stop_reason` is the stop string or id."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class ChatCompletionResponse(ResponseModel):
    """The response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class FunctionDelta(ResponseModel):
    """`name` comes once, `arguments` in parts."""

    name: str | None = None
    arguments: str | None = None


class ToolDelta(ResponseModel):
    """A part of the call number `index`; its first part has the id and the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseModel):
    """A part of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """A part of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(ResponseModel):
    """A chunk of a chat stream. With `include_usage`, the last chunk has no choices and the usage of the whole request."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None


class ModelCard(ResponseModel):
    """The served model. `max_model_len`: limit of prompt and output together, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    """The response of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(ResponseModel):
    """`tokens` are ids, `token_strs` their texts."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]


class DetokenizeResponse(ResponseModel):
    """The text of the tokens."""

    prompt: str


class VersionResponse(ResponseModel):
    """The version of Phalanx."""

    version: str


class StatusResponse(ResponseModel):
    """The state of the server: "live" (for `/live`), else "starting", "ready", "draining" or "failed", and the reason."""

    status: Literal["live", "starting", "ready", "draining", "failed"]
    reason: str | None = None
