# SPDX-License-Identifier: Apache-2.0
"""Tool calls between tags, with a tag for each argument: `<function=NAME>`, `<parameter=KEY>`, a value without quotes,
`</parameter>`, `</function>` (Qwen3-Coder), and the like of other families. `CallSyntax` has the tags of a format.

The schema of the function tells which values are strings (`schema_values`). A string is emitted while it is written, another value
once it ends.

- Tags around a call may be missing, and so may a tag before a value.
- A value ends at its closing tag if the format goes on behind it; else the tag is part of the value.
- Models forget closing tags: a value ends, too, where a parameter of the schema begins that the call does not have yet, and at the
  end of the call, unless the tags of an end follow once more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.serve.output_parsing.events import BLANK, Events, Functions, first_of, overlap
from phalanx.serve.output_parsing.json_call import CallParser
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.output_parsing.syntax import CallSyntax
from phalanx.serve.structured_output.schema_values import is_text, property_names, property_schema, value_of

MAX_HEAD = 160
"""Characters of a call up to the end of its name."""
_NAME = re.compile(r"[\w.-]*")


class TaggedParser(CallParser):
    """The parser of these calls. syntax: of a format with a `parameter`."""

    def __init__(self, functions: Functions, markers: Markers, syntax: CallSyntax) -> None:
        super().__init__(functions)
        encode, parts = markers.encode, syntax.parts
        before_name, after_name = syntax.begin.split("NAME")
        *self._outer, self._call = map(encode, f"{syntax.before}{before_name}".split("\n"))
        self._end, *self._closing = map(encode, f"{syntax.end}\n{syntax.after}".split())
        self._open_key, self._open_value, self._end_value = map(encode, (parts.open_key, parts.open_value, parts.end_value))
        self._end_keys = {encode(end): kind for end, kind in parts.end_keys.items()}
        self._wrap = parts.wrap
        self._name_ends = (encode(after_name.strip()),) if after_name.strip() else ("\n", self._open_key, self._end)
        self._begins = [*self._outer, self._call]
        self._structure = [self._end_value, self._open_key, self._end, *self._closing, *self._begins]
        self._ends = re.compile("|".join(map(re.escape, (self._end_value, self._open_key, self._end))))
        self._other_key = re.compile(rf"[^{re.escape(next(iter(self._end_keys))[0])}\n]{{0,128}}")
        # Where the tags around calls are special tokens, the same call in plain letters is text.
        self._may_be_bare = all(len(tag) > 1 for tag in self._outer)
        self._state = self._before_call
        self._inside = self._may_be_bare  # a call may begin here without the tags around it
        self._prefix = ""  # what introduced the call; it is content if no call follows
        self._name = ""
        self._names: list[str] = []  # of the parameters, longest first
        self._unread: set[str] = set()  # those that the call does not have yet
        self._key = ""
        self._schema: Any = {}  # of the value
        self._scanned = 0  # characters of a value in which it does not end
        self._begun = False  # a part of the value is emitted
        self._has_arguments = self._closes = False

    def _step(self, *, final: bool) -> Events:
        progress = yield from self._state(final=final)
        return progress if progress or not final else (yield from self._last_blank())

    def _before_call(self, *, final: bool) -> Events:
        begins = self._begins if self._inside else self._outer
        tags = (*begins, *(self._closing if self._closes else ()))
        tag = yield from self._content_until(*tags, final=final)
        if tag is None:
            return False
        if tag in self._closing:
            self._text, self._blank = self._text[len(tag) :], ""
            self._closes = tag != self._closing[-1]
            self._inside = self._closes or self._may_be_bare
            return True
        self._prefix, self._inside = tag if tag in self._outer else "", True
        self._text, self._state = self._text[len(self._prefix) :], self._in_head
        return True

    def _in_head(self, *, final: bool) -> Events:
        rest = self._text.lstrip(BLANK)
        begun = self._call.startswith(rest)
        if rest.startswith(self._call):
            name_at = len(rest) - len(rest[len(self._call) :].lstrip(BLANK))
            name = _NAME.match(rest, name_at)
            assert name is not None
            tail = rest[name.end() :].lstrip(" \t\r")
            end = next((end for end in self._name_ends if tail.startswith(end)), None)
            begun = end is None and any(end.startswith(tail) for end in self._name_ends)
            if end is not None and name[0] in self._functions and name.end() <= MAX_HEAD:
                self._name = name[0]
                self._names = sorted(property_names(self._functions[name[0]]), key=len, reverse=True)
                self._unread = set(self._names)
                self._text = tail.removeprefix(end) if len(self._name_ends) == 1 else tail
                self._state, self._has_arguments, self._closes = self._before_parameter, False, True
                yield self._begin(name[0])
                return True
        if begun and not final and len(rest) < MAX_HEAD:
            return False
        skip = len(self._text) - len(rest) + len(self._call) if rest.startswith(self._call) else 0
        yield from self._content(self._prefix + self._text[:skip])
        self._text, self._state = self._text[skip:], self._before_call
        return True

    def _before_parameter(self, *, final: bool) -> Events:
        tags = (self._open_key, self._end, *self._closing, *self._begins)
        match = first_of(self._text, *tags)
        if match is None:
            self._text = self._text[len(self._text) - overlap(self._text, *tags) :]  # other text has no place here
            return False
        at, tag = match
        if tag == self._open_key:
            return self._read_key(at + len(tag), final=final)
        self._text, self._state = self._text[at + (len(tag) if tag == self._end else 0) :], self._before_call
        yield self._arguments("}" if self._has_arguments else "{}")
        return True

    def _read_key(self, start: int, *, final: bool) -> bool:
        """Read KEY and the tag behind it. A known name is matched first, longest first: it may hold what other keys cannot."""
        rest = self._text[start:]
        known = [name + end for name in self._names for end in self._end_keys]
        if not final and any(len(rest) < len(text) and text.startswith(rest) for text in known):
            return False
        text = next((text for text in known if rest.startswith(text)), None)
        if text is None:
            other = self._other_key.match(rest)
            assert other is not None
            if not final and any(end.startswith(rest[other.end() :]) for end in self._end_keys):
                return False
            end = next((end for end in self._end_keys if rest.startswith(end, other.end())), None)
            if not other[0] or end is None:
                self._text = rest
                return True
            text = other[0] + end
        end = next(end for end in self._end_keys if text.endswith(end))
        self._key, self._text = text.removesuffix(end), rest[len(text) :]
        self._unread.discard(self._key)
        self._schema = _stated(self._end_keys[end], property_schema(self._functions[self._name], self._key))
        self._state = self._before_value
        return True

    def _before_value(self, *, final: bool) -> Events:
        if self._open_value:
            rest = self._text.lstrip(BLANK)
            if len(rest) < len(self._open_value) and self._open_value.startswith(rest):
                return False
            self._text = rest.removeprefix(self._open_value)
        elif not self._text:
            return False
        self._text = self._text.removeprefix(self._wrap)
        self._state, self._scanned, self._begun = self._in_value, 0, False
        yield from ()
        return True

    def _in_value(self, *, final: bool) -> Events:
        end, resume = self._end_of_value(final=final)
        text = self._text[:end].removesuffix(self._wrap)
        key = (", " if self._has_arguments else "{") + json.dumps(self._key, ensure_ascii=False) + ": "
        if is_text(self._schema):
            opening, closing = "" if self._begun else key + '"', "" if resume is None else '"'
            if text or closing:
                yield self._arguments(opening + json.dumps(text, ensure_ascii=False)[1:-1] + closing)
                self._begun = True
            if resume is None:
                self._text, end = self._text[len(text) :], end - len(text)
        elif resume is not None:
            value = value_of(text, self._schema, self._functions[self._name])
            yield self._arguments(key + json.dumps(value, ensure_ascii=False))
        if resume is None:
            self._scanned = end
            return False
        self._text, self._state, self._has_arguments = self._text[resume:], self._before_parameter, True
        return True

    def _end_of_value(self, *, final: bool) -> tuple[int, int | None]:
        """Where the value ends, and where the text goes on; or the characters that certainly belong to the value, and None."""
        at = self._scanned
        while (match := self._ends.search(self._text, at)) is not None:
            ends = self._ends_value(match[0], self._text[match.end() :], final=final)
            if ends is not False:
                resume = match.end() if match[0] == self._end_value else match.start()
                return match.start(), resume if ends else None
            at = match.start() + 1
        return len(self._text) - overlap(self._text, *self._structure), None

    def _ends_value(self, tag: str, rest: str, *, final: bool) -> bool | None:
        """Whether a tag in a value ends it; None: what follows will tell."""
        if len(tag) == 1:  # a special token is no text
            return True
        if tag == self._open_key:
            return _begins(rest, [name + end for name in self._unread for end in self._end_keys], final=final)
        rest = rest.lstrip(BLANK)
        if tag == self._end_value:
            return final or None if not rest else _begins(rest, self._structure, final=final)
        # The end of a call, whose last value has none: it does not count if a value, a call or all calls end behind it once more.
        closed = not self._closing
        for closing in self._closing:
            closed, rest = closed or rest.startswith(closing), rest.removeprefix(closing).lstrip(BLANK)
        if not rest:
            return closed if final else None
        again = _begins(rest, [self._end_value, self._end, *self._closing], final=final)
        if again is not False:
            return None if again is None else False
        return (closed and bool(self._closing)) or _begins(rest, self._begins, final=final)


def _stated(string: bool | None, schema: Any) -> Any:
    """The schema of a value of which the model says whether it is a string. A string is one whatever the schema says; of what is
    none, the schema decides where it has a type."""
    if string:
        return {"type": "string"}
    of_any_type = is_text(schema) and not (isinstance(schema, Mapping) and "type" in schema)
    return {"type": ["integer", "number", "boolean", "null", "array", "object"]} if string is False and of_any_type else schema


def _begins(text: str, tags: Sequence[str], *, final: bool) -> bool | None:
    """Whether the text begins with one of the tags; None: it may, when more text comes. At the end, a part of a tag is enough."""
    if any(text.startswith(tag) for tag in tags):
        return True
    return (final or None) if any(tag.startswith(text) for tag in tags) else False
