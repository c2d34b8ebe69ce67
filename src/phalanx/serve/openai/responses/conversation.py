# SPDX-License-Identifier: Apache-2.0
"""A request for a response becomes a chat: items become messages, and fields those of the same meaning."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.body import validated
from phalanx.serve.openai.responses.store import Item
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.responses_request import (
    SAMPLING,
    AllowedFunctions,
    ChosenFunction,
    FunctionTool,
    InputMessage,
    ItemReference,
    OutputJsonObject,
    OutputJsonSchema,
    ReasoningItem,
    ResponsesRequest,
)

MAX_REFERENCES = 64
"""References to stored items in one input."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class Items(Protocol):
    """The items of stored responses."""

    def item(self, item_id: str) -> Item | None:
        """The item of this id."""

    def conversation(self, response_id: str) -> list[Item]:
        """All items up to the end of this response. Raises ApiError 400 if there is none that a request may go on after."""


def input_items(request: ResponsesRequest, store: Items) -> list[Item]:
    """The items of a request's input, each with an id and a type. Raises ApiError 400 for a reference that leads nowhere."""
    if isinstance(request.input, str):
        return [_message("user", [{"type": "input_text", "text": request.input}])]
    items, references = [], 0
    for i, item in enumerate(request.input):
        if isinstance(item, ItemReference):
            references += 1
            if references > MAX_REFERENCES:
                raise bad_request(
                    f"the input has more than {MAX_REFERENCES} references to items; use previous_response_id for a conversation",
                    param="input", code="too_many_references",
                )  # fmt: skip
            known = store.item(item.id)
            if known is None:
                raise bad_request(
                    f"input[{i}]: no stored response has the item {item.id!r}", param=f"input[{i}].id", code="not_found"
                )
            items.append(known)
        elif isinstance(item, InputMessage):
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts = [{"type": kind, "text": item.content}] if isinstance(item.content, str) else _parts(item.content, kind)
            items.append(_message(item.role, parts))
        else:
            plain = item.model_dump(exclude_none=True)
            if isinstance(item, ReasoningItem):
                plain.setdefault("summary", [])
            items.append({"id": new_id(plain["type"]), **plain})
    return items


def new_id(kind: str) -> str:
    """A new id of an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def chat_request(request: ResponsesRequest, items: Iterable[Item]) -> ChatRequest:
    """The chat whose answer is the response. items: the whole conversation. Raises ApiError 400."""
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages_of(items, request.instructions),
        "max_completion_tokens": request.max_output_tokens,
        **{name: getattr(request, name) for name in SAMPLING},
    }
    if wants_logprobs(request):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.tools:
        body["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in request.tools
            if isinstance(tool, FunctionTool)
        ]
    body["tool_choice"] = _tool_choice(request)
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    answer = request.text.format if request.text is not None else None
    if isinstance(answer, OutputJsonSchema):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": answer.name, "schema": answer.schema_}}
    elif isinstance(answer, OutputJsonObject):
        body["response_format"] = {"type": "json_object"}
    return validated(body, ChatRequest)


def wants_logprobs(request: ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())


def messages_of(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a conversation. What the assistant wrote and called in one turn is one message, as templates expect.

    Instructions, and system messages at the beginning, are one system message: many templates take only one.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    thoughts: list[str] = []
    for item in items:
        kind = item["type"]
        last = messages[-1] if messages else {}
        if kind == "reasoning":
            thoughts += [part["text"] for part in item.get("content") or ()]
        elif kind == "function_call":
            call = {
                "id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item.get("arguments") or ""},
            }  # fmt: skip
            if last.get("role") != "assistant" or thoughts:
                last = _assistant(messages, thoughts)
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        else:
            text, role = _text(item["content"]), item["role"]
            if role == "assistant":
                _assistant(messages, thoughts)["content"] = text
            elif role in ("system", "developer") and [message["role"] for message in messages] == ["system"]:
                last["content"] += f"\n\n{text}"
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": text})
    return messages


def _assistant(messages: list[dict[str, Any]], thoughts: list[str]) -> dict[str, Any]:
    """A new message of the assistant, with what it thought before."""
    message: dict[str, Any] = {"role": "assistant"}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
        thoughts.clear()
    messages.append(message)
    return message


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, ChosenFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        named = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
    return choice


def _message(role: str, parts: list[dict[str, Any]]) -> Item:
    return {"id": new_id("message"), "type": "message", "role": role, "status": "completed", "content": parts}


def _parts(content: Sequence[Any], kind: str) -> list[dict[str, Any]]:
    return [{**part.model_dump(), **({} if part.type == "refusal" else {"type": kind})} for part in content]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
