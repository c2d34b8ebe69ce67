# SPDX-License-Identifier: Apache-2.0
"""The process that reads large bodies: `python -m phalanx.serve.openai.large_bodies.worker`, started by `processes`.

It parses and validates a body, renders its messages and tokenizes its prompt, with a lower priority than the streams: the server
gets token ids and parameters, or an error. One body at a time.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import tokenizers

from phalanx import log
from phalanx.comm.launch import read_config
from phalanx.config.sampling_params import SamplingParams
from phalanx.serve import allocator
from phalanx.serve.engine_requests import build_request, check_request
from phalanx.serve.openai.api_errors import api_error_of, bad_request
from phalanx.serve.openai.body import check_counts, parse
from phalanx.serve.openai.large_bodies import messages
from phalanx.serve.openai.large_bodies.messages import (
    ApiErrorMessage,
    Prepared,
    ResponseBody,
    Setup,
    WantedConversation,
    WantedItem,
)
from phalanx.serve.openai.prepare import PreparedChat, prepare_chat, prepare_completion, prepare_response
from phalanx.serve.openai.prompt_context import PromptContextCopy
from phalanx.serve.openai.prompts import encode_chat, encode_prompts
from phalanx.serve.openai.request_params import require_model
from phalanx.serve.openai.responses.store import EncodedItems, Item, decode_items
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.fields import Body
from phalanx.serve.openai.schema.responses_request import ResponsesRequest
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from phalanx.serve.openai.tokenize import detokenized, tokenized
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.output_parsing.markers import Markers
from phalanx.serve.tokenizer import Tokenizer

MAX_REMAINING_VALUES = 2**16
"""Values of a request beside its prompt, such as those of the schemas of tools, which the server reads again in 10 ms."""
_STRUCTURED_OUTPUT = {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
_CONVERSATION = {
    "messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens",
}  # fmt: skip
_NO_MESSAGES = b'"messages":[{"role":"user","content":""}]'


Model = TypeVar("Model", bound=Body)


def main() -> None:
    config = read_config()
    log.configure("large bodies")
    allocator.configure()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(config["socket"])
        setup = messages.receive(connection)
        if setup is not None:
            Reader(connection, messages.decode_setup(setup)).run()


class Reader:
    """Reads the bodies that come over a connection, which is also how it asks for what the server stores (`Items`)."""

    def __init__(self, connection: socket.socket, setup: Setup) -> None:
        self._connection, self._names = connection, setup.names
        self._engine = engine_of(setup)
        self._routes: dict[str, Callable[[bytes, set[str]], ResponseBody | Prepared]] = {
            "completion": self._completion,
            "chat": self._chat,
            "response": self._response,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }
        self._trim: Callable[[int], Any] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def run(self) -> None:
        """Answer until the connection ends."""
        while (job := messages.receive(self._connection)) is not None:
            body = messages.receive(self._connection)
            if body is None:
                return
            reply = self._reply(messages.decode_job(job).route, bytes(body))
            messages.send(self._connection, messages.encode(reply))
            del job, body, reply
            if self._trim is not None:
                self._trim(0)

    def _reply(self, route: str, body: bytes) -> ResponseBody | Prepared | ApiErrorMessage:
        try:
            check_counts(body)
            return self._routes[route](body, set())
        except Exception as error:
            return ApiErrorMessage.of(api_error_of(error))

    def _read(self, body: bytes, model: type[Model], accepted: set[str]) -> Model:
        request = parse(body, model, accepted)
        require_model(getattr(request, "model", None), self._names)
        return request

    def _completion(self, body: bytes, accepted: set[str]) -> Prepared:
        request = self._read(body, CompletionRequest, accepted)
        prepared = prepare_completion(request, self._engine)
        tokens = encode_prompts(prepared.prompts, self._engine, request)
        for one in tokens:
            self._check(one, prepared.params)
        field = prepared.structured_output
        return Prepared(
            request=_remaining(request, {"prompt", *_STRUCTURED_OUTPUT}, b'"prompt":""'),
            params=prepared.params,
            token_ids=[messages.packed(one) for one in tokens],
            accepted=sorted(accepted),
            structured_output=None if field is None else field.structured_output,
            param=None if field is None else field.param,
            texts=[text for text in prepared.prompts if isinstance(text, str)] if request.echo else [],
        )

    def _chat(self, body: bytes, accepted: set[str]) -> Prepared:
        request = self._read(body, ChatRequest, accepted)
        return self._prepared_chat(prepare_chat(request, self._engine), accepted)

    def _prepared_chat(self, chat: PreparedChat, accepted: set[str]) -> Prepared:
        tokens = encode_chat(chat.request, self._engine)
        self._check(tokens, chat.params)
        field = chat.structured_output
        return Prepared(
            request=_remaining(chat.request, {*_CONVERSATION, *_STRUCTURED_OUTPUT}, _NO_MESSAGES),
            params=chat.params,
            token_ids=[messages.packed(tokens)],
            accepted=sorted(accepted),
            structured_output=None if field is None else field.structured_output,
            param=None if field is None else field.param,
        )

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        """Raise the error of the engine for a prompt that is too long: a body may have millions of tokens, which the server would
        hold up its streams to read."""
        if len(tokens) > self._engine.facts.max_seq_len:
            check_request(build_request("", tokens, params, []), self._engine.facts)

    def _response(self, body: bytes, accepted: set[str]) -> Prepared:
        request = self._read(body, ResponsesRequest, accepted)
        prepared = prepare_response(request, self._engine, self)
        reply = self._prepared_chat(prepared.chat, accepted)
        reply.chat, reply.items = reply.request, EncodedItems.of(_decoded(prepared.items))
        reply.request = _remaining(request, {"input"}, b'"input":""')
        return reply

    def _tokenize(self, body: bytes, accepted: set[str]) -> ResponseBody:
        request = self._read(body, TokenizeRequest, accepted)
        return ResponseBody(memoryview(tokenized(request, self._engine)), sorted(accepted))

    def _detokenize(self, body: bytes, accepted: set[str]) -> ResponseBody:
        request = self._read(body, DetokenizeRequest, accepted)
        return ResponseBody(memoryview(detokenized(request, self._engine)), sorted(accepted))

    # ---- Items: what the server stores ---------------------------------------------------------------------------------

    def item(self, item_id: str) -> Item | None:
        """The stored item of this id."""
        texts = self._stored(WantedItem(item_id))
        item: Item | None = msgspec.json.decode(texts[0]) if texts else None
        return item

    def conversation(self, response_id: str) -> list[Item]:
        """All items of a stored response's conversation. Raises ApiError 400 if there is none."""
        return [item for text in self._stored(WantedConversation(response_id)) for item in decode_items(text)]

    def _stored(self, wanted: WantedItem | WantedConversation) -> list[bytearray]:
        messages.send(self._connection, messages.encode(wanted))
        texts = messages.decode_text_count(self._frame())
        if texts.refused is not None:
            raise texts.refused.error()
        return [self._frame() for _ in range(texts.count)]

    def _frame(self) -> bytearray:
        frame = messages.receive(self._connection)
        if frame is None:
            raise SystemExit  # the server has ended
        return frame


def engine_of(setup: Setup) -> PromptContextCopy:
    """The engine that a server described."""
    backend = tokenizers.Tokenizer.from_str(setup.tokenizer)
    tokenizer = Tokenizer(backend, setup.special, setup.templates, origin=setup.origin)
    output: Any = OutputFormat  # the names of formats are plain texts here
    format_ = output(tokenizer, setup.reasoning, setup.tools, Markers(setup.markers))
    return PromptContextCopy(setup.facts, tokenizer, format_, setup.escape_special_tokens)


def _decoded(items: Sequence[Item] | EncodedItems) -> Sequence[Item]:
    assert not isinstance(items, EncodedItems)
    return items


def _remaining(request: Body, without: set[str], instead: bytes) -> bytes:
    """What is left of a request as JSON, with `instead` in place of the fields that it must have.

    Raises ApiError 400 if it has too many values.
    """
    content = request.model_dump_json(by_alias=True, exclude_unset=True, exclude=without).encode()
    if content.count(b",") > MAX_REMAINING_VALUES:
        message = f"the request has more than {MAX_REMAINING_VALUES} values beside its prompt"
        raise bad_request(message, code="too_many_values")
    return b"{%b%b%b" % (instead, b"," if content != b"{}" else b"", content[1:])


if __name__ == "__main__":
    main()
