# SPDX-License-Identifier: Apache-2.0
"""The items of stored responses, for a new one that goes on after them or refers to them."""

from __future__ import annotations

import msgspec

from phalanx.serve.openai.api_errors import ApiError, bad_request
from phalanx.serve.openai.large_bodies.messages import Refused, Stored, WantedConversation, WantedItem
from phalanx.serve.openai.responses.store import Item, ResponseStore, StoredResponse


class StoredItems:
    """Those of a store, as `conversation.Items`."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def item(self, item_id: str) -> Item | None:
        """The item of this id."""
        return self._store.item(item_id)

    def conversation(self, response_id: str) -> list[Item]:
        """All items up to the end of this response. Raises ApiError 400."""
        return previous_response(self._store, response_id).conversation

    def find(self, wanted: WantedItem | WantedConversation) -> Stored:
        """What another process asks for."""
        if isinstance(wanted, WantedItem):
            item = self._store.item(wanted.id)
            return Stored([] if item is None else [msgspec.json.encode([item])])
        try:
            return Stored(list(previous_response(self._store, wanted.response_id).texts))
        except ApiError as error:
            return Stored([], Refused.of(error))


def previous_response(store: ResponseStore, response_id: str) -> StoredResponse:
    """The response that a new one goes on after. Raises ApiError 400."""
    stored = store.get(response_id)
    if stored is None:
        raise bad_request(
            f"there is no stored response {response_id!r}: it was not stored, was deleted, or its time is over",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    if stored.response["status"] in ("in_progress", "failed"):
        raise bad_request(f"the response {response_id!r} is {stored.response['status']}", param="previous_response_id")
    return stored
