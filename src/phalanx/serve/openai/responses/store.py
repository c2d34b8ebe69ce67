# SPDX-License-Identifier: Apache-2.0
"""The store of responses: in memory, bounded in number and bytes, each response for a limited time.

A response is stored with the conversation that led to it, so that a later one can go on after it even if an earlier one has left.
What is complete is kept as JSON, since its objects take three times as much memory. Conversations share their texts: a chain of a
hundred responses holds each item once, but each response counts the bytes of its whole conversation, so that the bound holds
whichever of them leave.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

Item = dict[str, Any]

MAX_BYTES = 256 * 2**20
"""Bytes of JSON of all stored conversations together."""
_encode, decode_items = msgspec.json.Encoder().encode, msgspec.json.Decoder(list[Item]).decode


class StoredResponse:
    """One response. cancel: stops it while it is in progress. expires: when its time is over.

    input: its own items, or their JSON. before: the conversation before them: JSON lists of items, one behind the other.
    """

    def __init__(self, response: dict[str, Any], input: Sequence[Item] | bytes, before: Sequence[bytes] = ()) -> None:
        self._response: dict[str, Any] | bytes = response
        self._output = b"[]"
        self._input, self._before = input if isinstance(input, bytes) else _encode(input), tuple(before)
        self.expires = 0.0
        self.cancel: Callable[[], None] | None = None

    @property
    def response(self) -> dict[str, Any]:
        """Its body; while it is in progress, the one that is being written."""
        body = self._response
        return body if isinstance(body, dict) else msgspec.json.decode(body)

    def complete(self) -> None:
        """Its body does not change any more, and nothing is left to cancel."""
        self.cancel = None
        body = self.response
        self._response, self._output = _encode(body), _encode(body["output"])

    @property
    def texts(self) -> tuple[bytes, ...]:
        """All items up to the end of this response: JSON lists of items, one behind the other."""
        return (*self._before, self._input, self._output)

    @property
    def input_items(self) -> list[Item]:
        """All items up to its output."""
        return [item for text in self.texts[:-1] for item in decode_items(text)]

    @property
    def conversation(self) -> list[Item]:
        """All items up to the end of this response."""
        return [item for text in self.texts for item in decode_items(text)]

    @property
    def size(self) -> int:
        """Bytes of the response and of its conversation."""
        body = self._response if isinstance(self._response, bytes) else _encode(self._response)
        return len(body) + sum(map(len, self.texts))


class ResponseStore:
    """The responses of one server. count: how many stay; 0: none. seconds: how long each stays after its end."""

    def __init__(
        self, *, count: int, seconds: float, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._seconds, self._max_bytes, self._clock = count, seconds, max_bytes, clock
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()  # with its bytes
        self._bytes = 0

    @property
    def stores(self) -> bool:
        return self._count > 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or store it again after a change; then the oldest ones leave as the limits demand."""
        response = stored.response
        self.delete(response["id"])
        if response.get("status") != "in_progress":
            stored.complete()
        size = stored.size
        stored.expires = self._clock() + self._seconds
        self._stored[response["id"]] = stored, size
        self._bytes += size
        now = self._clock()
        while self._stored:
            name, (oldest, _) = next(iter(self._stored.items()))
            if oldest.expires > now and len(self._stored) <= self._count and self._bytes <= self._max_bytes:
                break
            self.delete(name)

    def get(self, response_id: str) -> StoredResponse | None:
        """A stored response, unless its time is over."""
        stored, _ = self._stored.get(response_id, (None, 0))
        if stored is not None and stored.expires <= self._clock():
            self.delete(response_id)
            return None
        return stored

    def delete(self, response_id: str) -> bool:
        """Remove a response; false if there is none of this id."""
        _, size = self._stored.pop(response_id, (None, -1))
        if size < 0:
            return False
        self._bytes -= size
        return True

    def item(self, item_id: str) -> Item | None:
        """The item of this id in the newest response that has it."""
        name = _encode(item_id)
        for stored, _ in reversed(self._stored.values()):
            for text in reversed(stored.texts if stored.expires > self._clock() else ()):
                if name in text:
                    for item in reversed(decode_items(text)):
                        if item.get("id") == item_id:
                            return item
        return None
