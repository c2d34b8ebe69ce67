# SPDX-License-Identifier: Apache-2.0
"""Render messages into one prompt text with the checkpoint's Jinja chat template, in a sandbox.

A template comes from the internet, with the checkpoint that the operator chose; no client can send one. So it runs in Jinja's
immutable sandbox, as in transformers, with limits of its time and of the text that it writes, and gets only plain JSON data. Long
conversations are rendered in a fork whose memory the kernel limits (`large_bodies.worker`).

It has what the reference renderer (transformers' `apply_chat_template`) provides: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens by name, the filter `tojson`, and the functions `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.errors import ModelError, RequestError

MessageDict = Mapping[str, Any]

XML_TOOLS = "xml_tools"
"""What the template of SmolLM3 calls the tools that are called as JSON."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which templates look for the reasoning of an earlier answer: Qwen3 and most others in the first, gpt-oss
in the last."""

MAX_SECONDS = 10.0
"""Time of one rendering. A body at the size limit takes less than a second."""
MAX_CHARACTERS = 2**25
"""Characters of the prompt."""


class _Deadline(threading.local):
    """When the rendering on this thread must have ended, by the monotonic clock."""

    at = math.inf


_deadline = _Deadline()


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (the interface of Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates look at the clock in each iteration and macro."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _now}

    def look(self) -> str:
        if time.monotonic() > _deadline.at:
            raise RequestError(f"the chat template takes longer than {MAX_SECONDS:g} s", next="shorten the messages")
        return ""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
            # A template cannot name an attribute of the environment, nor hide it with a variable.
            call = nodes.Call(nodes.EnvironmentAttribute("look"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return tree


class ChatTemplate:
    """One compiled template. Several threads may render it at once."""

    def __init__(self, source: str, *, origin: str) -> None:
        """origin: where the template comes from, for errors. Raises ModelError if it does not compile."""
        self.source, self.origin = source, origin
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template of {origin} cannot be compiled", why=str(error)) from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""
        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def reasoning_field(self) -> str:
        """The field of a message in which the template looks for its reasoning; the first of REASONING_FIELDS if it reads none."""
        tree = self._environment.parse(self.source)
        names = {node.attr for node in tree.find_all(nodes.Getattr)}
        names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return next((name for name in REASONING_FIELDS if name in names), REASONING_FIELDS[0])

    def render(
        self,
        messages: Sequence[MessageDict],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. The reasoning of a message may have any name of REASONING_FIELDS.

        Raises RequestError with the template's own message if the template rejects the messages, and if it takes longer than
        MAX_SECONDS or writes more than MAX_CHARACTERS.
        """
        _deadline.at = time.monotonic() + MAX_SECONDS
        shown = _plain(tools) if tools else None
        if shown is not None and "tools" not in self.variables and XML_TOOLS in self.variables:
            variables = {XML_TOOLS: shown, **variables}
        try:
            parts, length = [], 0
            for part in self._template.generate(
                messages=[_with_reasoning(_plain_message(message), self.reasoning_field) for message in messages],
                tools=shown,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            ):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise RequestError(
                        f"the chat template makes a text of {length} characters", held=f"the limit is {MAX_CHARACTERS}"
                    )
                parts.append(part)
            return "".join(parts)
        except TemplateError as error:
            raise RequestError(f"the chat template of {self.origin} rejects these messages", why=str(error)) from None
        except RequestError:
            raise
        except MemoryError:
            raise
        except RecursionError:
            raise RequestError("these messages are nested too deeply", next="flatten them") from None
        except Exception as error:  # a template is a program and can fail in any way on unexpected messages
            raise RequestError(
                f"the chat template of {self.origin} cannot render these messages", why=f"{type(error).__name__}: {error}"
            ) from None
        finally:
            _deadline.at = math.inf  # what is compiled next on this thread has none


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


def _with_reasoning(message: dict[str, Any], field: str) -> dict[str, Any]:
    """A message whose reasoning has the name under which the template reads it (changed in place).

    The template of gpt-oss rejects a call with both reasoning and content, and writes either as reasoning: they are joined.
    """
    if message["role"] != "assistant":
        return message
    thoughts = [thought for name in REASONING_FIELDS if (thought := message.pop(name, None))]
    if thoughts:
        message[field] = thoughts[0]
        if field == "thinking" and message.get("tool_calls") and message.get("content"):
            message[field], message["content"] = f"{thoughts[0]}\n\n{message['content']}", ""
    return message


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
