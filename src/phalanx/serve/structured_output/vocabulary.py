# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a tokenizer as the engine's grammars read it: the bytes of each token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from phalanx.engine.messages import Vocabulary
from phalanx.serve.tokenizer import Tokenizer

NO_TEXT = b"\xff"
"""A byte that UTF-8 never has. llguidance takes a token that begins with it as a special one."""


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What the engine needs of a tokenizer for structured output."""
    return Vocabulary(token_bytes(tokenizer), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token id adds to a text; empty for ids without a token.

    Special tokens (those that skip_special_tokens drops) begin with a byte that no text contains: a grammar can name such a token,
    and no text allows it.

    Byte-level vocabularies (GPT-2's alphabet) and those with byte fallback ("<0x0A>") and "▁" for a space are decoded; in others,
    a token is its own text.
    """
    backend = tokenizer.backend
    decoders = set(_decoders(json.loads(backend.to_str()).get("decoder")))
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    byte_of = _byte_letters() if "ByteLevel" in decoders else {}
    texts = backend.get_vocab(with_added_tokens=True)
    contents = [b""] * (max(texts.values(), default=-1) + 1)
    for text, i in texts.items():
        if i in tokenizer.special_ids:
            contents[i] = NO_TEXT + text.encode()
        elif i in added:
            contents[i] = added[i].encode()
        elif byte_of:
            contents[i] = bytes(byte_of[c] for c in text) if all(c in byte_of for c in text) else text.encode()
        elif "ByteFallback" in decoders and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
            contents[i] = bytes([int(text[3:5], 16)])
        elif decoders & {"Metaspace", "Replace"}:
            contents[i] = text.replace("▁", " ").encode()
        else:
            contents[i] = text.encode()
    return contents


def _decoders(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield decoder["type"]
        for part in decoder.get("decoders") or ():
            yield from _decoders(part)


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet, letter -> byte: printable Latin-1 letters are their bytes; those from U+0100 on are the rest, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
