# SPDX-License-Identifier: Apache-2.0
"""Grammars over a vocabulary of all bytes, and random texts that they allow."""

from __future__ import annotations

import functools
import random

import numpy as np

from phalanx.engine.grammar import Grammars, Matcher
from phalanx.engine.messages import Vocabulary
from phalanx.serve.structured_output.lark import lark_of

VOCABULARY = [bytes([i]) for i in range(256)] + [b"ab", b"abc", b'": ', b"\xff<end>"]
EOS = 259
SIZE = 300
"""Logits are wider than the tokenizer."""


@functools.cache
def grammars() -> Grammars:
    return Grammars(lambda: Vocabulary(VOCABULARY), SIZE, [EOS])


def allowed(mask: bytes) -> list[int]:
    assert len(mask) == 4 * ((SIZE + 31) // 32)
    return list(map(int, np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))))


def opened(kind: str, text: str = "") -> Matcher:
    """The matcher of a format; kind: a field of StructuredOutputParams."""
    return grammars().open(lark_of(kind, text))


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether the text may be written from here, and end there."""
    matcher = matcher.copy()
    for byte in text.encode():
        if matcher.finished or byte not in allowed(matcher.mask()):
            return False
        matcher.accept(byte)
    return matcher.finished or EOS in allowed(matcher.mask())


def write(matcher: Matcher, seed: int, *, after: int = 40, most: int = 20_000) -> str | None:
    """What a model without taste writes: a random allowed token each time, preferring what closes a value after some tokens. None
    where it does not end within `most` tokens."""
    matcher, chance, written = matcher.copy(), random.Random(seed), b""
    for count in range(most):
        if matcher.finished:
            break
        may = allowed(matcher.mask())
        if EOS in may and (count > after or len(may) == 1):
            break
        closing = [token for token in may if token in set(b'"}]')] if count > after else []
        plain = [token for token in may if 32 <= token < 127]
        choices = closing or (plain if plain and chance.random() < 0.9 else None) or [token for token in may if token != EOS] or may
        token = chance.choice(choices)
        written += b"" if token == EOS else VOCABULARY[token]
        matcher.accept(token)
    else:
        return None
    return written.decode()
