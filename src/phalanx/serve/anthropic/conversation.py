# SPDX-License-Identifier: Apache-2.0
"""A request of Anthropic's Messages API becomes a chat: blocks become messages, and fields those of the same meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from phalanx.serve.anthropic.schema import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)
from phalanx.serve.openai.api_errors import MESSAGES, bad_request
from phalanx.serve.openai.body import validated
from phalanx.serve.openai.long_answers import encode_small
from phalanx.serve.openai.prepare import Answer, Endpoint, prepare_chat
from phalanx.serve.openai.prompt_context import PromptContext
from phalanx.serve.openai.prompts import encode_chat
from phalanx.serve.openai.schema.chat import ChatRequest

_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking on or off."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that Anthropic's coding agent sends for Anthropic's accounting. It differs in each request:
no prompt would have a prefix in the cache."""


def _counted(request: CountTokensRequest, context: PromptContext) -> bytes:
    """The body of the answer."""
    return encode_small({"input_tokens": len(encode_chat(chat_request(request, context), context))})


def chat_request(request: CountTokensRequest, context: PromptContext) -> ChatRequest:
    """The chat that asks for the same. Raises ApiError 400 naming the field."""
    messages = [*_system(request), *_turns(request.messages)]
    if not messages:
        raise bad_request("messages: none has a block", param="messages", code="invalid_value")
    tools = [tool for tool in request.tools or () if isinstance(tool, CustomTool)]
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools:
        body["tools"] = [{"type": "function", "function": _function(tool)} for tool in tools]
    if request.tool_choice is not None:
        body |= _tool_choice(request)
    if request.thinking is not None:
        body |= _thinking(request, context)
    if (output := request.output_config) is not None:
        body["reasoning_effort"] = output.effort
        if output.format is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.format.schema_}}
    if isinstance(request, MessagesRequest):
        body |= {name: getattr(request, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        body["stop"] = request.stop_sequences
    return validated(body, ChatRequest)


def _system(request: CountTokensRequest) -> list[dict[str, Any]]:
    texts = [request.system] if isinstance(request.system, str) else [_text(block) for block in request.system or ()]
    text = "\n\n".join(text for text in texts if not text.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _turns(messages: list[TurnMessage]) -> list[dict[str, Any]]:
    """The messages of a chat. Consecutive texts of one role are one message, as templates expect; results of tools are not."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        for piece in _assistant(message) if message.role == "assistant" else _others(message):
            last = chat[-1] if chat else {}
            if last.get("role") == piece["role"] and piece["role"] in ("user", "system"):
                last["content"] += "\n" + piece["content"]
            elif last.get("role") == "assistant" == piece["role"] and not last.get("tool_calls"):
                _join(last, piece)
            else:
                chat.append(piece)
    return chat


def _others(message: TurnMessage) -> Iterator[dict[str, Any]]:
    """The messages of a turn of the user: texts, and results of tools."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, TextBlock):
            yield {"role": message.role, "content": block.text}
        elif isinstance(block, ToolResultBlock):
            content = block.content
            text = content if isinstance(content, str) else "\n".join(_text(part) for part in content or ())
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        else:
            raise _misplaced(block, message.role)


def _assistant(message: TurnMessage) -> Iterator[dict[str, Any]]:
    """The message of a turn of the model: what it thought, wrote and called."""
    if isinstance(message.content, str):
        yield {"role": "assistant", "content": message.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(block, message.role)
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    yield turn


def _join(last: dict[str, Any], piece: dict[str, Any]) -> None:
    """Append a message of the assistant to the one before it."""
    last["content"] += piece["content"]
    thoughts = [text for text in (last.get("reasoning_content"), piece.get("reasoning_content")) if text]
    if thoughts:
        last["reasoning_content"] = "\n".join(thoughts)
    if "tool_calls" in piece:
        last["tool_calls"] = piece["tool_calls"]


def _misplaced(block: Any, role: str) -> Exception:
    return bad_request(f"messages: a block of type {block.type!r} cannot be in a message of the {role}", param="messages")


def _text(block: Any) -> str:
    text: str = block.text  # others are refused by the schema
    return text


def _function(tool: CustomTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


def _tool_choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    assert choice is not None
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request(
                "tool_choice.name: the type 'tool' needs it", param="tool_choice.name", code="missing_required_parameter"
            )
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        chosen = _CHOICES[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _thinking(request: CountTokensRequest, context: PromptContext) -> dict[str, Any]:
    """What switches thinking on or off: variables that the chat template reads. `disabled` leaves it out of the answer anyway."""
    assert request.thinking is not None
    thinks = request.thinking.type != "disabled"
    names = context.tokenizer.template_variables(tools=bool(request.tools)) if context.tokenizer.has_chat_template else ()
    variables = {name: thinks for name in _THINKING_VARIABLES if name in names}
    return {"chat_template_kwargs": variables or None, "include_reasoning": thinks}


MESSAGE_CHATS = Endpoint(
    MESSAGES, MessagesRequest, lambda request, context, _: prepare_chat(chat_request(request, context), context)
)
TOKEN_COUNTS = Endpoint(
    f"{MESSAGES}/count_tokens", CountTokensRequest, lambda request, context, _: Answer(partial(_counted, request, context))
)
