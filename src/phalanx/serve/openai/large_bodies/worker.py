# SPDX-License-Identifier: Apache-2.0
"""The task of a fork that reads a large body (`forks.worker`).

It parses and validates the body, renders its messages and tokenizes its prompt, with a lower priority than the streams: the server
gets token ids and parameters, or an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import tokenizers

from phalanx.config.sampling_params import SamplingParams
from phalanx.errors import PhalanxError
from phalanx.serve.anthropic.conversation import MESSAGE_CHATS, TOKEN_COUNTS
from phalanx.serve.engine_requests import build_request, check_request
from phalanx.serve.openai.api_errors import api_error_of, bad_request
from phalanx.serve.openai.body import check_counts, parse
from phalanx.serve.openai.large_bodies import messages
from phalanx.serve.openai.large_bodies.messages import ApiErrorMessage, PreparedMessage, ResponseBody, Setup, Wanted, too_much
from phalanx.serve.openai.prepare import (
    CHATS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    SCORE,
    STORED_RESPONSES,
    Answer,
    Endpoint,
    Prepared,
    PreparedResponse,
)
from phalanx.serve.openai.prompt_context import PromptContextCopy
from phalanx.serve.openai.prompts import naming
from phalanx.serve.openai.request_params import require_model
from phalanx.serve.openai.responses.store import EncodedItems, Item, decode_items
from phalanx.serve.openai.schema.fields import Body
from phalanx.serve.openai.tokenize import DETOKENIZE, TOKENIZE
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.tokenizer import Tokenizer

MAX_REMAINING_VALUES = 2**16
"""Values of a request beside its prompt, such as those of the schemas of tools, which the server reads again in 10 ms."""
_READ = {
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "prediction",
}  # fmt: skip
"""What the params, the structured output or the prompt say."""
ENDPOINTS: dict[str, Endpoint[Any, Any]] = {
    one.path: one
    for one in (
        CHATS, COMPLETIONS, STORED_RESPONSES, EMBEDDINGS, RERANK, SCORE, MESSAGE_CHATS, TOKEN_COUNTS, TOKENIZE, DETOKENIZE
    )
}  # fmt: skip


def make_task(data: bytes) -> Callable[[Connection], None]:
    """data: a `Setup`. What each fork would have to find out is found out before."""
    setup = messages.decode_setup(data)
    context = engine_of(setup)
    tokenizer = context.tokenizer
    _ = tokenizer.max_token_characters, tokenizer.added_tokens
    for tools in (False, True):
        with suppress(PhalanxError):  # a conversation is refused then
            tokenizer.template_variables(tools=tools)
    return lambda connection: Reader(connection, context).run()


class Reader:
    """Reads the body that comes over a connection, which is also how it asks for what the server stores (`Items`)."""

    def __init__(self, connection: Connection, context: PromptContextCopy) -> None:
        self._connection, self._engine = connection, context
        self._names: Sequence[str] = ()

    def run(self) -> None:
        """Answer."""
        opening = messages.decode_opening(self._connection.recv_bytes())
        self._names = opening.names
        parts = list(iter(self._connection.recv_bytes, b""))
        self._connection.send_bytes(messages.encode(self._reply(ENDPOINTS[opening.path], b"".join(parts))))

    def _reply(self, endpoint: Endpoint[Any, Any], body: bytes) -> ResponseBody | PreparedMessage | ApiErrorMessage:
        accepted: set[str] = set()
        try:
            check_counts(body)
            request = parse(body, endpoint.request, accepted)
            require_model(getattr(request, "model", None), self._names)
            return self._message(endpoint.prepare(request, self._engine, self), sorted(accepted))
        except MemoryError:
            return ApiErrorMessage.of(too_much())
        except Exception as error:
            return ApiErrorMessage.of(api_error_of(error))

    def _message(self, result: Answer | PreparedResponse | Prepared[Any], accepted: list[str]) -> ResponseBody | PreparedMessage:
        if isinstance(result, Answer):
            return ResponseBody(memoryview(result.content()), accepted)
        if isinstance(result, Prepared):
            return self._prepared(result, accepted)
        message = self._prepared(result.chat, accepted)
        message.response, message.items = _remaining(result.request), EncodedItems.of(_decoded(result.items))
        return message

    def _prepared(self, prepared: Prepared[Any], accepted: list[str]) -> PreparedMessage:
        request, field = prepared.request, prepared.structured_output
        tokens = prepared.encoded(self._engine)
        for index, one in enumerate(tokens):
            with naming(prepared.name(index)):
                self._check(one, prepared.params)
        return PreparedMessage(
            kind=type(request).__name__,
            request=_remaining(request),
            params=prepared.params,
            token_ids=[messages.packed(one) for one in tokens],
            accepted=accepted,
            structured_output=None if field is None else field.structured_output,
            param=None if field is None else field.param,
            texts=[text for text in prepared.prompts if isinstance(text, str)] if prepared.returns_prompts else [],
        )

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        """Raise the error of the engine for a prompt that is too long: a body may have millions of tokens, which the server would
        hold up its streams to read."""
        if len(tokens) > self._engine.facts.max_seq_len:
            check_request(build_request("", tokens, params, []), self._engine.facts)

    # ---- Items: what the server stores ---------------------------------------------------------------------------------

    def item(self, item_id: str) -> Item | None:
        """The stored item of this id."""
        texts = self._stored(Wanted(item_id, conversation=False))
        item: Item | None = msgspec.json.decode(texts[0]) if texts else None
        return item

    def conversation(self, response_id: str) -> list[Item]:
        """All items of a stored response's conversation. Raises ApiError 400 if there is none."""
        return [item for text in self._stored(Wanted(response_id, conversation=True)) for item in decode_items(text)]

    def _stored(self, wanted: Wanted) -> list[bytes]:
        self._connection.send_bytes(messages.encode(wanted))
        texts = messages.decode_text_count(self._connection.recv_bytes())
        if texts.refused is not None:
            raise texts.refused.error()
        return [self._connection.recv_bytes() for _ in range(texts.count)]


def engine_of(setup: Setup) -> PromptContextCopy:
    """The engine that a server described."""
    backend = tokenizers.Tokenizer.from_str(setup.tokenizer)
    backend.encode_special_tokens = setup.split_special_tokens
    tokenizer = Tokenizer(backend, setup.special, setup.templates, origin=setup.origin)
    output: Any = OutputFormat  # the names of formats are plain texts here
    format_ = output(tokenizer, setup.reasoning, setup.tools, Markers(setup.markers))
    return PromptContextCopy(setup.facts, tokenizer, format_, setup.escape_special_tokens, setup.yes_no)


def _decoded(items: Sequence[Item] | EncodedItems) -> Sequence[Item]:
    assert not isinstance(items, EncodedItems)
    return items


def _remaining(request: Body) -> bytes:
    """What is left of a request as JSON, with something in place of its prompt. Raises ApiError 400 if it has too many values."""
    instead = messages.PLACEHOLDERS[type(request)]
    without = {*_READ, *json.loads(b"{%b}" % instead)}
    content = request.model_dump_json(by_alias=True, exclude_unset=True, exclude=without).encode()
    if content.count(b",") > MAX_REMAINING_VALUES:
        message = f"the request has more than {MAX_REMAINING_VALUES} values beside its prompt"
        raise bad_request(message, code="too_many_values")
    return b"{%b%b%b" % (instead, b"," if content != b"{}" else b"", content[1:])
