# SPDX-License-Identifier: Apache-2.0
"""The store holds its limits of number, bytes and time."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from phalanx.serve.openai.large_bodies.messages import Wanted
from phalanx.serve.openai.responses.store import EncodedItems, ResponseStore, StoredResponse
from phalanx.serve.openai.responses.stored_items import StoredItems


def stored(name: str, *, text: str = "", before=()) -> StoredResponse:
    output = [{"id": f"out_{name}", "type": "message", "content": text}]
    return StoredResponse({"id": name, "output": output}, [{"id": f"in_{name}", "type": "message"}], before)


def test_number():
    store = ResponseStore(count=3, seconds=10)
    for i in range(5):
        store.put(stored(f"r{i}"))
    assert [store.get(f"r{i}") is not None for i in range(5)] == [False, False, True, True, True]
    store.put(store.get("r2"))
    store.put(stored("r5"))
    assert [store.get(f"r{i}") is not None for i in (2, 3, 4, 5)] == [True, False, True, True]


def test_time():
    now = [0.0]
    store = ResponseStore(count=9, seconds=10, clock=lambda: now[0])
    store.put(stored("a"))
    now[0] = 6.0
    store.put(stored("b"))
    now[0] = 11.0
    assert (store.get("a"), store.item("out_a")) == (None, None)
    assert store.item("in_b") == b'{"id":"in_b","type":"message"}'
    now[0] = 30.0
    store.put(stored("c"))
    assert len(store) == 1


def test_bytes_count_whole_conversations():
    store = ResponseStore(count=1000, seconds=10, max_bytes=20_000)
    before = ()
    for i in range(50):
        one = stored(f"r{i}", text="x" * 1000, before=before)
        store.put(one)
        before = one.conversation
    assert [name for items in one.conversation[-4:] for name in items.ids] == ["in_r48", "out_r48", "in_r49", "out_r49"]
    total = sum(one.size for one in (store.get(f"r{i}") for i in range(50)) if one is not None)
    assert total <= 20_000
    assert len(store) < 5


def test_deleted():
    store = ResponseStore(count=2, seconds=10)
    store.put(stored("a"))
    assert store.delete("a")
    assert not store.delete("a")
    assert store.item("out_a") is None


def test_one_in_progress_shows_what_is_written():
    store = ResponseStore(count=2, seconds=10)
    body = {"id": "a", "status": "in_progress", "output": []}
    store.put(StoredResponse(body, []))
    body["output"].append({"id": "out_a", "type": "message"})
    assert store.get("a").response is body
    body["status"] = "completed"
    store.put(store.get("a"))
    assert store.get("a").response == body
    assert store.get("a").response is not body
    assert store.item("out_a") == b'{"id":"out_a","type":"message"}'


def test_memory_is_the_bytes_that_it_counts():
    """Many small items, whose objects take four times the bytes of their JSON."""
    store = ResponseStore(count=100, seconds=10)
    tracemalloc.start()
    for i in range(20):
        items = [{"id": f"in_{i}_{j}", "type": "message", "content": [{"type": "input_text", "text": f"{j}"}]} for j in range(500)]
        store.put(StoredResponse({"id": f"r{i}", "output": []}, items))
    del items
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory < 2 * sum(store.get(f"r{i}").size for i in range(20))


def test_only_a_response_in_progress_can_be_cancelled():
    """The answer may still be on its way to a slow client: a cancellation would leave the stream without its end."""
    store, one, cancelled = ResponseStore(count=2, seconds=10), stored("a"), []
    one.cancel = lambda: cancelled.append("a")
    one.response["status"] = "in_progress"
    store.put(one)
    assert one.cancel is not None
    one.response["status"] = "completed"
    store.put(one)
    assert one.cancel is None


def test_an_item_is_there_as_long_as_a_response_that_has_it():
    store = ResponseStore(count=9, seconds=10)
    store.put(stored("a"))
    store.put(stored("b", before=store.get("a").conversation))
    copied = json.loads(bytes(store.item("out_a")))
    store.put(StoredResponse({"id": "c", "output": []}, [copied, copied]))
    for name in ("a", "b"):
        assert store.item("in_a") is not None
        store.delete(name)
    assert store.item("in_a") is None
    assert store.item("out_a") is not None
    store.delete("c")
    index = store._index
    assert (store.item("out_a"), index._places, index._copies, index._uses) == (None, {}, {}, {})


def test_an_item_is_found_without_looking_at_the_others(monkeypatch):
    """A body may refer to many, and the store may have 256 MiB."""
    store, looks = ResponseStore(count=2000, seconds=10), []
    for i in range(1000):
        store.put(stored(f"r{i}"))
    item = EncodedItems.item
    monkeypatch.setattr(EncodedItems, "item", lambda items, number: looks.append(number) or item(items, number))
    assert store.item("in_r0") == b'{"id":"in_r0","type":"message"}'
    assert store.item("in_none") is None
    assert looks == [0]


def test_a_page_of_the_input():
    store = ResponseStore(count=9, seconds=10)
    store.put(StoredResponse({"id": "a", "output": [{"id": "5"}]}, [{"id": str(i)} for i in range(5)]))
    store.put(StoredResponse({"id": "b", "output": []}, [{"id": "6", "text": "é,]"}, {"id": "7"}], store.get("a").conversation))
    page = store.get("b").input_page
    assert [name for name, _ in page(9, latest_first=False)] == list("01234567")
    assert [json.loads(bytes(text))["id"] for _, text in page(3, latest_first=True, after="6")] == ["5", "4", "3"]
    assert page(2, latest_first=False, after="5") == [("6", '{"id":"6","text":"é,]"}'.encode()), ("7", b'{"id":"7"}')]
    assert page(2, latest_first=False, after="7") == []
    with pytest.raises(LookupError):
        page(2, latest_first=False, after="8")


def test_a_large_item_is_not_copied():
    """64 references to an item of 7 MiB had the event loop copy it 64 times only to learn its size: 0.1 s."""
    store = ResponseStore(count=9, seconds=10)
    store.put(StoredResponse({"id": "a", "output": []}, [{"id": "5", "text": "x" * 2**20}]))
    [items, _] = store.get("a").conversation
    assert store.item("5").obj is items.text
    [(_, text)] = store.get("a").input_page(9, latest_first=False)
    assert text.obj is items.text
    assert StoredItems(store).find(Wanted("5", conversation=False))[0].obj is items.text
