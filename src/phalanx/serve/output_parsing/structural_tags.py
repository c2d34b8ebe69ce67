# SPDX-License-Identifier: Apache-2.0
"""Structured output in the format of a model: calls that must be valid, and grammars that begin after the reasoning.

The functions return formats of a structural tag (xgrammar's JSON), which `structured_output.lark` restates as a grammar. Markers
that are special tokens are enforced as tokens. Of a call's arguments, "tool" names the function, and "strict" says what becomes of
a schema that cannot be enforced: an error, or any arguments.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.serve.output_parsing import harmony
from phalanx.serve.output_parsing.events import Functions
from phalanx.serve.output_parsing.families import OutputFormat
from phalanx.serve.output_parsing.formats import CALLS, ToolName, forced_format
from phalanx.serve.output_parsing.reasoning import Begin
from phalanx.serve.output_parsing.syntax import CallSyntax

Format = dict[str, Any]

_INDEX: Format = {"type": "regex", "pattern": "[0-9]{1,3}"}
_ANY_TEXT: Format = {"type": "any_text"}


def forced_calls(
    output: OutputFormat, tools: ToolName, functions: Functions, strict: Collection[str] = (), *, parallel: bool
) -> Format:
    """One or more calls, and nothing else."""
    return _sequence(*_calls(output, output.syntax(forced_format(tools)), functions, strict, parallel=parallel))


def valid_calls(
    output: OutputFormat, tools: ToolName, functions: Functions, strict: Collection[str] = (), *, parallel: bool
) -> Format:
    """Any text, but only valid calls. Without `parallel`, the first call ends the answer."""
    syntax = output.syntax(forced_format(tools))
    if tools == "gpt_oss":
        message = [*_literal(output, f"{harmony.CHANNEL}final{harmony.MESSAGE}"), _ANY_TEXT]
        calls = _sequence(*_calls(output, syntax, functions, strict, parallel=parallel))
        preamble = _harmony_message(output, "commentary")
        return _sequence({"type": "star", "content": preamble}, {"type": "or", "elements": [calls, _sequence(*message)]})
    trigger = syntax.trigger
    special = output.markers.special.get(trigger)
    calls = _sequence(*_calls(output, syntax, functions, strict, parallel=parallel and bool(syntax.before), skip=len(trigger)))
    rules = [[trigger if special is None else special, calls]]
    return {"type": "dispatch" if special is None else "token_dispatch", "rules": rules, "loop": parallel}


def calls_or_answer(
    output: OutputFormat, tools: ToolName, functions: Functions, strict: Collection[str], answer: StructuredOutputParams, *,
    parallel: bool,
) -> StructuredOutputParams:  # fmt: skip
    """Either calls and nothing else, or the answer that these params describe.

    tools: no format that is `ambiguous`. Use it as calls in `after_reasoning`.
    """
    assert not CALLS[tools].ambiguous, f"calls of {tools} and answers look alike"
    format_ = _format_of(answer)
    if format_ is None:
        return answer
    if tools == "gpt_oss":
        format_ = _sequence(*_literal(output, f"{harmony.CHANNEL}final{harmony.MESSAGE}"), format_)
    return _params({"type": "or", "elements": [format_, forced_calls(output, tools, functions, strict, parallel=parallel)]})


def after_reasoning(
    output: OutputFormat, params: StructuredOutputParams, begin: Begin, *, calls: bool = False
) -> StructuredOutputParams:
    """The same structured output for what follows the reasoning, which stays free.

    begin: where the output begins. calls: the params are those of calls (`forced_calls`, `valid_calls`, `calls_or_answer`), else of
    an answer.
    """
    harmonic = "gpt_oss" in (output.reasoning, output.tools)
    tags = output.tags
    if not harmonic and (tags is None or begin is Begin.AFTER):
        return params
    answer = _format_of(params)
    if answer is None:
        return params
    if harmonic:
        analysis = {"type": "star", "content": _harmony_message(output, "analysis")}
        header = [] if calls else _literal(output, f"{harmony.CHANNEL}final{harmony.MESSAGE}")
        return _params(_sequence(analysis, *header, answer))
    assert tags is not None
    reasoning: Format = {
        "type": "tag",
        "begin": "" if begin is Begin.INSIDE else _sequence(*_literal(output, tags.opening + tags.label)),
        "content": _ANY_TEXT,
        "end": _tag_end(output, tags.closing),
    }
    reasoning = _sequence(reasoning, _optional({"type": "regex", "pattern": r"\n{1,2}"}))
    if begin is Begin.OPEN:
        reasoning = _optional(reasoning)
    if tags.answer is not None and not calls:
        line: Format = {"type": "regex", "pattern": r"\n?"}
        before, after = (_literal(output, tag) for tag in tags.answer)
        answer = _sequence(_optional(*before, line), answer, _optional(line, *after))
    return _params(_sequence(reasoning, answer))


def structural_tag(format_: Format) -> str:
    """The structural tag (JSON) of a format."""
    return json.dumps({"type": "structural_tag", "format": format_})


def _calls(
    output: OutputFormat, syntax: CallSyntax, functions: Functions, strict: Collection[str], *, parallel: bool, skip: int = 0
) -> list[Format]:  # fmt: skip
    """All calls, without the first `skip` characters of their text."""
    in_first = max(0, skip - len(syntax.before))
    formats = _literal(output, syntax.before[skip:]) if syntax.before[skip:] else []
    formats.append(_any_call(output, syntax, functions, strict, skip=in_first))
    if parallel and syntax.between is not None:
        more = _sequence(*_literal(output, syntax.between), _any_call(output, syntax, functions, strict))
        formats.append({"type": "star", "content": more})
    return formats + _literal(output, syntax.after)


def _any_call(output: OutputFormat, syntax: CallSyntax, functions: Functions, strict: Collection[str], *, skip: int = 0) -> Format:
    calls = []
    for name, schema in functions.items():
        content: Format = {"type": "json_schema", "json_schema": schema, "tool": name, "strict": name in strict}
        if syntax.parameter:
            content |= {"parameter": syntax.parameter, "special": output.markers.special}
        if syntax.quote:
            content |= {"quote": syntax.quote, "special": output.markers.special}
        first, *more = [_literal(output, part.replace("NAME", name)) for part in syntax.begin[skip:].split("INDEX")]
        begin = [*first, *(format_ for part in more for format_ in (_INDEX, *part))]
        calls.append(_sequence(*begin, content, *_literal(output, syntax.end)))
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


def _optional(*formats: Format) -> Format:
    return {"type": "optional", "content": _sequence(*formats)}


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
