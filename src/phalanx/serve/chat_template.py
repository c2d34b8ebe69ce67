# SPDX-License-Identifier: Apache-2.0
"""Render messages into one prompt text with the checkpoint's Jinja chat template, in a sandbox.

A template comes from the internet. So it runs in a sandbox with limits of time, memory and length (`template_sandbox`), and gets
only plain JSON data. It has what the reference renderer (transformers' `apply_chat_template`) provides: `messages`, `tools`,
`documents`, `add_generation_prompt`, the special tokens by name, the filter `tojson`, and the functions `raise_exception` and
`strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.meta import find_undeclared_variables

from phalanx.errors import ModelError, RequestError
from phalanx.serve.template_sandbox import BoundedEnvironment, limit_length, limit_value

MessageDict = Mapping[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which templates look for the reasoning of an earlier answer: Qwen3 and most others in the first, gpt-oss
in the last."""

_MAX_JSON_INDENT = 64


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

        Raises RequestError with the template's own message if the template rejects the messages, and if it takes longer than the
        limits of `template_sandbox` allow, or writes more.
        """
        self._environment.begin()
        try:
            parts, length = [], 0
            for part in self._template.generate(
                messages=[_with_reasoning(_plain_message(message), self.reasoning_field) for message in messages],
                tools=_plain(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            ):
                length += len(part)
                limit_length(length)
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
        finally:
            self._environment.end()


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
    limit_value(value)
    if indent is not None:
        size = indent if isinstance(indent, int) else len(indent)
        if size > _MAX_JSON_INDENT:
            raise RequestError(f"the chat template indents JSON by {size}", held=f"the limit is {_MAX_JSON_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
