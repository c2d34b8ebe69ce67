# SPDX-License-Identifier: Apache-2.0
"""The matcher: its masks allow what the grammar allows, and a file that cannot be read is a refusal."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xgrammar

from phalanx.engine import grammar
from phalanx.engine.grammar import GrammarCache, Matcher, warm
from phalanx.errors import RequestError

VOCABULARY = [bytes([i]) for i in range(256)] + [b"ab", b"abc", b"<end>", b""]
EOS, VOCAB = 258, 300  # logits are wider than the tokenizer


def write(folder, regex, *, eos=(EOS,), ebnf=None):
    info = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=list(eos))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    compiled = compiler.compile_regex(regex) if ebnf is None else compiler.compile_grammar(ebnf)
    files = {"tokenizer": folder / "tokenizer.json", "grammar": folder / "grammar.json"}
    files["tokenizer"].write_text(info.serialize_json(), encoding="utf-8")
    files["grammar"].write_text(compiled.serialize_json(), encoding="utf-8")
    return json.dumps({name: str(path) for name, path in files.items()})


def allowed(mask):
    assert len(mask) == 4 * ((VOCAB + 31) // 32)
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()


def test_masks_follow_the_tokens(tmp_path):
    warm()
    matcher = Matcher(write(tmp_path, "abc?"))
    assert allowed(matcher.mask()) == [ord("a"), 256, 257]
    matcher.accept(256)
    assert allowed(matcher.mask()) == [ord("c"), EOS]
    assert not matcher.finished
    matcher.accept(EOS)
    assert matcher.finished
    assert allowed(matcher.mask()) == [EOS]
    matcher.accept(EOS)  # a step that was in flight
    matcher.accept(3)
    assert matcher.finished


def test_two_matchers_of_one_grammar_are_independent(tmp_path):
    compiled = write(tmp_path, "a+")
    one, two = Matcher(compiled), Matcher(compiled)
    one.accept(ord("a"))
    assert EOS in allowed(one.mask())
    assert EOS not in allowed(two.mask())


def test_many_requests_at_once_read_a_grammar_and_make_its_first_mask_once(tmp_path, monkeypatch):
    """128 completions of one request took the cores from the engine's loop: its tokens were late by 0.3 s."""
    compiled, calls = write(tmp_path, "[ab]+c"), []
    read, next_mask = grammar._read, Matcher._next_mask

    def slowly(name, work):
        def call(*args):
            calls.append(name)
            time.sleep(0.05)
            return work(*args)

        return call

    monkeypatch.setattr(grammar, "_read", slowly("read", read))
    monkeypatch.setattr(Matcher, "_next_mask", slowly("mask", next_mask))
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(lambda _: Matcher(compiled), range(8)))
        masks = list(pool.map(lambda matcher: matcher.mask(), matchers))
    assert calls == ["read", "mask"]
    assert [allowed(mask) for mask in masks] == [[ord("a"), ord("b"), 256, 257]] * 8
    matchers[0].accept(ord("a"))
    assert ord("c") in allowed(matchers[0].mask())
    assert calls == ["read", "mask", "mask"], "what follows the first token is each one's own"


def test_without_a_stop_token_the_end_of_the_grammar_ends(tmp_path):
    matcher = Matcher(write(tmp_path, "ab", eos=()))
    matcher.accept(ord("a"))
    assert not matcher.finished
    matcher.accept(ord("b"))
    assert matcher.finished
    assert allowed(matcher.mask()) == list(range(VOCAB))


def test_a_token_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(RequestError, match="token 98"):
        Matcher(write(tmp_path, "a")).accept(98)


def test_where_no_token_may_follow_the_answer_is_refused_and_no_bug_is_reported(tmp_path):
    matcher = Matcher(write(tmp_path, "a", ebnf='root ::= "a" x | "b"\nx ::= x'))
    assert allowed(matcher.mask()) == [ord("a"), ord("b")]
    matcher.accept(ord("a"))
    assert allowed(matcher.mask()) == []
    with pytest.raises(RequestError, match="reached a dead end; the grammar allows no token of this vocabulary") as refused:
        matcher.accept(0)
    assert "bug" not in str(refused.value)


@pytest.mark.parametrize("compiled", ["", "{", "[]", "{}", '{"tokenizer": "/nowhere/t", "grammar": "/nowhere/g"}'])
def test_what_cannot_be_read_is_refused(compiled):
    with pytest.raises(RequestError, match="cannot be read"):
        Matcher(compiled)


def test_a_damaged_file_is_refused(tmp_path):
    compiled = write(tmp_path, "a")
    path = tmp_path / "grammar.json"
    path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.raises(RequestError, match="cannot be read"):
        Matcher(compiled)


def test_the_cache_is_bounded_by_bytes(tmp_path):
    grammars = []
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        grammars.append(write(tmp_path / str(number), f"[ab]{{{20 + number}}}"))
    size = len((tmp_path / "0" / "grammar.json").read_text())
    cache = GrammarCache(max_bytes=4 * size)
    first = cache.read(grammars[0])
    for each in grammars[1:3]:
        cache.read(each)
    assert cache.read(grammars[0]) is first
    for each in grammars[3:]:
        cache.read(each)
    assert 2 <= len(cache) <= 4
    assert cache.read(grammars[1]) is not first
    small = GrammarCache(max_bytes=1)
    assert small.read(grammars[0]) is small.read(grammars[0])  # one stays, whatever its size
    small.read(grammars[1])
    assert len(small) == 1
