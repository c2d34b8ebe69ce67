# SPDX-License-Identifier: Apache-2.0
"""What is written is what parsers read: strings stay strings, whichever characters they have."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.deploy import yaml_text

STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(STRINGS, VALUES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_documents_survive(documents):
    text = yaml_text.dumps(documents, comments=["a line", "two\nlines"])
    assert list(yaml.safe_load_all(text)) == documents
    assert list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))) == documents


# What parsers of YAML 1.1 and 1.2 read as something else than a string, among them those of Go.
OTHERS = (
    "y", "N", "yes", "Off", "TRUE", "null", "~", "", "08", "0o7", "0x1F", "1e5", "1_000", "12:30:45", "2024-01-01", ".5", "+1",
    "-1", "1.", ".inf", ".NaN", "=", "<<", "-", "--- x", "a: b", "a #b", "a:", "*a", "&a", "!a", "%a", "@a", "`a", "{a", "[a", "a ",
    " a", "a\n", "?", "a\tb", "1Gi",
)  # fmt: skip


@pytest.mark.parametrize("text", OTHERS)
def test_strings_that_look_like_something_else_are_in_quotes(text):
    assert re.fullmatch(r'key: ".*"\n', yaml_text.dumps([{"key": text}]))


def test_plain_words_are_plain():
    document = {"image": "registry.example/phalanx", "list": ["a-b", "c d"], "empty": [], "none": {}, "flag": True, "count": 3}
    assert yaml_text.dumps([document]) == (
        "image: registry.example/phalanx\nlist:\n- a-b\n- c d\nempty: []\nnone: {}\nflag: true\ncount: 3\n"
    )
