# SPDX-License-Identifier: Apache-2.0
"""Python calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing.pythonic import OLMO_MARKERS, OlmoParser, PythonicParser
from tests.support.serve_output_parsing import LETTERS, NAMES, SIZES, Read, cut, read, read_all_ways, shreds, special


def make():
    return PythonicParser(NAMES, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Read("", [])),
        ("No [call].", Read("No [call].", [])),
        (
            '[weather(city="Oslo, (N)", days=3), noon()]',
            Read("", [("weather", '{"city": "Oslo, (N)", "days": 3}'), ("noon", "{}")]),
        ),
        (
            " [add( a = [1, {'b': (2,)}] , c=None, d=true, e=-1.5,)]",
            Read("", [("add", '{"a": [1, {"b": [2]}], "c": null, "d": true, "e": -1.5}')]),
        ),
        ("[add(a='it\\'s', b=name)]", Read("", [("add", '{"a": "it\'s", "b": "name"}')])),
        ("<|python_start|>[noon()]<|python_end|> x", Read(" x", [("noon", "{}")])),
        ("[1, 2, 3]", Read("[1, 2, 3]", [])),
        ("[other(a=1)]", Read("[other(a=1)]", [])),
        ("[add(1)]", Read("[add(1)]", [])),
        ("[add", Read("[add", [])),
        ('[add(a="é', Read("", [("add", '{"a": ')])),
        ("[noon(), then]", Read(", then]", [("noon", "{}")])),
        ("[add(a='\\ud800')]", Read("", [("add", '{"a": "\\\\ud800"}')])),
        # strings as models write them, and words of JSON among Python's
        ('[add(a="one\ntwo\r\n", b=1)]', Read("", [("add", '{"a": "one\\ntwo\\r\\n", "b": 1}')])),
        ("[add(a='one\n\"two\"')]", Read("", [("add", '{"a": "one\\n\\"two\\""}')])),
        ('[add(a="""x, "y")\nz""", b=\'\', c="")]', Read("", [("add", '{"a": "x, \\"y\\")\\nz", "b": "", "c": ""}')])),
        ("[add(a='''it's''')]", Read("", [("add", '{"a": "it\'s"}')])),
        ('[add(a="\x00", b="")]', Read("", [("add", '{"a": "\\u0000", "b": ""}')])),
        ("[add(a={'a': true, 'b': [false, null]})]", Read("", [("add", '{"a": {"a": true, "b": [false, null]}}')])),
        ("[add(a={'a': 'true', \"b\": None})]", Read("", [("add", '{"a": {"a": "true", "b": null}}')])),
        ("[add(a='a' 'b', b=\"it's\")]", Read("", [("add", '{"a": "ab", "b": "it\'s"}')])),
        ("[add(a={'a': nothing})]", Read("", [("add", '{"a": "{\'a\': nothing}"}')])),
        ("[add(a=1e999)]", Read("", [("add", '{"a": "1e999"}')])),
    ],
)
def test_cases(text, expected):
    assert read_all_ways(make, text) == expected


OLMO = '<function_calls>weather(city="New\\nYork", days=3, unit=null, tags=["a", "b)"])\nnoon()</function_calls>'
OLMO_CALLED = [("weather", '{"city": "New\\nYork", "days": 3, "unit": null, "tags": ["a", "b)"]}'), ("noon", "{}")]


def olmo():
    return OlmoParser(NAMES, LETTERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OLMO, Read("", OLMO_CALLED)),
        (f"I look. {OLMO}\nDone.", Read("I look.\nDone.", OLMO_CALLED)),
        (f"{OLMO}{OLMO}", Read("", OLMO_CALLED * 2)),
        ("<function_calls>\nnoon()\n</function_calls>", Read("", [("noon", "{}")])),
        ("<function_calls>moon()</function_calls>", Read("<function_calls>moon()</function_calls>", [])),
        ("<function_calls>moon()\nnoon()</function_calls>", Read("<function_calls>moon()\nnoon()</function_calls>", [])),
        ("<function_calls></function_calls> a", Read("<function_calls></function_calls> a", [])),
        ("<function_calls>noon(", Read("<function_calls>noon(", [])),
        ("<function_calls>weather(city='Os", Read("", [("weather", '{"city": ')])),
        ("noon()", Read("noon()", [])),
    ],
)
def test_olmo(text, expected):
    assert read_all_ways(olmo, text) == expected
    for at in range(len(text)):
        assert read(olmo(), [text[:at], text[at:]]) == expected


def test_special_tokens_of_olmo():
    markers = special(*OLMO_MARKERS)
    assert read(OlmoParser(NAMES, markers), [markers.encode(OLMO)]).calls == OLMO_CALLED
    assert read(OlmoParser(NAMES, markers), [OLMO]) == Read(OLMO, [])


@settings(max_examples=100, deadline=None)
@given(text=shreds(*OLMO_MARKERS, OLMO, "noon()", "weather(city=", "'a'", ")"), sizes=SIZES)
def test_pieces_never_matter_to_olmo(text, sizes):
    assert read(olmo(), cut(text, sizes)) == read(olmo(), [text])


def test_special_tokens():
    markers = special("<|python_start|>", "<|python_end|>")
    parser = PythonicParser(NAMES, markers)
    assert read(parser, [markers.encode("<|python_start|>[noon()]<|python_end|>")]) == Read("", [("noon", "{}")])


VALUES = st.recursive(
    st.text(max_size=6) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYWORDS = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), VALUES, max_size=3)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), KEYWORDS), min_size=1, max_size=3), sizes=SIZES)
def test_calls_are_read_back(calls, sizes):
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in keywords.items())})" for name, keywords in calls]
    result = read(make(), cut(f"[{', '.join(written)}]", sizes))
    assert result.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == calls


@settings(max_examples=100, deadline=None)
@given(text=shreds("[add(", "a=1", "b='x, )'", ", ", "add()", ")", "]", "<|python_start|>", "<|python_end|>"), sizes=SIZES)
def test_pieces_never_matter(text, sizes):
    result = read(make(), [text])
    assert read(make(), cut(text, sizes)) == result
    assert result.calls or result.content == text
