# SPDX-License-Identifier: Apache-2.0
"""Structured output: random tokens that a grammar allows form a valid text; a bad format is an OptionError with its reason."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.engine.grammar import Matcher
from phalanx.errors import EngineError, OptionError, RequestError
from phalanx.serve.structured_output import compiler as compiler_module
from phalanx.serve.structured_output.compiler import NICE, NO_TEXT, StructuredOutputCompiler, compile_structured_output, token_bytes
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_processes import session_nice

pytestmark = pytest.mark.usefixtures("forked_python")

SPECIAL = ["<|end|>", "<|user|>"]
WIDTH = 450  # logits are wider than the tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(['{"name": "Ann", "age": 31}, {"name": "Zoë"}', "the cat sat on the mat in the hall"] * 20, trainer)
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {}, origin="toy")


def compiled(params, tokenizer):
    return compile_structured_output(params, tokenizer, vocab_size=WIDTH, eos_token_ids=[tokenizer.eos_token_id])


def allowed(matcher):
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")).tolist()


def write(params, tokenizer, seed, most=400):
    """What a model without taste writes: a random allowed token each time, the end as soon as it may after a while."""
    matcher, rng, tokens = Matcher(compiled(params, tokenizer).compiled), random.Random(seed), []
    closing = [i for i, text in enumerate(token_bytes(tokenizer, WIDTH)) if text[:1] in (b'"', b"}", b"]")]
    while True:
        may = allowed(matcher)
        assert may, tokenizer.decode(tokens)
        assert all(i == tokenizer.eos_token_id or (i not in tokenizer.special_ids and i < tokenizer.vocab_size) for i in may)
        if tokenizer.eos_token_id in may and (len(tokens) > 20 or len(may) == 1):
            matcher.accept(tokenizer.eos_token_id)
            assert matcher.finished
            return tokenizer.decode(tokens)
        ending = [token for token in may if token in closing] if len(tokens) > 30 else []
        token = rng.choice(ending or [t for t in may if t != tokenizer.eos_token_id] or may)
        tokens.append(token)
        matcher.accept(token)
        assert len(tokens) < most, tokenizer.decode(tokens)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "maxItems": 3},
        "kind": {"anyOf": [{"const": "x y"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
}


def test_json_schema(tokenizer):
    for seed in range(15):
        text = write(StructuredOutputParams(json_schema=json.dumps(PERSON)), tokenizer, seed)
        person = json.loads(text)
        assert set(person) <= set(PERSON["properties"])
        assert set(person) >= {"name", "age"}
        assert len(person["name"]) <= 12 or "\ufffd" in person["name"]  # half a character is one to the grammar
        assert 0 <= person["age"] <= 150
        assert set(person.get("tags", [])) <= {"a", "b", "ü"}
        assert person.get("kind") in ("x y", None)
        assert text == json.dumps(person, ensure_ascii=False) or "\\" in text  # no white space but one blank


def test_json_object(tokenizer):
    for seed in range(15):
        text = write(StructuredOutputParams(json_object=True), tokenizer, seed)
        assert isinstance(json.loads(text), dict)
        assert not re.search(r"\s\s|\n", re.sub(r'"(\\.|[^"\\])*"', '""', text))


def test_regex_and_grammar(tokenizer):
    for seed in range(5):
        assert re.fullmatch(
            r"[a-z]{3,9}@(the|cat)\.com", write(StructuredOutputParams(regex=r"[a-z]{3,9}@(the|cat)\.com"), tokenizer, seed)
        )
        text = write(StructuredOutputParams(grammar='root ::= "(" root ")" | [0-9]+'), tokenizer, seed, most=3000)
        assert re.fullmatch(r"\(*\d+\)*", text)
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize("pattern", [".", r"\S", r"[\S ]", ".{1,2}"])
def test_a_regex_takes_no_end_of_line(tokenizer, pattern):
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\r", "\u2028")]
    for params in (StructuredOutputParams(regex=pattern), StructuredOutputParams(structural_tag=json.dumps(tag))):
        for tokens in ends:
            matcher = Matcher(compiled(params, tokenizer).compiled)
            with pytest.raises(RequestError, match="the grammar rejects the sampled token"):
                [matcher.accept(token) for token in tokens]


def test_structural_tag(tokenizer):
    tag = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</call>"}
    layout = {"type": "tags_with_separator", "tags": [tag], "separator": "\n", "at_least_one": True, "stop_after_first": True}
    text = write(StructuredOutputParams(structural_tag=json.dumps({"type": "structural_tag", "format": layout})), tokenizer, 1)
    assert json.loads(text.removeprefix("<call>").removesuffix("</call>"))["age"] <= 150


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (StructuredOutputParams(json_schema="{"), "not valid JSON"),
        (StructuredOutputParams(json_schema="[]"), "JSON object"),
        (StructuredOutputParams(json_schema='{"type": "wish"}'), "wish"),
        (StructuredOutputParams(json_schema='{"$ref": "#/nowhere"}'), "nowhere"),
        (StructuredOutputParams(json_schema="false"), "cannot accept"),
        (StructuredOutputParams(json_schema='{"type": "integer", "minimum": 3, "maximum": 1}'), "minimum"),
        (StructuredOutputParams(json_schema='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (StructuredOutputParams(json_schema='{"items":' * 60 + "{}" + "}" * 60), "nested deeper"),
        (StructuredOutputParams(json_schema='{"const": "\\ud800"}'), "surrogate|JSON"),
        (StructuredOutputParams(regex="("), "parenthesis"),
        (StructuredOutputParams(regex=r"(a)\1"), "Backreference is not supported"),
        (StructuredOutputParams(regex="a^b"), "the anchor '\\^'"),
        (StructuredOutputParams(regex="(" * 5000 + "a" + ")" * 5000), "[Nn]est"),
        (StructuredOutputParams(regex="a" * 40000), "40000"),
        (StructuredOutputParams(regex="\ud800"), "cannot be compiled"),
        (StructuredOutputParams(grammar="root ::= nobody"), "nobody"),
        (StructuredOutputParams(grammar=""), "root"),
        (StructuredOutputParams(grammar="root ::= root"), "no finite text satisfies it: every alternative of its rule 'root'"),
        (StructuredOutputParams(grammar='root ::= "a" x | "b"\nx ::= "c" x'), "its rule 'x'"),
        (StructuredOutputParams(json_schema='{"$ref": "#"}'), "no finite text"),
        (
            StructuredOutputParams(
                json_schema='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'
            ),
            "no finite text",
        ),
        (
            StructuredOutputParams(json_schema='{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
            "no finite text",
        ),
        (StructuredOutputParams(structural_tag="{}"), "structural_tag"),
        (
            StructuredOutputParams(
                structural_tag='{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}'
            ),
            "'not'",
        ),
        (
            StructuredOutputParams(structural_tag='{"type": "structural_tag", "format": {"type": "regex", "pattern": "a$b"}}'),
            "the anchor '\\$'",
        ),
    ],
)
def test_a_bad_format_says_what_is_wrong(tokenizer, params, why):
    with pytest.raises(OptionError, match=why) as raised:
        compiled(params, tokenizer)
    assert "/project/" not in str(raised.value)


def test_a_grammar_that_no_token_can_begin_is_rejected():
    compiler = StructuredOutputCompiler([b"a", b"b", b""], [2])
    try:
        assert compiler.compile(StructuredOutputParams(regex="a|c")).compiled
        with pytest.raises(OptionError, match="none of its tokens can be the first"):
            compiler.compile(StructuredOutputParams(regex="c"))
    finally:
        compiler.close()


def test_a_guide_is_compiled_once_and_sent_by_name(tokenizer):
    first = compiled(StructuredOutputParams(regex="[ab]{5}c"), tokenizer)
    again = compiled(StructuredOutputParams(regex="[ab]{5}c", compiled="forged"), tokenizer)
    assert first.compiled == again.compiled
    assert len(first.compiled) < 400
    path = Path(json.loads(first.compiled)["grammar"])
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.unlink()  # a cleaned temporary folder costs a compilation, no request
    assert Matcher(compiled(StructuredOutputParams(regex="[ab]{5}c"), tokenizer).compiled).mask()


def slow_schema(number=0):
    """A schema that takes minutes to compile."""
    properties = [(f"k{number}_{i}", {"type": "string", "pattern": f"[a-z]{{1,{i + 300}}}"}) for i in range(900)]
    alternatives = [{"type": "object", "properties": {name: kind}, "required": [name]} for name, kind in properties]
    return StructuredOutputParams(json_schema=json.dumps({"anyOf": alternatives}))


def test_short_ones_pass_long_ones(tokenizer):
    """Four formats that reach the limit of time, of which two run at a time, hold up no other; callers share a compilation."""
    compiler = StructuredOutputCompiler(token_bytes(tokenizer, WIDTH), [0], seconds=2.5)
    compiler.compile(StructuredOutputParams(regex="start"))
    with ThreadPoolExecutor(12) as threads:
        slow = [threads.submit(compiler.compile, slow_schema(number)) for number in (0, 1, 2, 3, 0, 0)]
        time.sleep(0.2)
        seconds = []
        for moment in range(4):
            began = time.monotonic()
            assert compiler.compile(StructuredOutputParams(regex=f"[ab]{{{moment + 1}}}")).compiled
            seconds.append(time.monotonic() - began)
            time.sleep(0.05)
        # One or two may meet a moment in which others have the cores; behind a long one, all would be late.
        assert statistics.median(seconds) < 1.0, seconds
        assert not all(one.done() for one in slow)
        for one in slow:
            with pytest.raises(OptionError, match=r"longer than 2\.5 s"):
                one.result()
    assert slow[0].exception() is slow[4].exception() is slow[5].exception()
    compiler.close()


def test_a_process_that_ends_as_it_starts_is_an_error(tokenizer, monkeypatch):
    """It connects, and ends before it says where its tokenizer is: as with a full disk."""

    class Ended:
        pid = 1 << 30  # of nobody
        alive = False

    def start(module, config, title):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(config["socket"])
        return Ended()

    monkeypatch.setattr(compiler_module.launch, "start", start)
    monkeypatch.setattr(compiler_module.launch, "stop", lambda children, grace: None)
    compiler = StructuredOutputCompiler(token_bytes(tokenizer, WIDTH), [0])
    with pytest.raises(EngineError, match="the compiler of structured output ended at its start"):
        compiler.compile(StructuredOutputParams(regex="abc"))
    compiler.close()


def test_memory_has_a_limit(tokenizer):
    compiler = StructuredOutputCompiler(token_bytes(tokenizer, WIDTH), [0], memory=16 << 20)
    with pytest.raises(OptionError, match="memory"):
        compiler.compile(StructuredOutputParams(json_schema=json.dumps({"enum": [f"v{i}" * 3 for i in range(6000)]})))
    assert compiler.compile(StructuredOutputParams(regex="abc")).compiled
    compiler.close()


def long_strings(lengths):
    """Ten alternatives of optional strings, each of its own length."""
    kinds = [{"type": "string", "maxLength": length} for length in lengths]
    alternatives = [{"type": "object", "properties": {f"p{i}_{j}": kinds[10 * i + j] for j in range(10)}} for i in range(10)]
    return StructuredOutputParams(json_schema=json.dumps({"anyOf": alternatives}))


def test_many_long_optional_strings(tokenizer):
    matcher = Matcher(compiled(long_strings([200] * 100), tokenizer).compiled)
    for token in tokenizer.encode('{"p3_1": "' + "x" * 200):
        matcher.accept(token)
    assert [tokenizer.decode([token])[:1] for token in allowed(matcher)] == ['"'] * len(allowed(matcher)) != []


def test_a_compiler_that_is_stuck_or_dies_costs_one_guide(tokenizer):
    """A schema that takes minutes to compile, twice: once it takes too long, and once something kills its compiler."""
    compiler = StructuredOutputCompiler(token_bytes(tokenizer, WIDTH), [0], seconds=1.0)
    with pytest.raises(OptionError, match=r"longer than 1 s"):
        compiler.compile(slow_schema())
    first = compiler.compile(StructuredOutputParams(regex="abc"))
    nice = os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert session_nice(compiler._process._child.pid) in (None, nice), "it has its full weight beside the server"
    killer = threading.Timer(0.3, os.kill, [compiler._process._child.pid, signal.SIGKILL])
    killer.start()
    with pytest.raises(OptionError, match="killed by SIGKILL"):
        compiler.compile(slow_schema())
    killer.join()
    assert compiler.compile(StructuredOutputParams(regex="abc")) == first
    folder = Path(json.loads(first.compiled)["grammar"]).parent
    compiler.close()
    assert not folder.exists()


def test_token_bytes_undo_the_vocabulary(tokenizer):
    contents = token_bytes(tokenizer, WIDTH)
    assert len(contents) == WIDTH
    for text in ('{"name": "Zoë"}', "the cat\n\t sat", "日本"):
        assert b"".join(contents[i] for i in tokenizer.encode(text)) == text.encode()
    assert all(contents[tokenizer.backend.token_to_id(name)] == NO_TEXT + name.encode() for name in SPECIAL)


def test_token_bytes_of_a_byte_fallback_vocabulary():
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "▁the": 2, "▁": 3, "<0xE6>": 4, "<tool>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>"])
    backend.add_tokens(["<tool>"])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    contents = token_bytes(Tokenizer(backend, {}, {}, origin="toy"), 8)
    assert contents == [NO_TEXT + b"<unk>", b"\n", b" the", b" ", b"\xe6", b"<tool>", b"", b""]
