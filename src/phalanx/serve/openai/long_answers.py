# SPDX-License-Identifier: Apache-2.0
"""Answers with many entries, such as the scores of a long prompt: made, encoded and freed on a thread, and never one text.

A thread beside the event loop has the interpreter lock for as long as one call into C takes. Joining, copying or freeing twenty
megabytes at once takes tens of milliseconds, in which no stream goes on. So an answer is encoded in parts, which are sent one by
one, and its objects are freed in parts (`discard`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

PART = 256
"""Entries of a list (tokens with logprobs) that are encoded, or made, at once: a few milliseconds, in which no stream goes on."""
_FREED = 64
"""Entries that are freed at once. Each may have twenty alternatives of several objects."""
_DEPTH = 6  # how deep the lists of an answer lie

Result = TypeVar("Result")

# One thread: several would take the interpreter lock from each other before the event loop gets it.
_thread = ThreadPoolExecutor(1, thread_name_prefix="long answers")


class JsonParts:
    """JSON in parts, a value of an answer. entries: how many of a list it has. (No dataclass: those have a JSON of their own.)"""

    def __init__(self, parts: list[bytes | memoryview], entries: int = 0) -> None:
        self.parts, self.entries = parts, entries


def _joined(value: Any) -> msgspec.Raw:
    if isinstance(value, JsonParts):
        return msgspec.Raw(b"".join(value.parts))
    raise NotImplementedError(f"{type(value).__name__} has no JSON")


_encode = msgspec.json.Encoder(enc_hook=_joined).encode
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")


def encode_small(value: Any) -> bytes:
    """JSON of a value with few entries, on one line for every reader: line ends beyond ASCII are escaped.

    Events are lines, which by their standard end at CR and LF only. But clients that split them as `str.splitlines` does (httpx's
    and requests' iter_lines of texts) would break one at a U+2028 of the model's. In JSON such bytes are always part of a text.
    """
    data = _encode(value)
    if not data.isascii():
        for end, escaped in _LINE_ENDS:
            data = data.replace(end, escaped)
    return data


async def off_loop(work: Callable[..., Result], *args: Any, entries: int) -> Result:
    """`work(*args)`, on a thread if it is about many entries."""
    if entries <= PART:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, partial(work, *args))


def discard(value: Any) -> None:
    """Free what a value has, on the thread and a few entries at a time, once what was given to `off_loop` before is done.

    Its lists are emptied: the caller is the last to use them.
    """
    if entries_of(value) > PART:
        _thread.submit(_take_apart, value)


def _take_apart(value: Any, depth: int = _DEPTH) -> None:
    if depth == 0:
        return
    if isinstance(value, dict):
        for inner in value.values():
            _take_apart(inner, depth - 1)
    elif isinstance(value, list):
        nested = bool(value) and isinstance(value[0], dict) and entries_of(value[0], depth - 1) > PART // 2
        while value:
            if nested:
                _take_apart(value[-1], depth - 1)
                value.pop()
            else:
                del value[-_FREED:]


def encode_json(value: Any) -> bytes:
    """JSON. A long answer is encoded in parts, between which another thread may take the interpreter lock."""
    return encode_small(value) if entries_of(value) <= PART else b"".join(_parts(value))


def encode_parts(value: Any) -> list[bytes | memoryview]:
    """The same in parts, which are not joined."""
    return list(_parts(value))


def entries_of(value: Any, depth: int = _DEPTH) -> int:
    """The entries of all lists in an answer; it stops counting where there are more than PART."""
    count = 0
    if isinstance(value, dict) and depth > 0:
        for inner in value.values():
            if isinstance(inner, (dict, list, JsonParts)):  # every event of a stream comes here, and most have only texts
                count += entries_of(inner, depth - 1)
                if count > PART:
                    break
    elif isinstance(value, list):
        count = len(value)
        for inner in value:
            if count > PART or depth <= 0 or not isinstance(inner, (dict, list, JsonParts)):
                break
            count += entries_of(inner, depth - 1)
    elif isinstance(value, JsonParts):
        count = value.entries
    return count


def _parts(value: Any, depth: int = _DEPTH) -> Iterator[bytes | memoryview]:
    """The JSON of a value in pieces, each of which has few entries."""
    if isinstance(value, JsonParts):
        yield from value.parts
    elif entries_of(value, depth) <= PART:
        yield encode_small(value)
    elif isinstance(value, dict):
        for number, (name, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + encode_small(name) + b":"
            yield from _parts(inner, depth - 1)
        yield b"}"
    elif isinstance(value[0], dict) and entries_of(value[0], depth - 1) > PART // 2:
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from _parts(inner, depth - 1)
        yield b"]"
    else:
        for start in range(0, len(value), PART):
            yield (b"," if start else b"[") + encode_small(value[start : start + PART])[1:-1]
        yield b"]"
