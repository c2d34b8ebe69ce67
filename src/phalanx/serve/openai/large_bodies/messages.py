# SPDX-License-Identifier: Apache-2.0
"""What a server and the processes that read its large bodies say to each other, over a Unix socket: frames of a length and bytes.

The server begins with `Setup`. Then it sends a `Job` and, as a frame of its own, a body; the process may ask for what is stored
(`WantedItem`, `WantedConversation`), each answered by a `TextCount` and its texts, and ends with `Prepared`, `ResponseBody` or
`ApiErrorMessage`.

What may have megabytes is a frame of its own, or a view into the frame it came in: a copy would take the server's interpreter lock
for as long as it takes.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams
from phalanx.engine.messages import EngineFacts
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.responses.store import EncodedItems

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 20


class Setup(msgspec.Struct):
    """The engine whose prompts are made. names: those of the model in requests. tokenizer: the text of its tokenizer.json."""

    names: list[str]
    facts: EngineFacts
    tokenizer: str
    special: dict[str, str | list[str]]
    templates: dict[str, str]
    origin: str
    reasoning: str | None
    tools: str | None
    markers: dict[str, int]
    escape_special_tokens: bool


class Job(msgspec.Struct):
    """The next frame is a body of this route."""

    route: str


class WantedItem(msgspec.Struct, tag=True):
    """The stored item of this id."""

    id: str


class WantedConversation(msgspec.Struct, tag=True):
    """All items of a stored response's conversation."""

    response_id: str


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


@dataclass(frozen=True)
class Stored:
    """The JSON of an item, or of the lists of items of a conversation, the first ones first; or why there is none."""

    texts: Sequence[bytes | memoryview]
    refused: ApiErrorMessage | None = None


class TextCount(msgspec.Struct):
    """So many texts follow, each as a frame; or why there are none."""

    count: int
    refused: ApiErrorMessage | None = None


class ResponseBody(msgspec.Struct, tag=True):
    """The body of the answer. accepted: the fields of the request that had no effect."""

    content: memoryview
    accepted: list[str]


class Prepared(msgspec.Struct, tag=True):
    """A valid request. request: what is left of it, as JSON. token_ids: of each prompt, as 32-bit integers. texts: the prompts that
    are echoed. items: of a response's input. param: the field of the structured output."""

    request: bytes
    params: SamplingParams
    token_ids: list[memoryview]
    accepted: list[str]
    structured_output: StructuredOutputParams | None = None
    param: str | None = None
    texts: list[str] = []
    chat: bytes = b""
    items: EncodedItems | None = None


Reply = WantedItem | WantedConversation | ApiErrorMessage | ResponseBody | Prepared

encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_text_count = msgspec.msgpack.Decoder(TextCount).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def decode_reply(frame: bytearray) -> Reply:
    """A message of a process."""
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


def send(connection: socket.socket, *parts: bytes | memoryview) -> None:
    """Send a frame, which these are the parts of."""
    connection.sendall(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> bytearray | None:
    """The next frame; None at the end of the connection."""
    head = _receive(connection, _LENGTH.size)
    return None if head is None else _receive(connection, _LENGTH.unpack(head)[0])


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, start = memoryview(data), 0
    while start < size:
        count = connection.recv_into(view[start : start + _READ_BYTES])
        if count == 0:
            return None
        start += count
    return data
