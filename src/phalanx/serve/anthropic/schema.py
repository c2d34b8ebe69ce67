# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, and of their answers, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config.sampling_params import MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.chat import MAX_MESSAGES, MAX_TOOLS, FunctionName
from phalanx.serve.openai.schema.fields import MAX_STOPS, Body, FirstError, OneOf, OnlyValue, SchemaObject, StopText
from phalanx.serve.openai.schema.responses import ResponseModel

_BLOCKS = "the models read text only; blocks are text, thinking, tool_use and tool_result"
_TOOLS = "tools of Anthropic's servers are not built; tools with an input_schema are"


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Thinking that another server has encrypted."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """An earlier call by the model."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: FunctionName
    input: SchemaObject


class OtherBlock(Body):
    """A block that is not text."""

    type: Annotated[Any, OnlyValue(why=_BLOCKS)]


TextOnly = Annotated[TextBlock | OtherBlock, OneOf()]
Texts = str | Annotated[list[TextOnly], Field(max_length=1024), FirstError()]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: Texts | None = None


Block = Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock, OneOf()]


class TurnMessage(Body):
    """A message. Consecutive ones of a role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=1024), FirstError()]


class CustomTool(Body):
    """A tool that the client runs. strict: enforce the schema."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: SchemaObject
    strict: bool | None = None


class ServerTool(Body):
    """A tool of Anthropic's servers."""

    type: Annotated[Any, OnlyValue(why=_TOOLS)]


AnyTool = Annotated[CustomTool | ServerTool, OneOf()]


class MessagesToolChoice(Body):
    """Whether the model may, must or may not call tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether the model thinks, where its chat template leaves a choice."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class MessagesFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: SchemaObject = Field(alias="schema")


class OutputConfig(Body):
    """How the model answers."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessagesFormat | None = None


class CountTokensRequest(Body):
    """A conversation, whose prompt is counted."""

    model: str = Field(min_length=1, max_length=512)
    messages: Annotated[list[TurnMessage], FirstError()] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation, which the model answers."""

    max_tokens: int = Field(ge=1, le=MAX_TOKEN_COUNT)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_TOKEN_COUNT)
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS), FirstError()] | None = None


# ---- answers -------------------------------------------------------------------------------------------------------------


class TextOutput(ResponseModel):
    """A text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingOutput(ResponseModel):
    """What the model thought. The signature is an id without a promise."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOutput(ResponseModel):
    """A call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(ResponseModel):
    """Tokens. Those of the prompt are `input_tokens`, and `cache_read_input_tokens`, which were cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(ResponseModel):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOutput | ThinkingOutput | ToolUseOutput]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(ResponseModel):
    """An event of a stream, by its type."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
    ]
    message: MessageObject | None = None
    index: int | None = None
    content_block: TextOutput | ThinkingOutput | ToolUseOutput | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None


class TokenCount(ResponseModel):
    """Tokens of the prompt."""

    input_tokens: int


class MessagesErrorDetail(ResponseModel):
    """The error, in Anthropic's form, with the field and the code of this server's other errors."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessagesErrorResponse(ResponseModel):
    """The body of a response with a status of 400 or more."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None
