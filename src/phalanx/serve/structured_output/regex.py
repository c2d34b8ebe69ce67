# SPDX-License-Identifier: Apache-2.0
"""Write a client's regular expression (ECMA-262, as in JSON Schema) in the syntax of llguidance, which is that of Rust.

Most of the two syntaxes is equal, or an error in Rust's, which the client gets: lookarounds, word boundaries, backreferences, and
anchors in the middle. What Rust would read in another way is written anew here, or refused: classes within classes, `.`, `\\s`, `{`
as a character, possessive quantifiers, and escapes of letters. llguidance reads `\\d` and `\\w` as ECMA-262 does.
"""

from __future__ import annotations

import re

from phalanx.errors import OptionError

_TOKEN = re.compile(
    r"""(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|p\{\w+\}|P\{\w+\}|.|$))
      | (?P<class>\[\^?(?:\\.|[^\]\\])*\])
      | (?P<unclosed>\[)
      | (?P<flags>\(\?[a-zA-Z-]+[:)])
      | (?P<group>\((?:\?(?:[:=!]|P?<(?:[=!]|\w+>)))?)
      | (?P<times>[*+?]|\{\d+(?:,\d*)?\})
      | (?P<plain>.)""",
    re.DOTALL | re.VERBOSE,
)
_IN_CLASS = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{\w+\}|.)|&&|--|~~|\[|[^\\]", re.DOTALL)
_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""What `\\s` matches (ECMA-262, 22.2.2.9); Rust's has U+0085 besides, and lacks U+FEFF."""
_WRITTEN = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", r"\0": r"\x00", r"\<": "<", r"\>": ">", r"\v": r"\x0b"}
_LETTERS = frozenset("dDwWsStnrfv0bBAzkpPxu")


def rust_regex(pattern: str, *, what: str) -> str:
    """The pattern in Rust's syntax. Raises OptionError naming `what` and the first part that has no equal there."""
    written: list[str] = []
    before = ""  # the quantifier that has just ended
    for match in _TOKEN.finditer(pattern):
        kind, text = match.lastgroup, match.group()
        if kind == "times":
            if before and (text != "?" or (before.endswith("?") and len(before) > 1)):
                raise _refused(what, f"the quantifier {text!r} after {before!r}")
            before += text
            written.append(text)
            continue
        before = ""
        if kind == "escape":
            text = _escape(text, what)
        elif kind == "class":
            text = _class(text, what)
        elif kind == "unclosed":
            raise _refused(what, "a class that is not closed")
        elif kind == "flags" and set(text) & set("xuU"):
            raise _refused(what, f"the flags {text!r}")
        elif kind == "plain":
            text = {".": r"[^\n\r\u2028\u2029]", "{": r"\{"}.get(text, text)
        written.append(text)
    return "".join(written)


def _escape(text: str, what: str) -> str:
    letter = text[1:2]
    if not letter.isascii():
        return letter
    if letter.isalnum() and letter not in _LETTERS and not letter.isdigit():
        raise _refused(what, f"the escape {text!r}")
    return _WRITTEN.get(text, text)


def _class(text: str, what: str) -> str:
    """A class; Rust has nested ones, and operators of sets."""
    negated = text.startswith("[^")
    inner = text[2 if negated else 1 : -1]
    if not inner:
        if negated:
            return "(?s:.)"
        raise _refused(what, "the empty class '[]'")
    parts = []
    for match in _IN_CLASS.finditer(inner):
        part = match.group()
        if part.startswith("\\"):
            part = r"\x08" if part == r"\b" else _escape(part, what)
        elif len(part) == 2:
            part = f"{part[0]}\\{part[1]}"
        elif part == "[":
            part = r"\["
        parts.append(part)
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _refused(what: str, part: str) -> OptionError:
    return OptionError(f"the {what} has {part}", why="the grammar cannot enforce it", next="rewrite it without")
