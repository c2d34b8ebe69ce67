# SPDX-License-Identifier: Apache-2.0
"""Turn prompts and messages into token ids. Long texts are tokenized on a thread, not on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any

from phalanx.errors import PromptTooLong, RequestError
from phalanx.serve.openai.api_errors import ApiError, api_error_of, bad_request
from phalanx.serve.openai.body import check_counts, completed_object
from phalanx.serve.openai.plain_contents import Breaks
from phalanx.serve.openai.prompt_context import PromptContext, encode
from phalanx.serve.openai.request_params import check_token
from phalanx.serve.openai.schema.chat import AssistantMessage, ChatRequest, Prediction, RefusalPart, RequestMessage, TextPart
from phalanx.serve.openai.schema.fields import SampledRequest
from phalanx.serve.openai.schema.tokenize import TokenizeRequest
from phalanx.serve.openai.yes_no import messages_of

MAX_INLINE_CHARACTERS = 512
"""A text of this length is tokenized before a thread would even start while other requests stream."""
MAX_INLINE_TOKENS = 2**14
MAX_INLINE_TEXTS = 32
"""Messages of a conversation, or prompts of a request: also an empty one takes time."""
PREDICTED_CHARACTERS = 8
"""Of each token of a prediction that is looked up, at most: the rest of a long text is not tokenized."""
TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt", "tokenize"})
"""Variables of a chat template that the server sets itself."""


def prompts_of(prompt: Any) -> list[str] | list[list[int]]:
    """Prompts as a list, whatever their form in a request."""
    prompts: list[str] | list[list[int]] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return prompts


def encodes_quickly(prompts: Sequence[str] | Sequence[list[int]]) -> bool:
    """Whether the prompts are so short that a thread would cost more than it saves."""
    if len(prompts) > MAX_INLINE_TEXTS:
        return False
    tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return (
        tokens <= MAX_INLINE_TOKENS and sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= MAX_INLINE_CHARACTERS
    )


def renders_quickly(request: ChatRequest) -> bool:
    """Whether a conversation is so short. One with tools, calls or variables is not: templates write them into the prompt."""
    if len(request.messages) > MAX_INLINE_TEXTS:
        return False
    calls = any(isinstance(message, AssistantMessage) and message.tool_calls for message in request.messages)
    if request.tools or calls or request.chat_template_kwargs:
        return False
    texts = [_text(message.content) for message in request.messages]
    texts.append(None if request.prediction is None else _text(request.prediction.content))
    texts += [getattr(message, name, None) for message in request.messages for name in ("reasoning_content", "reasoning")]
    return sum(len(text or "") for text in texts) <= MAX_INLINE_CHARACTERS


def encode_prompts(
    prompts: Sequence[str] | Sequence[list[int]], context: PromptContext, request: SampledRequest | None = None
) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError or RequestError for an empty prompt, or one that is invalid for this model."""
    special = request is None or request.add_special_tokens is not False
    encoded = []
    each: Sequence[str | list[int]] = prompts
    for index, prompt in enumerate(each):
        with naming(prompt_name(index, len(prompts))):
            tokens = encode(context, prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            if not isinstance(prompt, str):
                check_token(max(tokens), context.facts, "prompt")
            encoded.append(_not_empty(tokens if request is None else truncated(tokens, request, context)))
    return encoded


def encode_pairs(
    pairs: Sequence[tuple[str, str]], context: PromptContext, instruction: str | None, name: Callable[[int], str | None]
) -> list[list[int]]:
    """Token ids of the question whether the second text of each pair fits the first. Raises as `encode_prompts`. name: as of
    `Prepared`."""
    assert context.yes_no is not None
    encoded = []
    for index, (query, document) in enumerate(pairs):
        with naming(name(index)):
            breaks = Breaks(messages_of(query, document, instruction), context.tokenizer if context.escape_special_tokens else None)
            parts = breaks.parts(context.yes_no.render(breaks.messages))
            tokens = [encode(context, part, add_special_tokens=False, continues=i > 0) for i, part in enumerate(parts)]
            encoded.append(list(chain.from_iterable(tokens)))
    return encoded


def shortened(text: str, count: int | None, context: PromptContext) -> str:
    """The beginning of a text that has so many tokens, a character at least; None: the text. Not its token ids, since a tokenizer
    may add some behind them."""
    if count is None or len(text.encode()) <= count:  # a token has a byte at least
        return text
    text = text[: count * context.tokenizer.max_token_characters]
    tokens = context.tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) <= count:
        return text
    beginning = context.tokenizer.decode(tokens[:count], skip_special_tokens=False)
    return (beginning if text.startswith(beginning) else beginning.rstrip("\ufffd")) or text[:1]  # behind a part of a character


def prompt_name(index: int, count: int) -> str | None:
    """What errors call one of so many prompts; None: the prompt."""
    return None if count <= 1 else f"prompt[{index}]"


@contextmanager
def naming(name: str | None) -> Iterator[None]:
    """An error inside is about this one of several prompts, such as prompt[3]."""
    try:
        yield
    except (ApiError, PromptTooLong) as error:
        known = api_error_of(error)
        if name is None or known.param != "prompt":
            raise
        message = f"{name}: {known.message.removeprefix('prompt: ')}"
        raise ApiError(known.status, message, param=name, code=known.code) from None


def encode_chat(request: ChatRequest | TokenizeRequest, context: PromptContext) -> list[int]:
    """Token ids of a conversation, by the model's chat template. Raises as `encode_prompts`, and if the template rejects it."""
    if reserved := TEMPLATE_NAMES & set(request.chat_template_kwargs or ()):
        name = sorted(reserved)[0]
        raise bad_request(f"chat_template_kwargs: {name!r} is set by the server", param="chat_template_kwargs")
    tools, variables = None, dict(request.chat_template_kwargs or {})
    choice = None
    if isinstance(request, ChatRequest):
        choice = request.tool_choice
        variables = {**reasoning_variables(request, context), **variables}
    if request.tools and choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    messages = request.messages or []
    calls = [call for message in messages if isinstance(message, AssistantMessage) for call in message.tool_calls or ()]
    if calls:  # each is parsed by itself, and together they are held in memory
        check_counts(",".join(call.function.arguments or "" for call in calls).encode(errors="replace"), "messages")
    plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
    text, breaks = _rendered(request, plain, tools, variables, context)
    special = bool(request.add_special_tokens)
    tokens: list[int] = []
    for i, part in enumerate(breaks.parts(text)):
        tokens += encode(context, part, add_special_tokens=special, continues=i > 0)
    return _not_empty(truncated(tokens, request, context) if isinstance(request, ChatRequest) else tokens)


def encode_prediction(prediction: Prediction, context: PromptContext) -> list[int]:
    """Token ids of a predicted answer: the first ones, as many as the engine looks up. A hint is cut rather than refused."""
    limit = context.facts.max_prediction
    if not limit:
        return []
    content = prediction.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    tokens = context.tokenizer.encode_continuation(text[: limit * PREDICTED_CHARACTERS])[:limit]
    return list(takewhile(lambda token: token < context.facts.vocab_size, tokens))


def _rendered(
    request: ChatRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    context: PromptContext,
) -> tuple[str, Breaks]:
    """The text of the prompt, and the breaks in it that keep the texts of special tokens in the request from becoming tokens."""
    escaped = context.tokenizer if context.escape_special_tokens else None
    breaks = Breaks(messages, escaped, tools=tools, variables=variables)
    begin = request.add_generation_prompt is not False
    if request.continue_final_message:
        if begin:
            raise bad_request(
                "continue_final_message needs add_generation_prompt: false, since the last message goes on",
                param="continue_final_message",
            )
        breaks.messages[-1]["content"] += breaks.end
    try:
        text = context.tokenizer.apply_chat_template(
            breaks.messages, tools=breaks.tools, add_generation_prompt=begin, **breaks.variables
        )
    except RequestError as error:
        raise bad_request(str(error), param="messages", code="invalid_messages") from None
    if not request.continue_final_message:
        return text, breaks
    continued, end, _ = text.rpartition(breaks.end)
    if not end:
        raise bad_request(
            "continue_final_message: the chat template does not write the last message", param="continue_final_message"
        )
    return continued, breaks


def reasoning_variables(request: ChatRequest, context: PromptContext) -> dict[str, Any]:
    """What `reasoning_effort` is for the chat template; empty if the template reads nothing of the kind."""
    if request.reasoning_effort is None or not context.tokenizer.has_chat_template:
        return {}
    names = context.tokenizer.template_variables(tools=bool(request.tools))
    variables: dict[str, Any] = {}
    if "reasoning_effort" in names:
        variables["reasoning_effort"] = request.reasoning_effort
    if "enable_thinking" in names and request.reasoning_effort == "none":
        variables["enable_thinking"] = False
    return variables


def truncated(tokens: list[int], request: SampledRequest, context: PromptContext) -> list[int]:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` says."""
    count = request.truncate_prompt_tokens
    if count is None:
        return tokens
    if count == 0:
        raise bad_request("truncate_prompt_tokens=0 leaves no prompt", param="truncate_prompt_tokens")
    if count < 0:
        limit = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None) or 1
        count = max(1, context.facts.max_seq_len - limit)
    return tokens[-count:]


def _not_empty(tokens: list[int]) -> list[int]:
    if not tokens:
        raise bad_request("the prompt is empty", param="prompt", code="empty_prompt")
    return tokens


def _plain(message: RequestMessage, where: str) -> dict[str, Any]:
    """A message in the form that templates expect: one text, arguments as objects, and the role `developer` as `system`."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = _text(message.content)
    if getattr(message, "name", None):
        plain["name"] = message.name
    if isinstance(message, AssistantMessage):
        if not plain["content"] and message.refusal is not None:
            plain["content"] = message.refusal
        for name in ("reasoning_content", "reasoning"):
            if text := getattr(message, name):
                plain["reasoning_content"] = text
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": completed_object(call.function.arguments or ""),
                    },
                }
                for call in message.tool_calls
            ]
        elif plain["content"] is None and "reasoning_content" not in plain:
            raise bad_request(f"{where}: an assistant message needs content or tool_calls", param=where)
        plain["content"] = plain["content"] or ""
    elif message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(content: str | Sequence[TextPart | RefusalPart] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
