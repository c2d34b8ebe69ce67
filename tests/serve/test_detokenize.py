# SPDX-License-Identifier: Apache-2.0
"""Text that grows token by token against text that is decoded whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from phalanx.config import SamplingParams
from phalanx.serve.detokenize import Detokenizer, StopString
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_small_tokenizers import byte_level, sentencepiece, write


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    backends = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
    return {name: Tokenizer.load(write(tmp_path_factory.mktemp(name), backend)) for name, backend in backends.items()}


def pushed(tokenizer, ids, params, groups=()):
    """The pieces that come out, with the ids pushed in groups of these sizes (then one by one)."""
    detokenizer = Detokenizer(tokenizer, params)
    pieces, rest = [], list(ids)
    for size in [*groups, *[1] * len(rest)]:
        if detokenizer.stop_reason is None and rest:
            pieces.append(detokenizer.push(rest[:size]))
            rest = rest[size:]
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return detokenizer, pieces


names = st.sampled_from(["byte_level", "sentencepiece"])
sizes = st.lists(st.integers(1, 5), max_size=8)


@settings(deadline=None, max_examples=150)
@given(names, st.text(max_size=30), sizes, st.booleans())
def test_text_of_any_characters(tokenizers, name, text, groups, skip):
    tokenizer = tokenizers[name]
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id, *tokenizer.encode(text[::-1], add_special_tokens=False)]
    detokenizer, _ = pushed(tokenizer, ids, SamplingParams(skip_special_tokens=skip), groups)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.count == len(ids)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 450), max_size=40), sizes, st.booleans())
def test_any_tokens_of_bytes(tokenizers, ids, groups, skip):
    """Broken characters, special tokens and ids beyond the vocabulary included."""
    tokenizer = tokenizers["byte_level"]
    detokenizer, _ = pushed(tokenizer, ids, SamplingParams(skip_special_tokens=skip), groups)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 400), max_size=40), sizes)
def test_any_tokens_with_byte_fallback(tokenizers, ids, groups):
    """A run of bytes that is no text decodes, whole, to nothing but U+FFFD; piece by piece, the characters in it are kept. So only
    what holds no such run must be the same. The grouping of tokens changes nothing."""
    tokenizer = tokenizers["sentencepiece"]
    detokenizer, _ = pushed(tokenizer, ids, SamplingParams(), groups)
    alone, _ = pushed(tokenizer, ids, SamplingParams())
    assert detokenizer.text == alone.text
    expected = tokenizer.decode(ids)
    if "�" not in expected:
        assert detokenizer.text == expected


class Nothing(dict):
    from_start = False

    def __missing__(self, token_id):
        return None


class Careful:
    """The same tokenizer, of which nothing is known about any token alone."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.fragments = Nothing()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@settings(deadline=None, max_examples=400)
@given(names, st.lists(st.integers(0, 450), max_size=60), sizes, st.booleans())
def test_what_is_looked_up_comes_when_it_would_have_been_decoded(tokenizers, name, ids, groups, skip):
    """Piece by piece, whatever the tokens."""
    tokenizer = tokenizers[name]
    params = SamplingParams(skip_special_tokens=skip)
    assert pushed(tokenizer, ids, params, groups)[1] == pushed(Careful(tokenizer), ids, params, groups)[1]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_most_tokens_are_looked_up(tokenizers, monkeypatch, name):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("hello world, the world is wide", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    first = detokenizer.push([*ids, *ids])
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("a token was decoded"))
    more = "".join(detokenizer.push([token]) for token in ids)
    assert (first + more).replace(" ", "") == "helloworld,theworldiswide" * 3


def test_a_decoder_that_is_not_known_is_asked_each_time(tmp_path):
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("l", "L")])
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert {tokenizer.fragments[token] for token in ids} == {None}
    assert pushed(tokenizer, ids, SamplingParams())[0].text == "heLLo worLd"


@settings(deadline=None, max_examples=200)
@given(
    names,
    st.text("ab你🙂 ", max_size=20),
    st.lists(st.text("ab你🙂 ", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes,
    st.booleans(),
)
def test_stop_strings(tokenizers, name, text, stops, groups, keep):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(ids)
    detokenizer, _ = pushed(tokenizer, ids, SamplingParams(stop=stops, include_stop_str_in_output=keep), groups)
    ends = [(expected.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in expected]
    if not ends:
        assert (detokenizer.text, detokenizer.stop_reason, detokenizer.count) == (expected, None, len(ids))
        return
    end, _, stop = min(ends)
    assert detokenizer.stop_reason == stop
    assert detokenizer.text == expected[: end if keep else end - len(stop)]
    # The count is the first number of tokens whose text holds the stop string.
    assert stop in tokenizer.decode(ids[: detokenizer.count])
    assert all(other not in tokenizer.decode(ids[: detokenizer.count - 1]) for other in stops)


@settings(deadline=None, max_examples=150)
@given(st.text("ab ", max_size=20), st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_let_go_that_could_be_a_stop_string(tokenizers, text, stops):
    """What is out at any time is as much as can be: the rest may begin a stop string."""
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count, token in enumerate(ids, 1):
        detokenizer.push([token])
        so_far = tokenizer.decode(ids[:count])
        if detokenizer.stop_reason is not None:
            return
        assert so_far.startswith(detokenizer.text)
        held_back = so_far[len(detokenizer.text) :]
        assert not held_back or any(stop.startswith(held_back) for stop in stops)
        longest = max((k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k])), default=0)
        assert len(held_back) == longest


@pytest.mark.parametrize(("min_tokens", "text", "count"), [(0, "", 1), (1, "", 1), (2, "ab", 3), (3, "ab", 3), (4, "abababab", 8)])
def test_no_stop_before_min_tokens(tokenizers, min_tokens, text, count):
    tokenizer = tokenizers["byte_level"]
    letters = [tokenizer.backend.token_to_id(letter) for letter in "ab"]
    stops = ["a"] if min_tokens < 4 else ["zz", "aba!"]
    detokenizer, _ = pushed(tokenizer, letters * 4, SamplingParams(stop=stops, min_tokens=min_tokens))
    assert (detokenizer.text, detokenizer.count) == (text, count)


def test_min_tokens_may_fall_inside_a_stop_string(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = [tokenizer.backend.token_to_id(letter) for letter in "xabcy"]
    detokenizer, _ = pushed(tokenizer, ids, SamplingParams(stop="abc", min_tokens=3))
    assert (detokenizer.text, detokenizer.stop_reason, detokenizer.count) == ("x", "abc", 4)


def test_a_stop_token_has_no_text(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = [tokenizer.backend.token_to_id(letter) for letter in "abc"]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert detokenizer.push(ids, silent=1) + detokenizer.finish() == "ab"
    assert detokenizer.count == 3


def test_a_character_waits_for_its_bytes(tokenizers):
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 4
    _, pieces = pushed(tokenizer, ids, SamplingParams())
    assert [piece for piece in pieces if piece] == ["🙂"]
    _, pieces = pushed(tokenizer, ids[:-1], SamplingParams())
    assert set("".join(pieces)) == {"�"}


def test_a_token_that_ends_one_character_and_begins_the_next(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("🙂🙂", add_special_tokens=False)
    _, pieces = pushed(tokenizer, ids, SamplingParams())
    for count in range(1, len(ids)):
        assert "".join(pieces[:count]) == tokenizer.decode(ids[:count]).rstrip("�")


def test_stop_string_automaton_overlaps():
    stop = StopString("aab")
    assert [stop.push(letter) for letter in "aaaabaab"] == [False] * 4 + [True] + [False, False, True]


@pytest.mark.parametrize("kind", ["words", "broken", "silent"])
def test_time_per_token_does_not_grow(tokenizers, kind):
    """Ten times the tokens take about ten times as long, not a hundred."""
    tokenizer = tokenizers["byte_level"]
    byte = tokenizer.backend.token_to_id("ä")  # 0xE4, which begins a character that never ends
    token = {"words": tokenizer.encode("hello", add_special_tokens=False)[0], "broken": byte, "silent": tokenizer.eos_token_id}[
        kind
    ]

    def seconds(count):
        best = float("inf")
        for _ in range(3):
            detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["zzz"]))
            begin = time.thread_time()  # the machine may have others to serve
            for _ in range(count):
                detokenizer.push([token])
            detokenizer.finish()
            best = min(best, time.thread_time() - begin)
        return best

    assert seconds(5000) < 40 * seconds(500)
