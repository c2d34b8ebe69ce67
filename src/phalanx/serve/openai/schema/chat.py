# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.fields import (
    Body,
    FirstError,
    OneOf,
    OnlyValue,
    SampledRequest,
    SchemaObject,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class TextPart(Body):
    """A part of the text of a message. Other types of parts (images, audio, files) are not supported: the models read text."""

    type: Annotated[Any, OnlyValue("text", why="the models read text only, no images, audio or files")]
    text: str


class RefusalPart(Body):
    """A refusal that the assistant wrote."""

    type: Literal["refusal"]
    refusal: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=1024), FirstError()]
AssistantPart = Annotated[RefusalPart | TextPart, OneOf()]
AssistantContent = str | Annotated[list[AssistantPart], Field(min_length=1, max_length=1024), FirstError()]


def _known_role(role: Any) -> Any:
    """A role that no kind of message has comes here, where the error would name those of plain messages only."""
    if role in ("system", "developer", "user"):
        return role
    raise PydanticCustomError("literal_error", "Input should be 'system', 'developer', 'user', 'assistant' or 'tool'")


class PlainMessage(Body):
    """A message of the operator (system, developer) or the user."""

    role: Annotated[Literal["system", "developer", "user"], BeforeValidator(_known_role)]
    content: Content
    name: str | None = None


class RequestFunctionCall(Body):
    """`arguments` is a JSON object as text. It may be empty, or cut off at the limit of tokens."""

    name: FunctionName
    arguments: str | None = None


class RequestToolCall(Body):
    """A call by the assistant."""

    id: str = Field(max_length=256)
    type: Literal["function"] | None = "function"
    function: RequestFunctionCall


class AssistantMessage(Body):
    """An earlier message of the model: a text, calls, or both."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = Field(None, max_length=MAX_TOOLS)
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(Body):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256)
    name: str | None = None


RequestMessage = Annotated[AssistantMessage | ToolMessage | PlainMessage, OneOf("role")]


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


class AllowedTools(Body):
    """The calls of `tool_choice: allowed_tools`. mode: whether the model must call one."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(Body):
    """`tool_choice` that restricts calls to some of the tools, all of which the prompt describes."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[Literal["none", "auto", "required"] | AllowedToolsChoice | NamedTool, OneOf()]


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


class Prediction(Body):
    """What the answer is expected to be, for the most part."""

    type: Literal["content"]
    content: Content


class ChatRequest(SampledRequest):
    """A conversation. `max_completion_tokens` and the older `max_tokens` mean the same; the default is the limit of the model."""

    messages: Annotated[list[RequestMessage], FirstError()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Extensions, with the names that other servers of this API use.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Additional variables of the chat template, for example enable_thinking."
    )
