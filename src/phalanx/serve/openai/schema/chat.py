# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.fields import (
    Body,
    FirstError,
    MetadataKey,
    MetadataValue,
    Neutral,
    SampledRequest,
    SchemaObject,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(Body):
    """A part of the text of a message. Other types of parts (images, audio, files) are not supported: the models read text."""

    type: Annotated[Any, Neutral("text", required=True, why="the models read text only, no images, audio or files")]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=1024), FirstError()]


class PlainMessage(Body):
    """A message of the operator (system, developer) or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class RequestFunctionCall(Body):
    """`arguments` is a JSON object as text."""

    name: FunctionName
    arguments: str


class RequestToolCall(Body):
    """A call by the assistant."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: RequestFunctionCall


class AssistantMessage(Body):
    """An earlier message of the model: a text, calls, or both."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = Field(None, max_length=MAX_TOOLS)
    refusal: Annotated[Any, Neutral(why="the models write refusals as text")] = None
    audio: Annotated[Any, Neutral(why="the models read text only")] = None
    function_call: Annotated[Any, Neutral(why="it is replaced by tool_calls")] = None
    annotations: Annotated[Any, Neutral([], why="the models read text only")] = None


class ToolMessage(Body):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256)


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return role if role in ("assistant", "tool") else "plain"


RequestMessage = Annotated[
    Annotated[PlainMessage, Tag("plain")] | Annotated[AssistantMessage, Tag("assistant")] | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_role),
]


class Function(Body):
    """A function that the model may call. `parameters`: the JSON schema of its arguments. `strict`: enforce the schema."""

    name: FunctionName
    description: str | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool. Functions are the only type."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of one of `tools`."""

    name: FunctionName


class NamedTool(Body):
    """`tool_choice` that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """`json_schema` of a response format; it is always enforced, `strict` or not."""

    name: FunctionName
    description: str | None = None
    schema_: SchemaObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SampledRequest):
    """A conversation. `max_completion_tokens` and the older `max_tokens` mean the same; the default is the limit of the model."""

    messages: Annotated[list[RequestMessage], FirstError()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    store: Annotated[Any, Neutral(False, why="answers are not stored")] = None
    service_tier: Annotated[Any, Neutral("auto", "default", why="the only tier is 'default'")] = None
    modalities: Annotated[Any, Neutral(["text"], why="the models write text only")] = None
    audio: Annotated[Any, Neutral(why="the models write text only")] = None
    prediction: Annotated[Any, Neutral(why="predicted outputs are not implemented")] = None
    reasoning_effort: Annotated[Any, Neutral("none", why="the length of reasoning cannot be set")] = None
    verbosity: Annotated[Any, Neutral("medium", why="the length of answers cannot be set")] = None
    web_search_options: Annotated[Any, Neutral(why="there is no web search")] = None
    prompt_cache_retention: Annotated[Any, Neutral("in_memory", "in-memory", why="the prefix cache is in memory")] = None
    prompt_cache_options: Annotated[Any, Neutral(why="the prefix cache has no options")] = None
    moderation: Annotated[Any, Neutral(why="there is no moderation")] = None
    functions: Annotated[Any, Neutral([], why="it is replaced by tools")] = None
    function_call: Annotated[Any, Neutral("none", why="it is replaced by tool_choice")] = None
    # Extensions, with the names that other servers of this API use.
    add_generation_prompt: Annotated[Any, Neutral(True, why="an answer is always a new message")] = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Additional variables of the chat template, for example enable_thinking."
    )
