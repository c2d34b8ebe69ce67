# SPDX-License-Identifier: Apache-2.0
"""Reject or rewrite the parts of regular expressions that xgrammar ignores or misreads, with no more than a line on stderr.

xgrammar (0.2.8) has two parsers of patterns: one for JSON and one for a whole answer. What both reject is left to them, and the
client gets their message: lookbehinds, word boundaries, backreferences, and flags. Everything else is enforced for the whole text,
except what is checked here:

- lookaheads and nested quantifiers: in JSON the first are ignored, and possessive quantifiers backtrack;
- anchors: in the middle they are ignored by both. xgrammar warns, but also of anchors at an end, as in `(^a)`, which are harmless;
  a quantifier after an anchor applies to what precedes the anchor;
- escapes: an unknown one is its letter in both; `\\x61` takes more digits if more follow;
- classes: `[^]` allows control characters and quotation marks in the JSON; one that is not closed is rejected by xgrammar, too, but
  many of them would take long here;
- `\\S` and `.`: they match spaces and line ends outside of ASCII, and outside of JSON `.` matches those within ASCII: rewritten.

Tests say so when a version of xgrammar rejects one of these by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_DEPTH = 100
"""Open groups at once."""

_TOKEN = re.compile(
    r"""(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.|$))
      | (?P<class>\[\^?(?:\\.|[^\]\\])*\])
      | (?P<unclosed>\[)
      | (?P<open>\((?:\?:|\?P?<\w+>|(?!\?)))
      | (?P<other>\(\?(?:<[=!]|.|$))
      | (?P<close>\))
      | (?P<or>\|)
      | (?P<anchor>[\^$])
      | (?P<times>[*+?]|\{\d+(?:,\d*)?\})
      | (?P<plain>.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_MORE_DIGITS = re.compile(r"\\(?:x[0-9a-fA-F]{3}|0[0-7])")
"""Escapes whose digits end elsewhere than in ECMA-262."""
_KNOWN_LETTERS = frozenset("dDwWsStnrfv0")
_ONCE = ("?", "{0,1}", "{1}", "{1,1}", "{0}")
_SPACES = r"\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""What `\\s` matches outside of ASCII (ECMA-262, 22.2.2.9)."""
_NO_SPACE = rf"[^\s{_SPACES}]"
_NO_END_OF_LINE = r"[^\n\r\u2028\u2029]"


@dataclass
class _Group:
    """Alternatives of items; an item is an anchor, a group, or "" for anything that matches characters."""

    alternatives: list[list[_Group | str]] = field(default_factory=lambda: [[]])
    repeated: bool = False
    is_empty: bool = True


def unsupported_construct(pattern: str) -> str | None:
    """A description of the first part of a pattern that the grammar would not enforce; None if it enforces all."""
    groups, times, at = [_Group()], "", 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        assert match is not None  # "plain" matches anything
        kind, text, before = match.lastgroup, match.group(), times
        at, times = match.end(), ""
        items = groups[-1].alternatives[-1]
        complaint = _of_text(kind or "", text, after=pattern[at : at + 1])
        if complaint is not None:
            return complaint
        if kind in ("open", "other"):
            groups.append(_Group())
            items.append(groups[-1])
            if len(groups) > MAX_DEPTH:
                return f"groups nested deeper than {MAX_DEPTH}"
        elif kind == "close" and len(groups) > 1:
            groups.pop()
        elif kind == "or":
            groups[-1].alternatives.append([])
        elif kind == "times":
            times = before + text
            if before and (text != "?" or (before[-1:] == "?" and len(before) > 1)):
                return f"the nested quantifier {times!r}"
            if items and items[-1] in ("^", "$"):
                return f"the quantifier {text!r} after an anchor"
            if items and isinstance(items[-1], _Group):
                items[-1].repeated = items[-1].repeated or text not in _ONCE
        elif kind == "anchor":
            items.append(text)
        else:
            items.append("")
            for group in reversed(groups):
                if not group.is_empty:
                    break
                group.is_empty = False
    anchor = _misplaced(groups[0], first=True, last=True)
    return None if anchor is None else f"the anchor {anchor!r} in the middle"


def parts(pattern: str) -> Iterator[tuple[str, str]]:
    """The tokens of a pattern: ("class", "[a-z]"), ("escape", "\\\\n"), and so on."""
    return ((match.lastgroup or "", match.group()) for match in _TOKEN.finditer(pattern))


def expand_unicode_classes(pattern: str) -> str:
    """The pattern with `\\S` and `.` expanded; in the grammar they match all characters outside of ASCII, and `.` may match any."""
    return "".join(_expanded(kind, text) for kind, text in parts(pattern))


def _expanded(kind: str, text: str) -> str:
    if kind == "plain" and text == ".":
        return _NO_END_OF_LINE
    if kind == "escape" and text == r"\S":
        return _NO_SPACE
    if kind != "class":
        return text
    escapes = _ESCAPE.findall(text)
    if text.startswith("[^"):
        return f"[^{_SPACES}{text[2:]}" if r"\s" in escapes else text
    if r"\S" not in escapes or r"\s" in escapes:
        return text
    rest = _ESCAPE.sub(lambda match: "" if match.group() == r"\S" else match.group(), text[1:])
    rest = rf"[\{rest}" if rest.startswith("^") else f"[{rest}"
    return _NO_SPACE if rest == "[]" else f"(?:{_NO_SPACE}|{rest})"


def _of_text(kind: str, text: str, *, after: str) -> str | None:
    if kind == "escape":
        return _of_escape(text, after)
    if kind == "class":
        if text in ("[]", "[^]"):
            return f"the class {text!r}"
        inner = ((match.group(), text[match.end()]) for match in _ESCAPE.finditer(text))
        return next((complaint for escape, next_ in inner if (complaint := _of_escape(escape, next_, inside=True))), None)
    if kind == "unclosed":  # each one of many takes as long as the rest of the pattern
        return "a class that is not closed"
    return "a lookahead" if text in ("(?=", "(?!") else None


def _of_escape(text: str, after: str, *, inside: bool = False) -> str | None:
    """after: the next character, if any. inside: within a class."""
    letter = text[1:2]
    if _MORE_DIGITS.fullmatch(text + after):
        return f"the escape {text!r} before the digit {after!r}"
    if len(text) > 2 or not (letter.isascii() and letter.isalnum()) or letter in _KNOWN_LETTERS:
        return None
    if not inside and (letter in "bBk" or letter.isdigit()):  # word boundaries and backreferences
        return None
    return f"the escape {text!r}"


def _misplaced(group: _Group, *, first: bool, last: bool) -> str | None:
    """The first anchor that is not at its end of the text. first, last: nothing precedes the group, or follows it."""
    for items in group.alternatives:
        matching = [i for i, item in enumerate(items) if not _matches_nothing(item)]
        begin, end = (matching[0], matching[-1]) if matching else (len(items), -1)
        for i, item in enumerate(items):
            leads, trails = first and i <= begin, last and i >= end
            if isinstance(item, _Group):
                anchor = _misplaced(item, first=leads and not item.repeated, last=trails and not item.repeated)
                if anchor is not None:
                    return anchor
            elif (item == "^" and not leads) or (item == "$" and not trails):
                return item
    return None


def _matches_nothing(item: _Group | str) -> bool:
    return item.is_empty if isinstance(item, _Group) else item != ""
