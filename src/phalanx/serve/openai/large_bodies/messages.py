# SPDX-License-Identifier: Apache-2.0
"""What a server and the forks that read its large bodies say to each other: each message is a frame of a `Connection`.

A fork gets an `Opening`, then the body in parts, then an empty frame. It may ask for what is stored (`Wanted`); the
answer is a `TextCount`, and its texts as frames. It ends with `PreparedMessage`, `ResponseBody` or `ApiErrorMessage`.

What may have megabytes is a frame of its own, or a view into the frame it came in: a copy would take the server's interpreter lock
for as long as it takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import EngineFacts
from phalanx.serve.openai.api_errors import ApiError, bad_request
from phalanx.serve.openai.responses.store import EncodedItems
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.embeddings import EmbeddingsRequest, RerankRequest, ScoreRequest
from phalanx.serve.openai.schema.fields import Body
from phalanx.serve.openai.schema.responses_request import ResponsesRequest
from phalanx.serve.openai.yes_no import YesNo

MAX_SECONDS = 20
"""CPU time for one body. One at the size limit that may be answered takes a second."""
MAX_BYTES = 2**30
"""Memory for one body. One at the size limit takes some 100 MiB."""
PLACEHOLDERS: dict[type[Body], bytes] = {
    ChatRequest: b'"messages":[{"role":"user","content":""}]',
    CompletionRequest: b'"prompt":""',
    EmbeddingsRequest: b'"input":""',
    RerankRequest: b'"query":" ","documents":[""]',
    ScoreRequest: b'"text_1":"","text_2":""',
    ResponsesRequest: b'"input":""',
}
"""What a request has in place of its prompt where a fork has read that."""


class Setup(msgspec.Struct):
    """The engine whose prompts are made. tokenizer: the text of its tokenizer.json."""

    facts: EngineFacts
    tokenizer: str
    special: dict[str, str]
    split_special_tokens: bool
    templates: dict[str, str]
    origin: str
    reasoning: str | None
    tools: str | None
    markers: dict[str, int]
    escape_special_tokens: bool
    yes_no: YesNo | None


class Opening(msgspec.Struct):
    """Of a body. path: of the endpoint. names: of the model and of the adapters that there are now."""

    path: str
    names: list[str]


class Wanted(msgspec.Struct, tag=True):
    """The stored item of this id, or all items of the conversation of a stored response."""

    id: str
    conversation: bool


class ApiErrorMessage(msgspec.Struct, tag=True):
    """The request is answered with an error: the fields of an ApiError (kind: its type)."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None
    headers: dict[str, str]

    @classmethod
    def of(cls, error: ApiError) -> ApiErrorMessage:
        return cls(error.status, error.message, error.type, error.param, error.code, error.headers)

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, type=self.kind, param=self.param, code=self.code, headers=self.headers)


class TextCount(msgspec.Struct):
    """So many texts follow, each as a frame; or why there are none."""

    count: int
    refused: ApiErrorMessage | None = None


class ResponseBody(msgspec.Struct, tag=True):
    """The body of the answer. accepted: the fields of the request that had no effect."""

    content: memoryview
    accepted: list[str]


class PreparedMessage(msgspec.Struct, tag=True):
    """A valid request. request: what is left of it, as JSON; kind: its class. token_ids: of each prompt, as 32-bit integers. texts:
    the prompts that are returned. param: the field of the structured output. response, items: what is left of a response whose chat
    this is, and the items of its input."""

    kind: str
    request: bytes
    params: SamplingParams
    token_ids: list[memoryview]
    accepted: list[str]
    structured_output: StructuredOutputParams | None = None
    param: str | None = None
    texts: list[str] = []
    response: bytes = b""
    items: EncodedItems | None = None


Reply = Wanted | ApiErrorMessage | ResponseBody | PreparedMessage

encode = msgspec.msgpack.Encoder().encode
decode_opening = msgspec.msgpack.Decoder(Opening).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_text_count = msgspec.msgpack.Decoder(TextCount).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def decode_reply(frame: bytes) -> Reply:
    """A message of a fork."""
    reply: Reply = _decode_reply(frame)
    return reply


def packed(tokens: Sequence[int]) -> memoryview:
    """Token ids as 32-bit integers."""
    return memoryview(array("i", tokens)).cast("B")


def unpacked(data: memoryview) -> list[int]:
    """The token ids that `packed` wrote."""
    tokens = array("i")
    tokens.frombytes(data)
    return tokens.tolist()


def too_much() -> ApiError:
    """The answer to a body that no fork reads within its limits."""
    message = f"the body takes more than {MAX_SECONDS} s or {MAX_BYTES >> 20} MiB of memory to read; send a smaller one"
    return bad_request(message, code="body_too_complex")
