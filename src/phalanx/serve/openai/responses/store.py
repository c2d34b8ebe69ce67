# SPDX-License-Identifier: Apache-2.0
"""The store of responses: in memory, bounded in number and bytes, each response for a limited time.

A response is stored with the conversation that led to it, so that a later one can go on after it even if an earlier one has left.
What is complete is kept as JSON, since its objects take three times as much memory, and is given out as JSON: the event loop
decodes none of it. Conversations share their texts: a chain of a hundred responses holds each item once, but each response counts
the bytes of its whole conversation, so that the bound holds whichever of them leave.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from phalanx.serve.openai.long_answers import encode_json

Item = dict[str, Any]

MAX_BYTES = 256 * 2**20
"""Bytes of all stored conversations together."""
ITEM_BYTES = 256
"""What an item takes beside its JSON: its id, and its entry in the index of ids."""
decode_items = msgspec.json.Decoder(list[Item]).decode


class EncodedItems(msgspec.Struct, frozen=True, eq=False):
    """Items as the JSON of a list. ids: theirs. ends: where each ends in the text, as 64-bit integers."""

    ids: list[str]
    text: bytes
    ends: bytes

    @classmethod
    def of(cls, items: Sequence[Item]) -> EncodedItems:
        """Takes time in proportion to the items: many are encoded off the event loop."""
        parts, ends, position = [], array("Q"), 0
        for item in items:
            parts.append(encode_json(item))
            position += 1 + len(parts[-1])  # what stands before it is a bracket or a comma
            ends.append(position)
        return cls([item["id"] for item in items], b"[" + b",".join(parts) + b"]", ends.tobytes())

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, number: int) -> memoryview:
        """The JSON of one item, which may have megabytes: it is not copied."""
        ends = memoryview(self.ends).cast("Q")
        return memoryview(self.text)[ends[number - 1] + 1 if number else 1 : ends[number]]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text) + ITEM_BYTES * len(self.ids)


class StoredResponse:
    """One response. cancel: stops it while it is in progress. expires: when its time is over.

    input: its own items. before: the conversation before them.
    """

    def __init__(
        self, response: dict[str, Any], input: Sequence[Item] | EncodedItems, before: Sequence[EncodedItems] = ()
    ) -> None:  # fmt: skip
        self.id: str = response["id"]
        self._response: dict[str, Any] | bytes = response
        self._status: str | None = None
        self._output = EncodedItems.of([])
        self.before = (*before, input if isinstance(input, EncodedItems) else EncodedItems.of(input))
        """The conversation up to its output."""
        self.expires = 0.0
        self.cancel: Callable[[], None] | None = None

    @property
    def status(self) -> str | None:
        return self._response.get("status") if isinstance(self._response, dict) else self._status

    @property
    def response(self) -> dict[str, Any]:
        """Its body; while it is in progress, the one that is being written."""
        body = self._response
        return body if isinstance(body, dict) else msgspec.json.decode(body)

    @property
    def content(self) -> dict[str, Any] | bytes:
        """Its body: the JSON once it is complete, before that the one that is being written."""
        return self._response

    def complete(self) -> None:
        """Its body does not change any more. Takes time in proportion to it: many entries are encoded off the event loop."""
        body = self._response
        if isinstance(body, dict):
            output = EncodedItems.of(body["output"])
            encoded = encode_json({**body, "output": msgspec.Raw(output.text)})
            self._status, self._output, self._response = body.get("status"), output, encoded

    @property
    def conversation(self) -> tuple[EncodedItems, ...]:
        """All items up to the end of this response."""
        return (*self.before, self._output)

    def input_page(self, limit: int, *, latest_first: bool, after: str | None = None) -> list[tuple[str, memoryview]]:
        """Up to `limit` of the items before its output, each with its id: the first ones, or those behind the one of the id
        `after`. Raises LookupError if there is none of that id."""
        lists = [items for items in self.before if items.ids]
        if latest_first:
            lists.reverse()
        skipped = 0
        if after is not None:
            lists = lists[next((i for i, items in enumerate(lists) if after in items.ids), len(lists)) :]
            if not lists:
                raise LookupError(after)
            ids = lists[0].ids
            skipped = 1 + (ids[::-1] if latest_first else ids).index(after)
        places: Iterator[tuple[EncodedItems, int]] = (
            (items, number) for items in lists for number in (reversed(range(len(items))) if latest_first else range(len(items)))
        )
        return [(items.ids[number], items.item(number)) for items, number in islice(places, skipped, skipped + limit)]

    @property
    def size(self) -> int:
        """Bytes of the response and of its conversation."""
        body = self._response if isinstance(self._response, bytes) else encode_json(self._response)
        return len(body) + sum(items.size for items in self.conversation)


class ResponseStore:
    """The responses of one server. count: how many stay; 0: none. seconds: how long each stays after its end."""

    def __init__(
        self, *, count: int, seconds: float, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._seconds, self._max_bytes, self._clock = count, seconds, max_bytes, clock
        # Each with its bytes, and with the items of it that are in the index.
        self._stored: OrderedDict[str, tuple[StoredResponse, int, tuple[EncodedItems, ...]]] = OrderedDict()
        self._bytes = 0
        self._index = _ItemIndex()

    @property
    def stores(self) -> bool:
        return self._count > 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Store a response, or store it again after a change; then the oldest ones leave as the limits demand."""
        if stored.status != "in_progress":
            stored.cancel = None
            stored.complete()
        size, conversation = stored.size, stored.conversation
        self._index.add(conversation)
        self.delete(stored.id)
        stored.expires = self._clock() + self._seconds
        self._stored[stored.id] = stored, size, conversation
        self._bytes += size
        self._expire(all_limits=True)

    def _expire(self, *, all_limits: bool = False) -> None:
        now = self._clock()
        while self._stored:
            name, (oldest, *_) = next(iter(self._stored.items()))
            fits = not all_limits or (len(self._stored) <= self._count and self._bytes <= self._max_bytes)
            if oldest.expires > now and fits:
                break
            self.delete(name)

    def get(self, response_id: str) -> StoredResponse | None:
        """A stored response, unless its time is over."""
        stored, *_ = self._stored.get(response_id, (None,))
        if stored is not None and stored.expires <= self._clock():
            self.delete(response_id)
            return None
        return stored

    def delete(self, response_id: str) -> bool:
        """Remove a response; false if there is none of this id."""
        _, size, conversation = self._stored.pop(response_id, (None, -1, ()))
        if size < 0:
            return False
        self._bytes -= size
        self._index.remove(conversation)
        return True

    def item(self, item_id: str) -> memoryview | None:
        """The JSON of the item of this id, in whichever response has it."""
        self._expire()
        return self._index.item(item_id)


class _ItemIndex:
    """Where each item of the stored conversations is."""

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}  # of each list, by its identity: responses that have it
        self._places: dict[str, tuple[EncodedItems, int]] = {}
        self._copies: dict[str, dict[int, tuple[EncodedItems, int]]] = {}  # the same item in further lists

    def add(self, conversation: Sequence[EncodedItems]) -> None:
        for items in conversation:
            uses = self._uses[id(items)] = self._uses.get(id(items), 0) + 1
            if uses > 1:
                continue
            for number, name in enumerate(items.ids):
                place = self._places.setdefault(name, (items, number))
                if place[0] is not items:
                    self._copies.setdefault(name, {})[id(items)] = items, number

    def remove(self, conversation: Sequence[EncodedItems]) -> None:
        for items in conversation:
            self._uses[id(items)] -= 1
            if self._uses[id(items)]:
                continue
            del self._uses[id(items)]
            for name in items.ids:
                self._remove(name, items)

    def _remove(self, name: str, items: EncodedItems) -> None:
        copies = self._copies.get(name)
        if copies is not None:
            copies.pop(id(items), None)
        place = self._places.get(name)
        if place is not None and place[0] is items:
            if copies:
                self._places[name] = copies.popitem()[1]
            else:
                del self._places[name]
        if copies is not None and not copies:
            del self._copies[name]

    def item(self, name: str) -> memoryview | None:
        items, number = self._places.get(name, (None, 0))
        return None if items is None else items.item(number)
