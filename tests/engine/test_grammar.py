# SPDX-License-Identifier: Apache-2.0
"""The matcher: its masks allow what the grammar allows, drafts leave its state alone, and what is beyond a limit is a refusal."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.engine.grammar import CACHED_GRAMMARS, HEAD, Grammars, no_grammars
from phalanx.engine.messages import Vocabulary
from phalanx.errors import RequestError
from tests.support.grammars import EOS, SIZE, VOCABULARY, allowed, grammars

AB, ABC = 256, 257


def opened(lark: str):
    return grammars().open(HEAD + lark)


def test_masks_follow_the_tokens():
    matcher = opened("start: /abc?d?/")
    assert allowed(matcher.mask()) == [ord("a"), AB, ABC]
    matcher.accept(AB)
    assert allowed(matcher.mask()) == [ord("c"), ord("d"), EOS]
    assert not matcher.finished
    matcher.accept(EOS)
    assert matcher.finished
    assert allowed(matcher.mask()) == [EOS]
    matcher.accept(EOS)  # a step that was in flight
    matcher.accept(3)
    assert matcher.finished


def test_a_text_that_nothing_can_follow_ends_with_a_stop_token():
    matcher = opened('start: "abc"')
    matcher.accept(ABC)
    assert not matcher.finished
    assert allowed(matcher.mask()) == [EOS]
    with pytest.raises(RequestError, match="rejects the sampled token 97"):
        matcher.copy().accept(97)
    matcher.accept(EOS)
    assert matcher.finished


def test_two_matchers_of_one_grammar_are_independent():
    one, two = opened("start: /a+/"), opened("start: /a+/")
    one.accept(ord("a"))
    assert EOS in allowed(one.mask())
    assert EOS not in allowed(two.mask())


def test_drafts_are_masked_and_rolled_back():
    matcher = opened("start: /(ab|cd)+/")
    before = matcher.mask()
    a, b, c, d = b"abcd"
    cases = ([a, b, c, d], 5), ([a, c, d], 2), ([EOS], 1), ([a, -1, a], 2), ([a, b, EOS, a], 3), ([AB, AB, AB], 4), ([], 1)
    for drafts, count in cases:
        masks = matcher.masks(drafts)
        assert len(masks) == count, drafts
        assert masks[0] == matcher.mask() == before
        walked = opened("start: /(ab|cd)+/")
        for mask, draft in zip(masks, drafts, strict=False):
            assert mask == walked.mask()
            walked.accept(draft) if draft in allowed(mask) else None
    ending = opened('start: "a" "b"')
    assert [allowed(mask) for mask in ending.masks([a, b, EOS])] == [[a, AB], [b], [EOS]]
    assert [allowed(mask) for mask in ending.masks([a])] == [[a, AB], [b]]
    assert allowed(matcher.masks([a, b])[2]) == [a, c, AB, ABC, EOS]
    free = opened("start: /[cd]*;/ /ab/")  # as reasoning, whose end lies among the drafts
    assert [allowed(mask) for mask in free.masks([c, ord(";"), a, b])][1:4] == [[ord(";"), c, d], [a, AB], [b]]
    assert len(free.masks([c, ord(";"), c])) == 3
    matcher.accept(a)
    assert allowed(matcher.masks([b, c])[1]) == [a, c, AB, ABC, EOS]
    for token in (b, c, d):
        matcher.accept(token)
    assert EOS in allowed(matcher.mask())


def test_many_requests_at_once_read_a_grammar_once(monkeypatch):
    """128 completions of one request must not take the cores from the engine's loop."""
    calls = []
    read = Grammars._read

    def slowly(self, text):
        calls.append(text)
        time.sleep(0.05)
        return read(self, text)

    monkeypatch.setattr(Grammars, "_read", slowly)
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(lambda _: opened("start: /[ab]+once/"), range(8)))
    assert len(calls) == 1
    assert [allowed(matcher.mask()) for matcher in matchers] == [[ord("a"), ord("b"), AB]] * 8


def test_without_a_stop_token_the_end_of_the_grammar_ends():
    for size in (SIZE, 288, 289):
        matcher = Grammars(lambda: Vocabulary(VOCABULARY), size).open(HEAD + 'start: "a" /b+/ "c"')
        for letter in b"abb":
            assert not matcher.finished
            assert letter in {i for i in range(size) if matcher.mask()[i // 8] >> i % 8 & 1}
            matcher.accept(letter)
        matcher.accept(ord("c"))
        assert matcher.finished
        assert sum(bin(byte).count("1") for byte in matcher.mask()) == size


def test_a_token_that_does_not_fit_is_refused():
    with pytest.raises(RequestError, match="rejects the sampled token 98"):
        opened("start: /a/").accept(98)


def test_where_no_token_may_follow_the_answer_is_refused_and_no_bug_is_reported():
    with pytest.raises(RequestError, match="reached a dead end; the grammar allows no token of this vocabulary") as refused:
        opened("start: start")
    assert "bug" not in str(refused.value)
    small = Grammars(lambda: Vocabulary([b"a", b"b", b"\xff<end>"]), 3, [2])
    assert small.open(HEAD + "start: /a|c/").mask()
    with pytest.raises(RequestError, match="dead end"):
        small.open(HEAD + "start: /c/")


@pytest.mark.parametrize("text", ["", "{", "start: nobody", '{"grammars": []}', "start: <[400]>"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(RequestError, match="cannot be read"):
        grammars().open(text)


def test_a_grammar_beyond_a_limit_is_refused():
    matcher = opened("start: /(a{0,200}){0,200}b/")

    def follow():
        for _ in range(5_000):
            matcher.accept(ord("a"))
            matcher.mask()

    with pytest.raises(RequestError, match="takes too long to follow; the grammar exceeds a limit of the parser"):
        follow()


def test_the_latest_grammars_stay_in_memory(monkeypatch):
    calls = []
    read = Grammars._read
    monkeypatch.setattr(Grammars, "_read", lambda self, text: calls.append(text) or read(self, text))
    own = Grammars(lambda: Vocabulary(VOCABULARY), SIZE, [EOS])
    for number in (*range(CACHED_GRAMMARS), 1, CACHED_GRAMMARS, 1, 0):
        own.open(f"{HEAD}start: /a{{{number + 1}}}/")
    assert len(calls) == CACHED_GRAMMARS + 2


def test_the_stop_tokens_of_the_tokenizer_serve_a_model_without_any():
    assert Grammars(lambda: Vocabulary(VOCABULARY, [EOS]), SIZE).open(HEAD + "start: /a?/").mask()[EOS // 8] >> EOS % 8 & 1
    with pytest.raises(RequestError, match="opens no grammars"):
        no_grammars("start: /a/")
