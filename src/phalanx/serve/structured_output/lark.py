# SPDX-License-Identifier: Apache-2.0
"""Write structured output as llguidance's Lark, which the engine follows: `lark_of`.

A structural tag (xgrammar's JSON, see docs/serving.md) is restated by `TagWriter`. The checks here take as long as the format asks
for, so they run in the process of `worker`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.engine.grammar import HEAD
from phalanx.errors import OptionError
from phalanx.serve.structured_output.bare_objects import BareObjectWriter
from phalanx.serve.structured_output.json_schema import MAX_BYTES, enforceable, read_json, subschemas
from phalanx.serve.structured_output.parameters import QWEN_PARAMETER, ParameterParts, ParameterWriter
from phalanx.serve.structured_output.regex import rust_regex
from phalanx.serve.structured_output.schema_writer import lark_escaped
from phalanx.serve.structured_output.validation import json_rule, problem_of, problem_of_grammar

Format = dict[str, Any]

_MAX_BLAMED = 200
"""Parts of a schema that are tried, to find the one that is refused."""
_NO_EFFECT = re.compile(r"\[[^\]\n]*\b(?:temperature|max_tokens|stop|stop_capture)\b\s*=")


def lark_of(kind: str, text: str) -> str:
    """The grammar of a format. kind: a field of `StructuredOutputParams`. Raises OptionError saying what is wrong with it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"the {kind} is not valid text", why=str(error)) from None
    if kind == "json_object":
        return f"{HEAD}start: {json_rule({'type': 'object'})}"
    if kind == "json_schema":
        return _of_schema(read_json(text, what=kind))
    if kind == "structural_tag":
        return _validated(TagWriter().write(read_json(text, what=kind)), what=kind)
    if len(text) > MAX_BYTES // 4:
        raise OptionError(f"the {kind} has {len(text)} characters", why=f"the limit is {MAX_BYTES // 4}", next="simplify it")
    if kind == "regex":
        return _validated(f"{HEAD}start: {regex_rule(text, what=kind)}", what=kind)
    return _validated(HEAD + _lark(text), what=kind)


def _of_schema(schema: Any) -> str:
    schema = enforceable(schema)
    problem = problem_of(json_rule(schema))
    if problem is not None:
        place = _blamed(schema) if isinstance(schema, dict) else None
        where = f" at {place}" if place is not None else ""
        raise OptionError(
            f"the json_schema cannot be enforced{where}", why=problem, next="rewrite this part" if where else "simplify it"
        )
    return f"{HEAD}start: {json_rule(schema)}"


def _blamed(schema: dict[str, Any]) -> str | None:
    """The innermost part of a schema that the library refuses by itself."""
    moved = json.loads(json.dumps(schema))
    for _, node in subschemas(moved):
        if isinstance(node.get("$ref"), str):
            node["$ref"] = "#/$defs/root" + node["$ref"].removeprefix("#")
    places = sorted((where for where, _ in subschemas(schema)), key=lambda where: -where.count("/"))
    for where in places[:_MAX_BLAMED]:
        document = {"$ref": "#/$defs/root" + where.removeprefix("#"), "$defs": {"root": moved}}
        if problem_of(json_rule(document)) is not None:
            return where
    return None


def regex_rule(pattern: str, *, what: str) -> str:
    """The expression of a client's regular expression, which the whole text matches."""
    return raw_regex(rust_regex(pattern, what=what))


def raw_regex(pattern: str) -> str:
    import llguidance

    if not pattern:
        return '""'
    return f"/{llguidance.regex_to_lark(pattern, 'dw')}/".replace("\n", "\\n").replace("\r", "\\r")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _validated(grammar: str, *, what: str) -> str:
    problem = problem_of_grammar(grammar)
    if problem is not None:
        raise OptionError(f"the {what} cannot be enforced", why=problem, next="correct or simplify it")
    return grammar


def _lark(text: str) -> str:
    """A client's grammar: Lark, or GBNF (as `root ::= ...`), which is translated."""
    import llguidance.gbnf_to_lark as gbnf

    if "\0" in text or not text.strip():
        raise OptionError("the grammar is empty, or has a NUL character")
    try:
        text = gbnf.any_to_lark(text)
    except RecursionError:
        raise OptionError("the grammar is nested too deeply") from None
    except Exception as error:
        raise OptionError("the grammar is not valid", why=str(error)[:300]) from None
    if _NO_EFFECT.search(text):
        raise OptionError(
            "the grammar has an attribute without effect here", held="temperature, max_tokens or stop", next="remove it"
        )
    return text


class TagWriter:
    """Writes one structural tag. `rules` are those beside `start`; `grammars` are Lark texts of clients, by name."""

    def __init__(self) -> None:
        self.rules: list[str] = ["TEXT: /(?s:.*)/"]
        self.grammars: dict[str, str] = {}

    def write(self, tag: Any) -> str:
        if not isinstance(tag, dict):
            raise OptionError("the structural_tag is not a JSON object")
        if "structures" in tag:  # the older form
            structures, triggers = _listed(tag, "structures"), _listed(tag, "triggers")
            tags = [{"begin": _text(each, "begin"), "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                     "end": _text(each, "end")} for each in structures if isinstance(each, dict)]  # fmt: skip
            format_: Any = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
        else:
            format_ = tag.get("format")
        start = self.expression(format_)
        main = f"{HEAD}start: {start}\n" + "\n".join(self.rules)
        if not self.grammars:
            return main
        named = [{"name": name, "lark_grammar": HEAD + text} for name, text in self.grammars.items()]
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *named]}, ensure_ascii=False)

    def rule(self, body: str, *, attributes: str = "", terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def expression(self, format_: Any) -> str:
        kind = format_.get("type") if isinstance(format_, dict) else None
        write: Callable[[Format], str] | None = getattr(self, f"_{kind}", None) if isinstance(kind, str) else None
        if write is None:
            raise OptionError(f"the structural_tag has no format {str(kind)[:60]!r}", held=json.dumps(format_)[:100])
        return write(format_)

    def ending_text(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        return self.rule(f"/(?s:.*){lark_escaped(end)}/", attributes="[lazy]")

    def ended(self, content: Any, *ends: str) -> str | None:
        """A text or an expression up to the first of `ends`, and that: one lexeme, since the lexer takes the longest, and a text
        alone would swallow its end. None of other content, and without ends."""
        if not ends or not (_is(content, "any_text") or _is(content, "regex")):
            return None
        lexeme = self.rule(f"{self.expression(content)} ({' | '.join(map(literal, ends))})", terminal=True)
        return self.rule(lexeme, attributes="[lazy]")

    # ---- one method for each type of a format ----------------------------------------------------------------------------

    def _const_string(self, format_: Format) -> str:
        return literal(_text(format_, "value"))

    def _any_text(self, format_: Format) -> str:
        if format_.get("excludes"):
            raise OptionError("the structural_tag has 'excludes' of 'any_text'", why="the grammar cannot enforce it")
        return "TEXT"

    def _token(self, format_: Format) -> str:
        token = format_.get("token")
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise OptionError(f"the structural_tag has the token {str(token)[:60]!r}", why="a token is given by its id")
        return f"<[{token}]>"

    def _json_schema(self, format_: Format) -> str:
        tool, strict = format_.get("tool"), format_.get("strict", True)
        what = "json_schema of the structural_tag" if tool is None else f"parameters of the tool {tool!r}"
        schema = format_.get("json_schema", {})
        flexible = "max_whitespace_cnt" in format_ or tool is not None
        begun = len(self.rules)

        writer = self._argument_writer(format_, what)

        def write(prepared: Any) -> str:
            return json_rule(prepared, flexible=flexible) if writer is None else writer.write(prepared)

        try:
            expression = write(enforceable(copy.deepcopy(schema), what=what))
            if tool is None or (problem := problem_of(expression, *self.rules)) is None:
                return expression
            raise OptionError(f"the {what} cannot be enforced", why=problem)
        except OptionError as error:
            if strict:
                raise error if tool is None else OptionError(str(error), next="rewrite them, or remove 'strict'") from None
        del self.rules[begun:]
        return write({"type": "object"})

    def _qwen_xml_parameter(self, format_: Format) -> str:
        return self._json_schema({**format_, "parameter": QWEN_PARAMETER})

    def _argument_writer(self, format_: Format, what: str) -> ParameterWriter | BareObjectWriter | None:
        """The writer of arguments between tags or with bare keys; None if they are JSON. Tags in "special" are tokens."""
        parameter, quote, special = format_.get("parameter"), format_.get("quote"), format_.get("special", {})
        if parameter is None and quote is None:
            return None
        tokens = {str(tag): self._token({"token": token}) for tag, token in special.items()} if isinstance(special, dict) else {}
        tags = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")

        def text(value: str) -> str:
            return " ".join(tokens.get(part) or literal(part) for part in tags.split(value) if part)

        def ending(end: str) -> str:
            return f"TEXT {tokens[end]}" if end in tokens else self.ending_text(end)

        if quote is not None:
            token = tokens.get(str(quote))
            return BareObjectWriter(
                str(quote), token, rules=self.rules, json_rule=json_rule, regex=raw_regex, ending=ending, what=what
            )
        parts = ParameterParts.of(str(parameter))
        return ParameterWriter(parts, rule=self.rule, json_rule=json_rule, regex=raw_regex, text=text, ending=ending, what=what)

    def _regex(self, format_: Format) -> str:
        return regex_rule(_text(format_, "pattern"), what="regex of the structural_tag")

    def _grammar(self, format_: Format) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars[name] = _lark(_text(format_, "grammar"))
        return f"@{name}"

    def _sequence(self, format_: Format) -> str:
        parts, elements = [], _listed(format_, "elements")
        at = 0
        while at < len(elements):
            one, next_ = elements[at], elements[at + 1] if at + 1 < len(elements) else None
            ended = self.ended(one, _text(next_, "value")) if _is(next_, "const_string") else None
            parts.append(self.expression(one) if ended is None else ended)
            at += 1 if ended is None else 2
        return f"({' '.join(parts)})" if parts else '""'

    def _or(self, format_: Format) -> str:
        return f"({' | '.join(self.rule(self.expression(each)) for each in _listed(format_, 'elements'))})"

    def _star(self, format_: Format) -> str:
        return f"({self.expression(format_.get('content'))})*"

    def _plus(self, format_: Format) -> str:
        return f"({self.expression(format_.get('content'))})+"

    def _optional(self, format_: Format) -> str:
        return f"({self.expression(format_.get('content'))})?"

    def _tag(self, format_: Format) -> str:
        begin, end = format_.get("begin", ""), format_.get("end", "")
        content: Any = format_.get("content")
        ends = _listed(format_, "end") if isinstance(end, list) else [end]
        if not all(isinstance(each, str) for each in ends):
            ends, after = [], self._part(end)
        else:
            ends, after = [each for each in ends if each], f"({' | '.join(map(literal, ends))})"
        parts = [] if begin == "" else [self._part(begin)]
        if _is(content, "or") and ends:
            each_ended = [{"type": "tag", "content": each, "end": ends} for each in _listed(content, "elements")]
            parts.append(self._or({"elements": each_ended}))
        else:
            ended = self.ended(content, *ends)
            parts += [self.expression(content), after] if ended is None else [ended]
        return f"({' '.join(parts)})"

    def _part(self, text_or_format: Any) -> str:
        return literal(text_or_format) if isinstance(text_or_format, str) else self.expression(text_or_format)

    def _triggered_tags(self, format_: Format) -> str:
        """Free text, in which a trigger begins one of the tags that begin with it."""
        if format_.get("excludes"):
            raise OptionError("the structural_tag has 'excludes' of 'triggered_tags'", why="the grammar cannot enforce it")
        rules = []
        tags = [tag for tag in _listed(format_, "tags") if isinstance(tag, dict)]
        for trigger in _listed(format_, "triggers"):
            begun = [{**tag, "begin": _text(tag, "begin").removeprefix(str(trigger))} for tag in tags
                     if trigger and _text(tag, "begin").startswith(str(trigger))]  # fmt: skip
            if not begun:
                raise OptionError(f"the structural_tag has the trigger {str(trigger)[:60]!r}", why="no tag begins with it")
            rules.append([trigger, {"type": "or", "elements": [{"type": "tag", **tag} for tag in begun]}])
        loop = not format_.get("stop_after_first", False)
        return self._dispatched(rules, loop=loop, at_least_one=bool(format_.get("at_least_one", False)))

    def _tags_with_separator(self, format_: Format) -> str:
        tags = [{"type": "tag", **tag} for tag in _listed(format_, "tags") if isinstance(tag, dict)]
        one = self.rule(self._or({"elements": tags}))
        separator = _text(format_, "separator")
        more = "" if format_.get("stop_after_first", False) else f" ({literal(separator) if separator else ''} {one})*"
        return f"({one}{more})" + ("" if format_.get("at_least_one", False) else "?")

    def _dispatch(self, format_: Format) -> str:
        return self._dispatched(_listed(format_, "rules"), loop=bool(format_.get("loop", True)))

    def _token_dispatch(self, format_: Format) -> str:
        return self._dispatched(_listed(format_, "rules"), loop=bool(format_.get("loop", True)))

    def _dispatched(self, rules: Sequence[Any], *, loop: bool, at_least_one: bool = False) -> str:
        parts = []
        for trigger, format_ in rules:
            head = self.ending_text(trigger) if isinstance(trigger, str) else f"TEXT {self._token({'token': trigger})}"
            parts.append(self.rule(f"{head} {self.expression(format_)}"))
        any_of = f"({' | '.join(parts)})"
        if loop:
            return f"({any_of}{'+' if at_least_one else '*'} TEXT)"
        return any_of if at_least_one else f"({any_of} | TEXT)"


def _is(format_: Any, kind: str) -> bool:
    return isinstance(format_, dict) and format_.get("type") == kind


def _text(format_: Any, name: str) -> str:
    value = format_.get(name) if isinstance(format_, dict) else None
    if not isinstance(value, str):
        raise OptionError(f"the structural_tag needs a text {name!r}", held=json.dumps(format_)[:100])
    return value


def _listed(format_: Format, name: str) -> list[Any]:
    value = format_.get(name)
    if not isinstance(value, list) or not value:
        raise OptionError(f"the structural_tag needs a list {name!r}", held=json.dumps(format_)[:100])
    return value
