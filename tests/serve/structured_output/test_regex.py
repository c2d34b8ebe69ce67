# SPDX-License-Identifier: Apache-2.0
"""A pattern takes what ECMA-262 says; what Rust's syntax would read in another way is refused."""

from __future__ import annotations

import re
import time

import pytest

from phalanx.errors import OptionError
from phalanx.serve.structured_output.regex import rust_regex
from tests.support.grammars import accepts, opened

TEXTS = [
    "",
    "a",
    "b",
    "A",
    "ab",
    "aa",
    "aab",
    "aaa",
    "abb",
    "1",
    "_",
    "-",
    ".",
    "/",
    "^",
    " ",
    "[",
    "&",
    "{",
    "a&b",
    "\n",
    "\r",
    "\x85",
    "\u00a0",
    "\u2005",
    "\u2028",
    "\u3000",
    "\ufeff",
    "é",
    "😀",
    "٣",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        "a?b*",
        "(?:a|b)+",
        "(a|b){2,3}",
        "(?P<n>a)b",
        "(?<n>a)b",
        "b*?",
        r"\x61\u0062",
        r"\d",
        r"\w",
        r"\W",
        r"\D",
        r"\S",
        r"\s",
        r"[^\s]",
        r"[\S]",
        r"[a\s]",
        r"[^a\S]",
        ".",
        ".{1,2}",
        "[^é]",
        "[é😀]",
        r"[\S^]",
        r"[\s\S]",
        "[.]",
        r"\.",
        r"[a-c&&b]",
        "[[]",
        r"[a[]",
        r"[+--]",
        "[a~~b]",
        r"\/",
        r"\-",
        "/",
        "{",
        "a{2}",
        r"\{",
        "(?i)a",
        "(?i:A)b",
        "^a$",
        "^(a|b)$",
    ],
)
def test_the_whole_text_matches(pattern):
    python = pattern.replace("(?<n>", "(?P<n>").replace(r"\s", "<s>").replace(r"\S", "<S>")
    spaces = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    inside = python.startswith("[")
    python = python.replace("<s>", spaces if inside else f"[{spaces}]")
    if "<S>" in python:
        python = {"<S>": f"[^{spaces}]", "[<S>]": f"[^{spaces}]", "[<S>^]": f"[^{spaces}]"}.get(python, "")
    if pattern in (r"[^a\S]", r"[\s\S]"):
        python = f"[{spaces}]" if pattern == r"[^a\S]" else r"[\s\S]"
    python = {
        ".": r"[^\n\r\u2028\u2029]",
        ".{1,2}": r"[^\n\r\u2028\u2029]{1,2}",
        "{": r"\{",
        r"[a-c&&b]": "[a-c&]",
        "[[]": r"\[",
        r"[a[]": r"[a\[]",
        "[+--]": r"[+-\-]",
        "[a~~b]": "[a~b]",
    }.get(pattern, python)
    matcher = opened("regex", pattern)
    assert python
    taken = [text for text in TEXTS if accepts(matcher, text)]
    assert taken == [text for text in TEXTS if re.fullmatch(python, text, re.ASCII)]


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("a++a", r"the quantifier '\+' after '\+'"),
        ("a{1,2}{2}", "the quantifier '.2.' after"),
        ("a???", "the quantifier"),
        ("[]a]", "the empty class"),
        (r"\ca", "the escape"),
        (r"[\c]", "the escape"),
        ("(?x)a b", "the flags"),
        ("a(?=b)", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "backreferences"),
        (r"\ba", "lookarounds not supported"),
        ("(", "unclosed"),
        ("a^b", "not supported"),
        ("(" * 5000 + ")" * 5000, "nest"),
        ("a" * 40000, "40000"),
        ("\ud800", "not valid text"),
    ],
)
def test_what_has_no_equal_is_named(pattern, part):
    with pytest.raises(OptionError, match=part):
        opened("regex", pattern)


def test_long_patterns_take_no_time():
    began = time.monotonic()
    rust_regex("(" * 90 + "^" * 50_000 + "a" * 50_000 + ")" * 90 + "$", what="pattern")
    rust_regex(r"\[" * 40_000, what="pattern")
    with pytest.raises(OptionError, match="not closed"):
        rust_regex("[" * 60_000, what="pattern")
    assert time.monotonic() - began < 5
