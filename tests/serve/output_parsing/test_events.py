# SPDX-License-Identifier: Apache-2.0
"""What the parsers share: markers at the end of a text, the first of several, and joined events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.serve.output_parsing.events import ContentParser, ContentText, first_of, overlap

TEXTS = st.text(alphabet="<ab>", max_size=12)
MARKERS = st.lists(st.text(alphabet="<ab>", min_size=1, max_size=5), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, markers=MARKERS)
def test_overlap(text, markers):
    ends = [text[len(text) - size :] for size in range(1, len(text) + 1)]
    beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
    assert overlap(text, *markers) == max((len(end) for end in ends if end in beginnings), default=0)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, markers=MARKERS)
def test_first_of(text, markers):
    match = first_of(text, *markers)
    places = [(text.find(marker), marker) for marker in markers if marker in text]
    if match is None:
        assert not places
    else:
        at, marker = match
        assert at == min(place for place, _ in places)
        assert len(marker) == max(len(other) for place, other in places if place == at)


def test_content():
    parser = ContentParser()
    assert parser.push("") == []
    assert parser.push("a") == [ContentText("a")]
    assert parser.finish() == []
