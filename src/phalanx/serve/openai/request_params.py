# SPDX-License-Identifier: Apache-2.0
"""From a checked request to `SamplingParams`, with its guide: the last place where a request can be refused for what it asks."""

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
"""`max_tokens` of /v1/completions when it is left out (OpenAI's default)."""


@dataclass(frozen=True)
class StructuredOutputField:
    """A guide that is yet to be compiled, and the field that asked for it."""

    structured_output: StructuredOutputParams
    param: str


def completion_params(request: CompletionRequest, facts: EngineFacts) -> SamplingParams:
    """Raises ApiError 400 naming the field."""
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise bad_request(
            f"best_of={request.best_of} cannot be honoured: completions are not ranked; leave it out, or set it to n={n}",
            param="best_of", code="unsupported_parameter",
        )  # fmt: skip
    limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(
        request,
        facts,
        max_tokens=max(1, limit),  # a score of the prompt alone costs one token, which is then left out
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def chat_params(request: ChatRequest, facts: EngineFacts) -> SamplingParams:
    """Raises ApiError 400 naming the field."""
    limit, older = request.max_completion_tokens, request.max_tokens
    if limit is not None and older is not None and limit != older:
        raise bad_request(
            f"max_completion_tokens={limit} and max_tokens={older} contradict each other; give one", param="max_tokens"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    wanted = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, facts, max_tokens=limit if limit is not None else older, logprobs=wanted)


def _params(request: SampledRequest, facts: EngineFacts, *, max_tokens: int | None, **more: Any) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    for param, tokens in (("logit_bias", bias), ("stop_token_ids", request.stop_token_ids or [])):
        for token in tokens:
            check_token(token, facts, param)
    plain: Mapping[str, Any] = {
        name: value
        for name in (
            "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
            "stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens",
        )
        if (value := getattr(request, name)) is not None
    }  # fmt: skip
    try:
        return SamplingParams(**plain, max_tokens=max_tokens, logit_bias=bias or None, **more)
    except OptionError as error:
        name = str(error).partition("=")[0].partition("[")[0]
        raise bad_request(str(error), param=name if name in type(request).model_fields else None, code="invalid_value") from None


def check_token(token: int, facts: EngineFacts, param: str) -> None:
    """Raise ApiError 400 for a token id that the model does not have."""
    if token >= facts.vocab_size:
        raise bad_request(
            f"{param}: token id {token} is none of this model's, which are 0 to {facts.vocab_size - 1}",
            param=param, code="invalid_token_id",
        )  # fmt: skip


def structured_output_of(request: SampledRequest, how: ToolFormat | None) -> StructuredOutputField | None:
    """The one guide that the request's fields ask for, if any. Raises ApiError 400 for two that contradict each other."""
    found = [*_from_guided_fields(request)]
    if isinstance(request, ChatRequest):
        found += [
            structured_output
            for structured_output in (_from_response_format(request), _from_tools(request, how))
            if structured_output is not None
        ]
    if len(found) > 1:
        both = " and ".join(one.param for one in found)
        raise bad_request(f"{both} contradict each other: an answer follows one of them", param=found[1].param)
    return found[0] if found else None


def with_structured_output(params: SamplingParams, compiled: StructuredOutputParams) -> SamplingParams:
    return msgspec.structs.replace(params, structured_output=compiled)


def _from_guided_fields(request: SampledRequest) -> list[StructuredOutputField]:
    found = []
    if request.guided_json is not None:
        schema = request.guided_json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found.append(StructuredOutputField(StructuredOutputParams(json_schema=text), "guided_json"))
    if request.guided_regex is not None:
        check_grammar(request.guided_regex, "guided_regex")
        found.append(StructuredOutputField(StructuredOutputParams(regex=request.guided_regex), "guided_regex"))
    if request.guided_grammar is not None:
        check_grammar(request.guided_grammar, "guided_grammar")
        found.append(StructuredOutputField(StructuredOutputParams(grammar=request.guided_grammar), "guided_grammar"))
    return found


def _from_response_format(request: ChatRequest) -> StructuredOutputField | None:
    how = request.response_format
    if isinstance(how, JsonSchemaFormat) and how.json_schema.schema_ is not None:
        return StructuredOutputField(StructuredOutputParams(json_schema=json.dumps(how.json_schema.schema_)), "response_format")
    if isinstance(how, (JsonObjectFormat, JsonSchemaFormat)):
        return StructuredOutputField(StructuredOutputParams(json_object=True), "response_format")
    return None


def _from_tools(request: ChatRequest, how: ToolFormat | None) -> StructuredOutputField | None:
    """Forced calls, calls of a strict function, and the one call of a request that wants no more, are held to their form."""
    tools, choice = request.tools or [], request.tool_choice
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in tools}:
        raise bad_request(f"tool_choice names {choice.function.name!r}, which is none of the tools", param="tool_choice")
    if choice == "required" and not tools:
        raise bad_request("tool_choice 'required' needs tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    if how is None:
        raise bad_request(
            "tools cannot be honoured: this model's chat template teaches neither the Llama 3 JSON nor the Hermes (Qwen) format",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    if choice == "required" or isinstance(choice, NamedTool):
        return StructuredOutputField(
            StructuredOutputParams(structural_tag=forced_call_tag(how, tools, choice, parallel=parallel)), "tools"
        )
    if not parallel or any(tool.function.strict for tool in tools):
        return StructuredOutputField(StructuredOutputParams(structural_tag=strict_call_tag(how, tools, parallel=parallel)), "tools")
    return None
