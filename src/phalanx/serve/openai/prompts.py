# SPDX-License-Identifier: Apache-2.0
"""Turn prompts and messages into token ids. Long texts are tokenized on a thread, not on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.errors import RequestError
from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.body import check_counts, json_object
from phalanx.serve.openai.request_params import check_token
from phalanx.serve.openai.schema.chat import AssistantMessage, ChatRequest, Content, RequestMessage
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.service import ServingEngine

MAX_INLINE_CHARACTERS = 512
"""A text of this length is tokenized before a thread would even start while other requests stream."""
MAX_INLINE_TOKENS = 2**14
MAX_ARGUMENTS = 2**20
"""Characters in the arguments of one call."""
TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "tokenize"})
"""Variables of a chat template that the server sets itself."""


def prompts_of(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts of a request as a list, whatever their form in the request."""
    prompt: Any = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    prompts: list[str] | list[list[int]] = prompt
    return prompts


def encodes_quickly(prompts: Sequence[str] | Sequence[list[int]]) -> bool:
    """Whether the prompts are so short that a thread would cost more than it saves."""
    tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return (
        tokens <= MAX_INLINE_TOKENS and sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= MAX_INLINE_CHARACTERS
    )


def renders_quickly(request: ChatRequest) -> bool:
    """Whether a conversation is so short. One with tools, calls or variables is not: templates write them into the prompt."""
    calls = any(isinstance(message, AssistantMessage) and message.tool_calls for message in request.messages)
    if request.tools or calls or request.chat_template_kwargs:
        return False
    return sum(len(_text(message.content) or "") for message in request.messages) <= MAX_INLINE_CHARACTERS


def encode_prompts(prompts: Sequence[str] | Sequence[list[int]], engine: ServingEngine) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError or RequestError for an empty prompt, or one that is invalid for this model."""
    encoded = []
    for prompt in prompts:
        tokens = engine.encode(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(prompt, str):
            check_token(max(tokens), engine.facts, "prompt")
        encoded.append(_not_empty(tokens))
    return encoded


def encode_chat(request: ChatRequest, engine: ServingEngine) -> list[int]:
    """Token ids of a conversation, by the model's chat template. Raises as `encode_prompts`, and if the template rejects it."""
    if reserved := TEMPLATE_NAMES & set(request.chat_template_kwargs or ()):
        name = sorted(reserved)[0]
        raise bad_request(f"chat_template_kwargs: {name!r} is set by the server", param="chat_template_kwargs")
    tools = None
    if request.tools and request.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    calls = [call for message in request.messages if isinstance(message, AssistantMessage) for call in message.tool_calls or ()]
    if calls:  # each is parsed by itself, and together they are held in memory
        check_counts(",".join(call.function.arguments for call in calls).encode(errors="replace"), "messages")
    messages = [_plain(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    try:
        text = engine.tokenizer.apply_chat_template(messages, tools=tools, **(request.chat_template_kwargs or {}))
    except RequestError as error:
        raise bad_request(str(error), param="messages", code="invalid_messages") from None
    return _not_empty(engine.encode(text, add_special_tokens=False))


def _not_empty(tokens: list[int]) -> list[int]:
    if not tokens:
        raise bad_request("the prompt is empty", param="prompt", code="empty_prompt")
    return tokens


def _plain(message: RequestMessage, where: str) -> dict[str, Any]:
    """A message in the form that templates expect: one text, arguments as objects, and the role `developer` as `system`."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = _text(message.content)
    if getattr(message, "name", None):
        plain["name"] = message.name  # type: ignore[union-attr]
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments, f"{where}.tool_calls[{i}].function.arguments"),
                    },
                }
                for i, call in enumerate(message.tool_calls)
            ]
        elif plain["content"] is None:
            raise bad_request(f"{where}: an assistant message needs content or tool_calls", param=where)
        plain["content"] = plain["content"] or ""
    elif message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _arguments(text: str, where: str) -> dict[str, Any]:
    if len(text) > MAX_ARGUMENTS:
        raise bad_request(f"{where} is longer than {MAX_ARGUMENTS} characters", param=where, code="arguments_too_large")
    return json_object(text, where)


def _text(content: Content | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
