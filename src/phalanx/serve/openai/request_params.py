# SPDX-License-Identifier: Apache-2.0
"""Turn a validated request into `SamplingParams` and its structured output; the last checks of what a request may contain."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from phalanx.config.generation import with_defaults
from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import EngineFacts
from phalanx.errors import OptionError
from phalanx.serve.openai.api_errors import ApiError, bad_request
from phalanx.serve.openai.schema.chat import (
    AllowedToolsChoice,
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    Tool,
    ToolChoice,
)
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.fields import SampledRequest, StructuredOutputs
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.output_parsing.formats import CALLS, forced_format
from phalanx.serve.output_parsing.structural_tags import calls_or_answer, forced_calls, structural_tag, valid_calls

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without `parameters`, which has an empty parameter list, as OpenAI says."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of a function whose `parameters` are the empty schema, which allows anything. Arguments are always an object."""
COMPLETION_TOKENS = 16
"""Default `max_tokens` of /v1/completions (OpenAI's), where the checkpoint states none."""
_ANSWER_OR_TOOLS = "response_format and tools"
_NO_STRUCTURED_OUTPUTS = StructuredOutputs()
_ADAPTERS_SHOWN = 16
"""By an error."""


@dataclass(frozen=True)
class StructuredOutputField:
    """The structured output of a request, not yet compiled. param: the request field that it comes from, or both of them."""

    structured_output: StructuredOutputParams
    param: str

    @property
    def is_calls(self) -> bool:
        """Whether it describes calls, as `structural_tags` does, perhaps beside an answer."""
        return self.param in ("tools", _ANSWER_OR_TOOLS)

    @property
    def is_calls_or_answer(self) -> bool:
        return self.param == _ANSWER_OR_TOOLS


def require_model(model: str | None, names: Collection[str]) -> None:
    """Raise ApiError 404 for a model that is not served. names: of `Service.names`; the model's first one and those of adapters are
    shown."""
    if model is not None and model not in names:
        own, known = next(iter(names)), set(names)
        adapters = [name for name in names if f"{own}:{name}" in known]
        shown = ", ".join(map(repr, [own, *adapters[:_ADAPTERS_SHOWN]]))
        more = f" and {len(adapters) - _ADAPTERS_SHOWN} more" if len(adapters) > _ADAPTERS_SHOWN else ""
        message = f"the model {model[:200]!r} is not served here; {shown}{more} {'are' if adapters else 'is'}"
        raise ApiError(404, message, param="model", code="model_not_found")


def completion_params(request: CompletionRequest, facts: EngineFacts) -> SamplingParams:
    """The parameters of a completion. Raises ApiError 400 naming the field."""
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise bad_request(
            f"best_of={request.best_of} is not supported: completions are not ranked; remove it, or set it to n={n}",
            param="best_of", code="unsupported_parameter",
        )  # fmt: skip
    echoed = request.logprobs if request.echo else None
    if None not in (echoed, request.prompt_logprobs) and echoed != request.prompt_logprobs:
        raise bad_request("with echo, prompt_logprobs must equal logprobs", param="prompt_logprobs")
    return _params(
        request,
        facts,
        # Scoring only the prompt still generates one token, which is not returned.
        max_tokens=None if request.max_tokens is None else max(1, request.max_tokens),
        default_max_tokens=COMPLETION_TOKENS,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs if echoed is None else echoed,
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
    max_tokens = limit if limit is not None else older
    return _params(request, facts, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs)


def _params(
    request: SampledRequest, facts: EngineFacts, *, max_tokens: int | None, default_max_tokens: int | None = None, **more: Any
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs are not part of a stream: remove stream", param="prompt_logprobs")
    bias = {int(token): value for token, value in (request.logit_bias or {}).items() if value is not None}
    for param, tokens in (("logit_bias", bias), ("stop_token_ids", request.stop_token_ids or [])):
        for token in tokens:
            check_token(token, facts, param)
    stated = {
        name: value
        for name in (
            "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
            "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens",
            "cache_salt",
        )
        if (value := getattr(request, name)) is not None
    }  # fmt: skip
    if max_tokens is not None:
        stated["max_tokens"] = max_tokens
    direct = with_defaults(stated, {"max_tokens": default_max_tokens, **facts.sampling_defaults})
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    try:
        return SamplingParams(**direct, stop=[text for text in stops if text] or None, logit_bias=bias or None, **more)
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


def structured_output_of(request: SampledRequest, output: OutputFormat) -> StructuredOutputField | None:
    """The structured output of a request, or None. Raises ApiError 400 if two of its fields demand one."""
    answer = _from_response_format(request) if isinstance(request, (ChatRequest, CompletionRequest)) else None
    calls = _from_tools(request, output) if isinstance(request, ChatRequest) else None
    if isinstance(request, ChatRequest) and answer is not None and may_call(request) and not is_forced(request.tool_choice):
        answer, calls = _from_both(request, output, answer), None
    fields = [*_from_guided_fields(request), *(field for field in (answer, calls) if field is not None)]
    if len(fields) > 1:
        names = " and ".join(field.param for field in fields)
        raise bad_request(f"{names} exclude each other: an answer can follow only one of them", param=fields[1].param)
    return fields[0] if fields else None


def with_structured_output(params: SamplingParams, compiled: StructuredOutputParams) -> SamplingParams:
    return msgspec.structs.replace(params, structured_output=compiled)


def _from_guided_fields(request: SampledRequest) -> list[StructuredOutputField]:
    """The structured outputs by vLLM's names, the older (`guided_json`) and the newer (`structured_outputs.json`)."""
    newer = request.structured_outputs or _NO_STRUCTURED_OUTPUTS
    prefix = "structured_outputs."
    fields = []
    for name, schema in (("guided_json", request.guided_json), (f"{prefix}json", newer.json_)):
        if schema is not None:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            fields.append(StructuredOutputField(StructuredOutputParams(json_schema=text), name))
    for name, pattern in (("guided_regex", request.guided_regex), (f"{prefix}regex", newer.regex)):
        if pattern is not None:
            fields.append(StructuredOutputField(StructuredOutputParams(regex=pattern), name))
    for name, grammar in (("guided_grammar", request.guided_grammar), (f"{prefix}grammar", newer.grammar)):
        if grammar is not None:
            fields.append(StructuredOutputField(StructuredOutputParams(grammar=grammar), name))
    for name, choices in (("guided_choice", request.guided_choice), (f"{prefix}choice", newer.choice)):
        if choices is not None:
            fields.append(StructuredOutputField(StructuredOutputParams(grammar=_grammar_of(choices)), name))
    if newer.json_object:
        fields.append(StructuredOutputField(StructuredOutputParams(json_object=True), f"{prefix}json_object"))
    if newer.structural_tag is not None:
        fields.append(StructuredOutputField(StructuredOutputParams(structural_tag=newer.structural_tag), f"{prefix}structural_tag"))
    if request.structured_outputs is not None and not any(field.param.startswith(prefix) for field in fields):
        raise bad_request("structured_outputs needs one of json, regex, choice, grammar", param="structured_outputs")
    return fields


def _grammar_of(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"


def _from_response_format(request: ChatRequest | CompletionRequest) -> StructuredOutputField | None:
    format_ = request.response_format
    if isinstance(format_, JsonSchemaFormat) and format_.json_schema.schema_ is not None:
        return StructuredOutputField(StructuredOutputParams(json_schema=json.dumps(format_.json_schema.schema_)), "response_format")
    if isinstance(format_, (JsonObjectFormat, JsonSchemaFormat)):
        return StructuredOutputField(StructuredOutputParams(json_object=True), "response_format")
    return None


def schemas_of(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """The name of each function, and the JSON schema of its arguments."""
    return {
        function.name: NO_ARGUMENTS if function.parameters is None else function.parameters or ANY_OBJECT
        for function in (tool.function for tool in tools)
    }


def strict_names(tools: Sequence[Tool]) -> frozenset[str]:
    """The functions whose calls must follow their schemas; those of others do, as far as a grammar can enforce them."""
    return frozenset(tool.function.name for tool in tools if tool.function.strict)


def _from_tools(request: ChatRequest, output: OutputFormat) -> StructuredOutputField | None:
    """The structured output of forced calls, of strict functions, and of requests without parallel calls."""
    tools, choice = request.tools or [], request.tool_choice
    parallel = request.parallel_tool_calls is not False
    names = {tool.function.name for tool in tools}
    wanted = [choice.function.name] if isinstance(choice, NamedTool) else []
    if isinstance(choice, AllowedToolsChoice):
        wanted = [tool.function.name for tool in choice.allowed_tools.tools]
    for name in wanted:
        if name not in names:
            raise bad_request(f"tool_choice names {name!r}, which is not one of the tools", param="tool_choice")
    if choice == "required" and not tools:
        raise bad_request("tool_choice 'required' needs tools", param="tool_choice")
    if not may_call(request):
        return None
    if output.tools is None:
        raise bad_request(
            "tools are not supported: this model's chat template shows no tools to it, or describes an unknown format of calls "
            "(the server's option tool_call_parser names a format)",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    schemas = schemas_of(tools)
    functions = {name: schemas[name] for name in wanted} if wanted else schemas
    if is_forced(choice):
        parallel = parallel and not isinstance(choice, NamedTool)
        tag = forced_calls(output, output.tools, functions, strict_names(tools), parallel=parallel)
        return StructuredOutputField(StructuredOutputParams(structural_tag=structural_tag(tag)), "tools")
    strict = bool(strict_names(tools))
    by_schema = forced_format(output.tools) == output.tools
    if strict and not by_schema:
        raise bad_request(
            "strict functions are not supported: this model writes Python calls, which cannot follow a JSON schema",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    if strict or ((not parallel or wanted) and by_schema and output.tools != "gpt_oss"):
        tag = valid_calls(output, output.tools, functions, strict_names(tools), parallel=parallel)
        return StructuredOutputField(StructuredOutputParams(structural_tag=structural_tag(tag)), "tools")
    return None


def _from_both(request: ChatRequest, output: OutputFormat, answer: StructuredOutputField) -> StructuredOutputField:
    """The structured output of a request whose answer is calls, or follows a format. Raises ApiError 400 if they look alike."""
    assert output.tools is not None
    if CALLS[output.tools].ambiguous:
        raise bad_request(
            "response_format and tools exclude each other: this model writes calls that an answer in JSON cannot be told from; "
            "send tool_choice 'none' with response_format, or tools without response_format",
            param="response_format", code="unsupported_parameter",
        )  # fmt: skip
    names, schemas = callable_names(request), schemas_of(request.tools or ())
    functions = {name: schema for name, schema in schemas.items() if name in names}
    parallel = request.parallel_tool_calls is not False
    strict = strict_names(request.tools or ())
    params = calls_or_answer(output, output.tools, functions, strict, answer.structured_output, parallel=parallel)
    return StructuredOutputField(params, _ANSWER_OR_TOOLS)


def may_call(request: ChatRequest) -> bool:
    """Whether the answer may be a call."""
    return bool(request.tools) and request.tool_choice != "none"


def is_forced(choice: ToolChoice | None) -> bool:
    """Whether the answer must be a call."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def callable_names(request: ChatRequest) -> set[str]:
    """The functions that the answer may call."""
    if isinstance(request.tool_choice, AllowedToolsChoice):
        return {tool.function.name for tool in request.tool_choice.allowed_tools.tools}
    return {tool.function.name for tool in request.tools or ()}
