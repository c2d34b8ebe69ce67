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


class CompletionTokensDetails(ResponseModel):
    """Of the generated tokens. `reasoning_tokens`: of a model that thinks; `accepted_prediction_tokens`: those that speculative
    decoding proposed; `rejected_prediction_tokens`: what it proposed and the model did not generate, part of no
    other number."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class UsageInfo(ResponseModel):
    """Number of tokens of the request. `completion_tokens_details`: in chats with a model that thinks, and with drafts or a
    prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(ResponseModel):
    """A token at one position of the prompt. `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


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
    """The message of the model. `reasoning_content`: what it thought before it answered."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


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
    reasoning_content: str | None = None
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
    """The served model, or an adapter: `root` is its folder then, and `parent` the model. `max_model_len`: limit of prompt and
    output together, in tokens. `default_sampling_params`: defaults of requests, by the checkpoint."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    default_sampling_params: dict[str, float]


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


class ExpertLayer(ResponseModel):
    """A layer with experts. `tokens`, `recent_tokens`: pairs of a token and one of its experts, by expert; `rank_tokens`,
    `recent_rank_tokens`: by the ranks in `ranks`. `placement`: the expert of each physical expert; each of the ranks has the next
    ones, as many as any other."""

    layer: int
    ranks: list[int]
    placement: list[int]
    tokens: list[int]
    recent_tokens: list[int]
    rank_tokens: list[int]
    recent_rank_tokens: list[int]


class EngineExperts(ResponseModel):
    """The experts of one engine, of which each layer has `experts`. Recent: in the last `recent_seconds`. `layers_left`: layers
    whose experts a rebalance has still to move; `moved`: how many it has moved since the start, and the longest time that one
    step waited for that."""

    engine: int
    experts: int
    recent_seconds: float
    layers_left: int
    moved: int
    longest_move_seconds: float
    layers: list[ExpertLayer]


class ExpertsResponse(ResponseModel):
    """The load of experts; no engines for a model without experts."""

    object: Literal["experts"]
    engines: list[EngineExperts]


class ModelStateResponse(ResponseModel):
    """What ranks have of the model. `level`: of the sleep, 0 where the engine is awake. `weights`, `kv_cache`: whether they are on
    the devices. `weights_generation`: how often the weights were replaced. Of the last change: the bytes that it freed on all ranks
    (negative: took), and its seconds without the wait for requests. `kept_requests`: that go on after the wake-up."""

    is_sleeping: bool
    level: Literal[0, 1, 2]
    weights: bool
    kv_cache: bool
    weights_generation: int
    freed_bytes: int
    seconds: float
    kept_requests: int


class StatusResponse(ResponseModel):
    """The state of the server: "live" (for `/live`), else "starting", "ready", "stalled" (no step ends), "sleeping", "draining" or
    "failed", and the reason."""

    status: Literal["live", "starting", "ready", "stalled", "sleeping", "draining", "failed"]
    reason: str | None = None
