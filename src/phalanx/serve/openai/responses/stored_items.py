# SPDX-License-Identifier: Apache-2.0
"""The items of stored responses, for a new one that goes on after them or refers to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.body import LARGE_BYTES, MAX_BODY_BYTES
from phalanx.serve.openai.large_bodies.messages import Wanted
from phalanx.serve.openai.responses.conversation import MAX_REFERENCES
from phalanx.serve.openai.responses.store import Item, ResponseStore, StoredResponse, decode_items
from phalanx.serve.openai.schema.responses_request import ItemReference, ResponsesRequest


class StoredItems:
    """Those of a store, as `conversation.Items`, for one request."""

    def __init__(self, store: ResponseStore) -> None:
        self._store, self._bytes = store, 0

    def item(self, item_id: str) -> Item | None:
        """The item of this id. Raises ApiError 400 if those of the request are too large together."""
        text = self._text(item_id)
        item: Item | None = None if text is None else msgspec.json.decode(text)
        return item

    def _text(self, item_id: str) -> memoryview | None:
        text = self._store.item(item_id)
        self._bytes += 0 if text is None else len(text)
        if self._bytes > MAX_BODY_BYTES:
            raise bad_request(
                f"the items that the input refers to have more than {MAX_BODY_BYTES} bytes; refer to fewer",
                param="input", code="references_too_large",
            )  # fmt: skip
        return text

    def conversation(self, response_id: str) -> list[Item]:
        """All items up to the end of this response. Raises ApiError 400."""
        conversation = previous_response(self._store, response_id).conversation
        return [item for items in conversation for item in decode_items(items.text)]

    def find(self, wanted: Wanted) -> Sequence[bytes | memoryview]:
        """The JSON that another process asks for. Raises ApiError 400."""
        if wanted.conversation:
            return [items.text for items in previous_response(self._store, wanted.id).conversation]
        text = self._text(wanted.id)
        return [] if text is None else [text]

    def are_large(self, request: ResponsesRequest) -> bool:
        """Whether the items that a request goes on after or refers to must not be decoded on the event loop."""
        size = 0
        stored = None if request.previous_response_id is None else self._store.get(request.previous_response_id)
        if stored is not None:
            size = sum(len(items.text) for items in stored.conversation)
        if not isinstance(request.input, str):
            references = (item.id for item in request.input if isinstance(item, ItemReference))
            size += sum(len(self._store.item(name) or b"") for name in islice(references, MAX_REFERENCES))
        return size > LARGE_BYTES


def previous_response(store: ResponseStore, response_id: str) -> StoredResponse:
    """The response that a new one goes on after. Raises ApiError 400."""
    stored = store.get(response_id)
    if stored is None:
        raise bad_request(
            f"there is no stored response {response_id!r}: it was not stored, was deleted, or its time is over",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    if stored.status in ("in_progress", "failed"):
        raise bad_request(f"the response {response_id!r} is {stored.status}", param="previous_response_id")
    return stored
