# SPDX-License-Identifier: Apache-2.0
"""Turn a validated request into `SamplingParams` and its structured output; the last checks of what a request may contain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import EngineFacts
from phalanx.errors import OptionError
from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.body import check_grammar
from phalanx.serve.openai.schema.chat import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedTool
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.fields import SampledRequest
from phalanx.serve.openai.tools.formats import ToolFormat, forced_call_tag, strict_call_tag

COMPLETION_TOKENS = 16
"""Default `max_tokens` of /v1/completions (OpenAI's)."""


@dataclass(frozen=True)
class StructuredOutputField:
    """The structured output of a request, not yet compiled. param: the request field that it comes from."""

    structured_output: StructuredOutputParams
    param: str


def completion_params(request: CompletionRequest, facts: EngineFacts) -> SamplingParams:
    """The parameters of a completion. Raises ApiError 400 naming the field."""
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise bad_request(
            f"best_of={request.best_of} is not supported: completions are not ranked; remove it, or set it to n={n}",
            param="best_of", code="unsupported_parameter",
        )  # fmt: skip
    limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(
        request,
        facts,
        max_tokens=max(1, limit),  # scoring only the prompt still generates one token, which is not returned
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def chat_params(request: ChatRequest, facts: EngineFacts) -> SamplingParams:
    """The parameters of a chat. Raises ApiError 400 naming the field."""
    limit, older = request.max_completion_tokens, request.max_tokens
    if limit is not None and older is not None and limit != older:
        raise bad_request(
            f"max_completion_tokens={limit} and max_tokens={older} contradict each other; give one", param="max_tokens"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, facts, max_tokens=limit if limit is not None else older, logprobs=logprobs)


def _params(request: SampledRequest, facts: EngineFacts, *, max_tokens: int | None, **more: Any) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    for param, tokens in (("logit_bias", bias), ("stop_token_ids", request.stop_token_ids or [])):
        for token in tokens:
            check_token(token, facts, param)
    direct: Mapping[str, Any] = {
        name: value
        for name in (
            "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
            "stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens",
        )
        if (value := getattr(request, name)) is not None
    }  # fmt: skip
    try:
        return SamplingParams(**direct, max_tokens=max_tokens, logit_bias=bias or None, **more)
    except OptionError as error:
        name = str(error).partition("=")[0].partition("[")[0]
        raise bad_request(str(error), param=name if name in type(request).model_fields else None, code="invalid_value") from None


def check_token(token: int, facts: EngineFacts, param: str) -> None:
    """Raise ApiError 400 for a token id outside of the vocabulary."""
    if token >= facts.vocab_size:
        raise bad_request(
            f"{param}: token id {token} is outside of this model's vocabulary, 0 to {facts.vocab_size - 1}",
            param=param, code="invalid_token_id",
        )  # fmt: skip


def structured_output_of(request: SampledRequest, tool_format: ToolFormat | None) -> StructuredOutputField | None:
    """The structured output of a request, or None. Raises ApiError 400 if two of its fields demand one."""
    fields = [*_from_guided_fields(request)]
    if isinstance(request, ChatRequest):
        fields += [field for field in (_from_response_format(request), _from_tools(request, tool_format)) if field is not None]
    if len(fields) > 1:
        names = " and ".join(field.param for field in fields)
        raise bad_request(f"{names} exclude each other: an answer can follow only one of them", param=fields[1].param)
    return fields[0] if fields else None


def with_structured_output(params: SamplingParams, compiled: StructuredOutputParams) -> SamplingParams:
    return msgspec.structs.replace(params, structured_output=compiled)


def _from_guided_fields(request: SampledRequest) -> list[StructuredOutputField]:
    fields = []
    if request.guided_json is not None:
        schema = request.guided_json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        fields.append(StructuredOutputField(StructuredOutputParams(json_schema=text), "guided_json"))
    if request.guided_regex is not None:
        check_grammar(request.guided_regex, "guided_regex")
        fields.append(StructuredOutputField(StructuredOutputParams(regex=request.guided_regex), "guided_regex"))
    if request.guided_grammar is not None:
        check_grammar(request.guided_grammar, "guided_grammar")
        fields.append(StructuredOutputField(StructuredOutputParams(grammar=request.guided_grammar), "guided_grammar"))
    return fields


def _from_response_format(request: ChatRequest) -> StructuredOutputField | None:
    format_ = request.response_format
    if isinstance(format_, JsonSchemaFormat) and format_.json_schema.schema_ is not None:
        return StructuredOutputField(StructuredOutputParams(json_schema=json.dumps(format_.json_schema.schema_)), "response_format")
    if isinstance(format_, (JsonObjectFormat, JsonSchemaFormat)):
        return StructuredOutputField(StructuredOutputParams(json_object=True), "response_format")
    return None


def _from_tools(request: ChatRequest, tool_format: ToolFormat | None) -> StructuredOutputField | None:
    """The structured output of forced calls, of strict functions, and of requests without parallel calls."""
    tools, choice = request.tools or [], request.tool_choice
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise bad_request(f"tool_choice names {choice.function.name!r}, which is not one of the tools", param="tool_choice")
    if choice == "required" and not tools:
        raise bad_request("tool_choice 'required' needs tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    if tool_format is None:
        raise bad_request(
            "tools are not supported: this model's chat template describes neither the Llama 3 JSON nor the Hermes (Qwen) format",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    if choice == "required" or isinstance(choice, NamedTool):
        return StructuredOutputField(
            StructuredOutputParams(structural_tag=forced_call_tag(tool_format, tools, choice, parallel=parallel)), "tools"
        )
    if not parallel or any(tool.function.strict for tool in tools):
        return StructuredOutputField(
            StructuredOutputParams(structural_tag=strict_call_tag(tool_format, tools, parallel=parallel)), "tools"
        )
    return None
