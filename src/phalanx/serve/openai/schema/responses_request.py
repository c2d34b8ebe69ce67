# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/responses`, and the items of its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.chat import MAX_MESSAGES, MAX_TOOLS, FunctionName
from phalanx.serve.openai.schema.fields import (
    MAX_CACHE_SALT,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOPS,
    Bias,
    Body,
    FirstError,
    MetadataKey,
    MetadataValue,
    OneOf,
    OnlyValue,
    SchemaObject,
    StopText,
    TokenId,
    TokenIdText,
    value_of,
)

Id = Annotated[str, Field(min_length=1, max_length=256)]
_TEXT_ONLY = "the models read text only, no images, audio or files"
_ITEMS = "an input has messages, function calls and their outputs, reasoning, and references to items"
_TOOLS = "built-in tools are not built; functions are"


class InputText(Body):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputRefusal(Body):
    """A refusal that the assistant wrote."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(Body):
    """A part that is not text."""

    type: Annotated[Any, OnlyValue(why=_TEXT_ONLY)]


InputPart = Annotated[InputText | InputRefusal | OtherPart, OneOf()]
InputContent = str | Annotated[list[InputPart], Field(max_length=1024), FirstError()]


class InputMessage(Body):
    """A message of any role, also an earlier output."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class FunctionCallItem(Body):
    """An earlier call by the model."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    arguments: str | None = None


class FunctionCallOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Id
    output: InputContent


class ReasoningText(Body):
    """A part of a reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """The reasoning before an answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=1024), FirstError()] | None = None


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: Id


class OtherItem(Body):
    """An item of a tool that is not built."""

    type: Annotated[Any, OnlyValue(why=_ITEMS)]


def _type_of_item(item: Any) -> Any:
    """A reference needs no type."""
    if value_of(item, "id") is not None and value_of(item, "role") is None:
        return value_of(item, "type") or "item_reference"
    return value_of(item, "type")


InputItem = Annotated[
    InputMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference | OtherItem, OneOf(kind=_type_of_item)
]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: SchemaObject | None = None
    strict: bool | None = None


class OtherTool(Body):
    """A built-in tool."""

    type: Annotated[Any, OnlyValue(why=_TOOLS)]


ResponsesTool = Annotated[FunctionTool | OtherTool, OneOf()]


class ChosenFunction(Body):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(Body):
    """`tool_choice` that restricts calls to some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1, max_length=MAX_TOOLS)


class OtherChoice(Body):
    """`tool_choice` of a built-in tool."""

    type: Annotated[Any, OnlyValue(why=_TOOLS)]


ResponsesToolChoice = Annotated[Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | OtherChoice, OneOf()]


class OutputText(Body):
    """Free text."""

    type: Literal["text"]


class OutputJsonObject(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class OutputJsonSchema(Body):
    """JSON that follows a schema, which is always enforced."""

    type: Literal["json_schema"]
    name: FunctionName
    description: str | None = None
    schema_: SchemaObject = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """`text`: the format of the answer."""

    format: Annotated[OutputText | OutputJsonObject | OutputJsonSchema, Field(discriminator="type")] | None = None


class ReasoningConfig(Body):
    """`reasoning`: how long the model thinks."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesStreamOptions(Body):
    """`stream_options`."""


Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]  # fmt: skip


class ResponsesRequest(Body):
    """An input to answer, alone or after the response that `previous_response_id` names."""

    model: str = Field(min_length=1, max_length=512)
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), FirstError()]
    instructions: str | None = None
    previous_response_id: Id | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] | None = Field(None, max_length=16)
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[ResponsesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[MetadataKey, MetadataValue | None] | None = Field(None, max_length=16)
    # Extensions, with the names that they have in /v1/chat/completions.
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_COUNT)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS), FirstError()] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_COUNT)
    ignore_eos: bool | None = None
    logit_bias: dict[TokenIdText, Bias | None] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}
    )
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT)


SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "cache_salt", "chat_template_kwargs", "parallel_tool_calls",
    "stream",
)  # fmt: skip
"""Fields that mean the same in a chat."""
