# SPDX-License-Identifier: Apache-2.0
"""The bodies of answers, as `/openapi.json` shows them. Answers are written by hand (they are on the path of every token); the
tests hold what is written to these models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Every answer: no field that is not named here."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """What went wrong. `param` names the field, `code` the case, for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


class CachedTokens(Answer):
    """How many of the prompt's tokens the prefix cache held."""

    cached_tokens: int


class Usage(Answer):
    """Tokens that the request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Answer):
    """One entry per token. `text_offset` counts characters from the beginning of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One completion of one prompt; the choices of prompt p are p * n .. p * n + n - 1. `stop_reason` is the stop string or id."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    """An alternative at one position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was chosen, with its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per token of the answer."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class CalledFunctionAnswer(Answer):
    """`arguments` is JSON as text."""

    name: str
    arguments: str


class CalledToolAnswer(Answer):
    """One call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[CalledToolAnswer] | None = None


class ChatChoice(Answer):
    """One of n answers. `stop_reason` is the stop string or id."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    """`name` comes once, `arguments` in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolDelta(Answer):
    """A piece of the call number `index`; its first piece has the id and the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Answer):
    """A piece of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChatChunkChoice(Answer):
    """A piece of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None


class ChatChunk(Answer):
    """A chunk of a chat stream. With `include_usage`, the last chunk has no choices and the usage of the whole request."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    """The model that is served. `max_model_len`: prompt and output, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer):
    """`tokens` are ids, `token_strs` what each of them reads."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str]


class DetokenizeAnswer(Answer):
    """The text of the tokens."""

    prompt: str


class VersionAnswer(Answer):
    """The version of Phalanx."""

    version: str


class StatusAnswer(Answer):
    """How the server is: "live" (for `/live`), else "starting", "ready", "draining" or "failed", and why."""

    status: Literal["live", "starting", "ready", "draining", "failed"]
    reason: str | None = None
