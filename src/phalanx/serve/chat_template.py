# SPDX-License-Identifier: Apache-2.0
"""Render messages into one prompt text with the checkpoint's Jinja chat template, in a sandbox.

A template comes from the internet. So it runs in Jinja's immutable sandbox and gets only plain JSON data. It has what the reference
renderer (transformers' `apply_chat_template`) provides: `messages`, `tools`, `documents`, `add_generation_prompt`, the special
tokens by name, the filter `tojson`, and the functions `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.errors import ModelError, RequestError

MessageDict = Mapping[str, Any]


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (the interface of Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One compiled template. Several threads may render it at once."""

    def __init__(self, source: str, *, origin: str) -> None:
        """origin: where the template comes from, for errors. Raises ModelError if it does not compile."""
        self.source, self.origin = source, origin
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
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
        """The prompt text. Raises RequestError with the template's own message if the template rejects the messages."""
        try:
            return self._template.render(
                messages=[_plain_message(message) for message in messages],
                tools=_plain(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
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
