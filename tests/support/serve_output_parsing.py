# SPDX-License-Identifier: Apache-2.0
"""Parse texts in pieces, join the events, and require that the pieces never change the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from phalanx.serve.output_parsing import CallArguments, CallBegin, ContentText, Markers, OutputParser, ReasoningText

NAMES: dict[str, dict[str, Any]] = {name: {"type": "object"} for name in ("weather", "add", "noon")}
LETTERS = Markers({})
"""No marker is a special token: all are recognized by their letters."""


class Read(NamedTuple):
    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def special(*markers: str) -> Markers:
    """All of these markers are special tokens."""
    return Markers({marker: 900 + i for i, marker in enumerate(markers)})


def read(parser: OutputParser, pieces: Sequence[str]) -> Read:
    """The joined events; call numbers must be in order, and no event empty."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    content, reasoning = "", ""
    calls: list[list[str]] = []
    for event in events:
        match event:
            case CallBegin(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[-1][1] += text
            case ContentText(text):
                assert text
                content += text
            case ReasoningText(text):
                assert text
                reasoning += text
    return Read(content, [(name, arguments) for name, arguments in calls], reasoning)


def read_all_ways(make: Callable[[], OutputParser], text: str) -> Read:
    """The result for the text at once, after it has been compared with that for single characters and for pairs."""
    result = read(make(), [text])
    assert read(make(), list(text)) == result
    assert read(make(), [text[i : i + 2] for i in range(0, len(text), 2)]) == result
    return result


def bare(value: Any, quote: str) -> str:
    """A value as Gemma 4 writes it: objects with bare keys, sorted without regard to case, as its template shows them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{bare(value[name], quote)}" for name in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(each, quote) for each in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """The text in pieces of these sizes, which repeat."""
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.text(max_size=6) | st.integers() | st.booleans() | st.none(), st.lists, max_leaves=3),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), max_size=3)


def shreds(*parts: str) -> st.SearchStrategy[str]:
    """Texts made of these parts, of halves of them and of other letters: what almost looks like a call."""
    halves = [part[: len(part) // 2] for part in parts] + [part[len(part) // 2 :] for part in parts]
    return st.lists(st.sampled_from([*parts, *parts, *halves, "a", " ", "\n", "é", '"', "{", "}", "]", ","]), max_size=14).map(
        "".join
    )
