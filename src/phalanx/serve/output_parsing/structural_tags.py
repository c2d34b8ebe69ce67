# SPDX-License-Identifier: Apache-2.0
"""Structured output in the format of a model: calls that must be valid, and grammars that begin after the reasoning.

The functions return formats of a structural tag (xgrammar's JSON): markers that are special tokens are enforced as tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.serve.output_parsing import deepseek, harmony
from phalanx.serve.output_parsing.events import Functions
from phalanx.serve.output_parsing.families import TAGS, OutputFormat, ToolName
from phalanx.serve.output_parsing.reasoning import Begin

Format = dict[str, Any]

_WHITESPACE = 2
"""Limit of white-space characters in a row in an enforced call, so that the model cannot write white space forever."""
_ANY_TEXT: Format = {"type": "any_text"}


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written: `before` all, then each call as `begin`, its arguments and `end`, with `between` two of them, then
    `after`. "NAME" in `begin` is the function. between: None if there can be only one call. trigger: the text that begins a call
    in free text; the beginning of `before + begin`. style: how the arguments are written, in xgrammar's words."""

    begin: str
    end: str
    trigger: str
    between: str | None
    before: str = ""
    after: str = ""
    style: str = "json"


LLAMA = CallSyntax('{"name": "NAME", "parameters": ', "}", '{"name":', "; ")
SYNTAXES: dict[ToolName, CallSyntax] = {
    "hermes": CallSyntax('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "<tool_call>", "\n"),
    "qwen3_coder": CallSyntax(
        "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "<tool_call>", "\n", style="qwen_xml"
    ),
    "llama3_json": LLAMA,
    "pythonic": LLAMA,
    "mistral": CallSyntax('{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS]", ", ", "[TOOL_CALLS][", "]"),
    "deepseek_v3": CallSyntax(
        f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}NAME\n```json\n", f"\n```{deepseek.CALL_END}", deepseek.CALLS_BEGIN,
        "\n", deepseek.CALLS_BEGIN, deepseek.CALLS_END,
    ),
    "deepseek_v31": CallSyntax(
        f"{deepseek.CALL_BEGIN}NAME{deepseek.SEPARATOR}", deepseek.CALL_END, deepseek.CALLS_BEGIN, "",
        deepseek.CALLS_BEGIN, deepseek.CALLS_END,
    ),
    "gpt_oss": CallSyntax(
        f"{harmony.CHANNEL}commentary to=functions.NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}", "", harmony.CHANNEL, None
    ),
}  # fmt: skip
"""pythonic: Python calls cannot follow a JSON schema, so a forced call is written as JSON."""
AMBIGUOUS: frozenset[ToolName] = frozenset({"llama3_json", "pythonic"})
"""Formats whose calls begin as JSON does: an answer in JSON may be the same text as a call."""
MISTRAL_ARGS = CallSyntax("[TOOL_CALLS]NAME[ARGS]", "", "[TOOL_CALLS]", "")


def forced_parser(tools: ToolName) -> ToolName:
    """The format in which forced calls are written, for a model that writes `tools`."""
    return "llama3_json" if tools == "pythonic" else tools


def syntax_of(output: OutputFormat, tools: ToolName) -> CallSyntax:
    """The syntax of the calls of this model."""
    if tools != "mistral":
        return SYNTAXES[tools]
    source = output.tokenizer.chat_template_source
    if "[ARGS]" in source:
        return MISTRAL_ARGS
    spaced = "[TOOL_CALLS] [" in source
    base = SYNTAXES["mistral"]
    return CallSyntax(base.begin, base.end, base.trigger, base.between, "[TOOL_CALLS] [", base.after) if spaced else base


def forced_calls(output: OutputFormat, tools: ToolName, functions: Functions, *, parallel: bool) -> Format:
    """One or more calls, and nothing else."""
    return _sequence(*_calls(output, syntax_of(output, tools), functions, parallel=parallel))


def valid_calls(output: OutputFormat, tools: ToolName, functions: Functions, *, parallel: bool) -> Format:
    """Any text, but only valid calls. Without `parallel`, the first call ends the answer."""
    syntax = syntax_of(output, tools)
    if tools == "gpt_oss":
        message = [*_literal(output, f"{harmony.CHANNEL}final{harmony.MESSAGE}"), _ANY_TEXT]
        calls = _sequence(*_calls(output, syntax, functions, parallel=parallel))
        preamble = _harmony_message(output, "commentary")
        return _sequence({"type": "star", "content": preamble}, {"type": "or", "elements": [calls, _sequence(*message)]})
    trigger = syntax.trigger
    special = output.markers.special.get(trigger)
    calls = _sequence(*_calls(output, syntax, functions, parallel=parallel and bool(syntax.before), skip=len(trigger)))
    rules = [[trigger if special is None else special, calls]]
    return {"type": "dispatch" if special is None else "token_dispatch", "rules": rules, "loop": parallel}


def calls_or_answer(
    output: OutputFormat, tools: ToolName, functions: Functions, answer: StructuredOutputParams, *, parallel: bool
) -> StructuredOutputParams:
    """Either calls and nothing else, or the answer that these params describe.

    tools: none of `AMBIGUOUS`. Use it as calls in `after_reasoning`.
    """
    assert tools not in AMBIGUOUS, f"calls of {tools} and answers look alike"
    format_ = _format_of(answer)
    if format_ is None:
        return answer
    if tools == "gpt_oss":
        format_ = _sequence(*_literal(output, f"{harmony.CHANNEL}final{harmony.MESSAGE}"), format_)
    return _params({"type": "or", "elements": [format_, forced_calls(output, tools, functions, parallel=parallel)]})


def after_reasoning(
    output: OutputFormat, params: StructuredOutputParams, begin: Begin, *, calls: bool = False
) -> StructuredOutputParams:
    """The same structured output for what follows the reasoning, which stays free.

    begin: where the output begins. calls: the params are those of calls (`forced_calls`, `valid_calls`, `calls_or_answer`), else of
    an answer.
    """
    harmonic = "gpt_oss" in (output.reasoning, output.tools)
    if not harmonic and (output.reasoning is None or begin is Begin.AFTER):
        return params
    answer = _format_of(params)
    if answer is None:
        return params
    if harmonic:
        analysis = {"type": "star", "content": _harmony_message(output, "analysis")}
        header = [] if calls else _literal(output, f"{harmony.CHANNEL}final{harmony.MESSAGE}")
        return _params(_sequence(analysis, *header, answer))
    assert output.reasoning is not None
    opening, closing = TAGS[output.reasoning]
    reasoning: Format = {
        "type": "tag",
        "begin": "" if begin is Begin.INSIDE else _tag_end(output, opening),
        "content": _ANY_TEXT,
        "end": _tag_end(output, closing),
    }
    reasoning = _sequence(reasoning, {"type": "regex", "pattern": r"\n{0,2}"})
    if begin is Begin.OPEN:
        reasoning = {"type": "optional", "content": reasoning}
    return _params(_sequence(reasoning, answer))


def structural_tag(format_: Format) -> str:
    """The structural tag (JSON) of a format."""
    return json.dumps({"type": "structural_tag", "format": format_})


def _calls(
    output: OutputFormat, syntax: CallSyntax, functions: Functions, *, parallel: bool, skip: int = 0
) -> list[Format]:  # fmt: skip
    """All calls, without the first `skip` characters of their text."""
    in_first = max(0, skip - len(syntax.before))
    formats = _literal(output, syntax.before[skip:]) if syntax.before[skip:] else []
    formats.append(_any_call(output, syntax, functions, skip=in_first))
    if parallel and syntax.between is not None:
        more = _sequence(*_literal(output, syntax.between), _any_call(output, syntax, functions))
        formats.append({"type": "star", "content": more})
    return formats + _literal(output, syntax.after)


def _any_call(output: OutputFormat, syntax: CallSyntax, functions: Functions, *, skip: int = 0) -> Format:
    calls = []
    for name, schema in functions.items():
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _WHITESPACE, "style": syntax.style}
        begin = syntax.begin.replace("NAME", name)[skip:]
        calls.append(_sequence(*_literal(output, begin), content, *_literal(output, syntax.end)))
    return calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}


def _harmony_message(output: OutputFormat, channel: str) -> Format:
    """A message on a channel, and the start of the next one."""
    begin = _literal(output, f"{harmony.CHANNEL}{channel}{harmony.MESSAGE}")
    text = {"type": "tag", "begin": "", "content": _ANY_TEXT, "end": _tag_end(output, harmony.ENDS[0])}
    return _sequence(*begin, text, *_literal(output, f"{harmony.START}assistant"))


def _literal(output: OutputFormat, text: str) -> list[Format]:
    return output.markers.formats(text)


def _tag_end(output: OutputFormat, marker: str) -> str | Format:
    special = output.markers.special.get(marker)
    return marker if special is None else {"type": "token", "token": special}


def _sequence(*formats: Format) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "sequence", "elements": list(formats)}


def _params(format_: Format) -> StructuredOutputParams:
    return StructuredOutputParams(structural_tag=structural_tag(format_))


def _format_of(params: StructuredOutputParams) -> Format | None:
    """The format of any structured output; None for one that cannot be read, whose error the compiler tells."""
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    try:
        if params.structural_tag is not None:
            format_: Format = json.loads(params.structural_tag)["format"]
            return format_
        schema = {"type": "object"} if params.json_object else json.loads(params.json_schema or "")
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return {"type": "json_schema", "json_schema": schema}
