# SPDX-License-Identifier: Apache-2.0
"""A pattern is refused for what the grammar would ignore, and otherwise the grammar takes what the pattern does."""

from __future__ import annotations

import json
import re
import time

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from phalanx.serve.structured_output.json_schema import enforceable
from phalanx.serve.structured_output.regex import MAX_DEPTH, expand_unicode_classes, unsupported_construct

TEXTS = [
    "", "a", "b", "A", "ab", "aa", "aab", "aaa", "abb", "1", "_", "-", ".", "/", "^", " ",
    "\u00a0", "\u2005", "\u2028", "\u3000", "é", "😀",
]  # fmt: skip


IGNORED = [
    ("a(?=b)", "a lookahead"),
    ("(?!a)[ab]", "a lookahead"),
    ("x(y|(?!a)b)", "a lookahead"),
    (r"\Aa", "the escape"),
    (r"a\Z", "the escape"),
    (r"[\b]", "the escape"),
    (r"[\p{L}]", "the escape"),
    (r"\u{22}", "the escape"),
    ("a^b", r"the anchor '\^'"),
    ("a$b", r"the anchor '\$'"),
    ("^a$b?", r"the anchor '\$'"),
    ("a(^)b", r"the anchor '\^'"),
    ("(^a)+$", r"the anchor '\^'"),
    ("(?:a|b$)*", r"the anchor '\$'"),
    ("((x)|a^)b", r"the anchor '\^'"),
    ("a++a", "the nested quantifier"),
    ("a{1,2}{2}", "the nested quantifier"),
    ("a???", "the nested quantifier"),
    ("ba$?", r"the quantifier '\?' after an anchor"),
    ("(a)^{2}", "the quantifier .* after an anchor"),
    (r"\x61b", r"the escape '\\\\x61' before the digit 'b'"),
    (r"[\x611]", "the escape"),
    (r"\01", "the escape"),
    ("[^]", "the class"),
]


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        *IGNORED,
        ("a[b", "a class that is not closed"),
        (r"[a\]", "a class that is not closed"),
        ("(" * (MAX_DEPTH + 1), "nested deeper"),
    ],
)
def test_what_the_grammar_would_ignore_is_named(pattern, part):
    assert re.search(part, unsupported_construct(pattern) or "")


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in IGNORED])
def test_xgrammar_would_not_reject_it(pattern):
    """In JSON. Where this fails, xgrammar has learned to say no, and the check has become redundant."""
    xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}))


@pytest.mark.parametrize(
    "pattern",
    [
        "(?<=a)b", "^(?<!a)b$", "x(y|(?<=a)b)", r"(a)\1", r"(?<n>a)\k<n>", r"\2", r"\ba", r"a\Bb", "x(?i)a", "(?m)^a$", "(?>a+)b",
        "(?i:a)", "(?#c)a", "(a", r"\p{L}",
    ],
)  # fmt: skip
def test_what_xgrammar_rejects_itself(pattern):
    """It is left to xgrammar, in JSON and outside."""
    for convert, text in (
        (xgrammar.Grammar.from_regex, pattern),
        (xgrammar.Grammar.from_json_schema, json.dumps({"type": "string", "pattern": expand_unicode_classes(pattern)})),
    ):
        with pytest.raises(RuntimeError, match="Regex parsing error"):
            convert(text)


@pytest.mark.parametrize(
    "pattern",
    [
        "", "a", "^a$", "^^a$$", "(^a)$", "^(a|b)$", "^a|b$", "(a$|b)", "a$|^b", "(^)a", "(^a)?b", "(?:^(?:a$))", "a(?:b$|b$)",
        "b*?$", "a{2}?b?", "(?P<n>a)b", "(?<n>a)b", "(?:a)b", r"^\^?$", r"^[\^$]$", r"^[^\]^$]$", r"\x61\u0062", r"^\/$", r"^\-$",
        "(?i)^a$", "^$", "(|a)", r"^\d$", r"^\w$", r"^\S$", r"^\S+$", "^.$", r"^.+$", r"^[^\s]$", r"^[^a\s]$", r"^[\S ]$",
        r"^[\S^]$", r"^[\s\S]$", r"^[.]$", r"^\.$", r"\x61[\x62-\x64g]?", r"\u0061b",
    ],
)  # fmt: skip
def test_what_is_enforced_passes_and_is(pattern):
    assert unsupported_construct(pattern) is None
    grammar = xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": expand_unicode_classes(pattern)}))
    taken = [text for text in TEXTS if _is_grammar_accept_string(grammar, json.dumps(text, ensure_ascii=False))]
    assert taken
    assert [text for text in taken if not re.search(pattern.replace("(?<n>", "(?P<n>"), text)] == []


def test_long_patterns_take_no_time():
    began = time.monotonic()
    assert unsupported_construct("(" * 90 + "^" * 50_000 + "a" * 50_000 + ")" * 90 + "$") is None
    assert unsupported_construct("[" * 130_000)
    pattern = r"\[" * 40_000
    assert enforceable({"type": "string", "pattern": pattern})["pattern"] == pattern
    assert time.monotonic() - began < 5
