# SPDX-License-Identifier: Apache-2.0
"""Render messages into one prompt text with the checkpoint's Jinja chat template, in a sandbox.

A template comes from the internet. So it runs in Jinja's immutable sandbox and gets only plain JSON data. It has what the reference
renderer (transformers' `apply_chat_template`) provides: `messages`, `tools`, `documents`, `add_generation_prompt`, the special
tokens by name, the filter `tojson`, and the functions `raise_exception` and `strftime_now`.

A rendering has a limit of time, checked in each iteration of a loop and each call of a macro, and one of length, checked for the
prompt and for each value that an operator makes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from phalanx.errors import ModelError, RequestError

MessageDict = Mapping[str, Any]

MAX_SECONDS = 10.0
"""Time of one rendering. A body at the size limit takes less than a second."""
MAX_CHARACTERS = 2**25
"""Characters of the prompt, and of each text or list that an operator makes."""


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (the interface of Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates call `step` in each iteration and macro, and whose operators make no huge values."""

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self._thread = threading.local()

    def begin(self) -> None:
        """A rendering begins on this thread."""
        self._thread.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> str:
        """Raise RequestError if the rendering takes too long."""
        if time.monotonic() > self._thread.deadline:
            raise RequestError(f"the chat template takes longer than {MAX_SECONDS:g} s", next="shorten the messages")
        return ""

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        _limit_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if isinstance(value, (str, list, tuple)) else None for value in (left, right)]
        numbers = [abs(value) if isinstance(value, int) else 1 for value in (left, right)]
        if operator == "**":
            _limit_length(numbers[0].bit_length() * numbers[1])
        elif operator == "+":
            _limit_length(sum(size or 0 for size in sizes))
        elif any(size is not None for size in sizes):
            _limit_length(max(size or 0 for size in sizes) * max(numbers))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
            node.body.insert(0, nodes.ExprStmt(_call("step", [], node.lineno), lineno=node.lineno))
        return _Concatenations().visit(tree)  # type: ignore[no-any-return]


class _Concatenations(NodeTransformer):
    """Replaces the operator `~`, which a sandbox cannot intercept."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of a method of the environment. A template cannot name it, nor hide it with a variable."""
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(line)
    return call


def _limit_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise RequestError(f"the chat template makes a text of {length} characters", held=f"the limit is {MAX_CHARACTERS}")


class ChatTemplate:
    """One compiled template. Several threads may render it at once."""

    def __init__(self, source: str, *, origin: str) -> None:
        """origin: where the template comes from, for errors. Raises ModelError if it does not compile."""
        self.source, self.origin = source, origin
        environment = self._environment = BoundedEnvironment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template of {origin} cannot be compiled", why=str(error)) from None

    def render(
        self,
        messages: Sequence[MessageDict],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. Raises RequestError with the template's own message if the template rejects the messages, and if it
        takes longer than MAX_SECONDS or writes more than MAX_CHARACTERS."""
        self._environment.begin()
        try:
            parts, length = [], 0
            for part in self._template.generate(
                messages=[_plain_message(message) for message in messages],
                tools=_plain(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            ):
                length += len(part)
                _limit_length(length)
                parts.append(part)
            return "".join(parts)
        except TemplateError as error:
            raise RequestError(f"the chat template of {self.origin} rejects these messages", why=str(error)) from None
        except RequestError:
            raise
        except RecursionError:
            raise RequestError("these messages are nested too deeply", next="flatten them") from None
        except Exception as error:  # a template is a program and can fail in any way on unexpected messages
            raise RequestError(
                f"the chat template of {self.origin} cannot render these messages", why=f"{type(error).__name__}: {error}"
            ) from None


def _plain_message(message: MessageDict) -> dict[str, Any]:
    """A message as plain data. A list of text parts as content is joined by newlines, as text-only templates expect."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message must be a dict with a role and content, not {_short(message)}")
    plain: dict[str, Any] = _plain(message)
    content = plain.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RequestError("the content of a message has a part that is not of type 'text'", held=_short(content))
        plain["content"] = "\n".join(texts)  # type: ignore[arg-type]
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"the content of a message must be a string or a list of text parts, not {_short(content)}")
    return plain


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise RequestError(f"messages and tools must be JSON values; {type(value).__name__} is not one")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models are not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
