# SPDX-License-Identifier: Apache-2.0
"""`Markers`: the tokens that divide a model's output, and how a parser sees them.

A marker that is a special token of the vocabulary (`<|channel|>`, `[TOOL_CALLS]`) reaches the parser as one noncharacter of Unicode
(U+FDD0 and following, which stand in no text). So the same letters in ordinary tokens, for example in an explanation of the format,
stay text. A marker that is no special token (`<think>`, `<tool_call>` of Qwen) is recognized by its letters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.serve.tokenizer import Tokenizer

_FIRST = 0xFDD0
_COUNT = 32


class Markers:
    """The markers of one model.

    shown: token id of each special marker -> its character. special: text of each special marker -> its token id.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        """special: the markers that are special tokens, with their ids. At most 32."""
        assert len(special) <= _COUNT, f"{len(special)} markers, more than {_COUNT} noncharacters"
        self.special = dict(special)
        self._character = {text: chr(_FIRST + i) for i, text in enumerate(special)}
        self.shown = {token_id: self._character[text] for text, token_id in special.items()}
        self._hide = {ord(character): None for character in self._character.values()}
        self._show = {ord(character): text for text, character in self._character.items()}
        self._texts = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Markers:
        """Those of `texts` that are special tokens of the tokenizer."""
        token_id = tokenizer.backend.token_to_id
        return cls({text: i for text in texts if (i := token_id(text)) is not None and i in tokenizer.special_ids})

    def encode(self, text: str) -> str:
        """`text` as a parser sees it: each marker that is a special token as its character."""
        return self._texts.sub(lambda match: self._character[match[0]], text)

    def remove(self, text: str) -> str:
        """The text that a parser saw, without special markers."""
        return text.translate(self._hide)

    def decode(self, text: str) -> str:
        """The text that a parser saw, with special markers in letters."""
        return text.translate(self._show)

    def formats(self, text: str) -> list[dict[str, Any]]:
        """The formats of a structural tag that enforce `text`: special markers as tokens, all else as strings."""
        formats: list[dict[str, Any]] = []
        at = 0
        for match in self._texts.finditer(text):
            if match.start() > at:
                formats.append({"type": "const_string", "value": text[at : match.start()]})
            formats.append({"type": "token", "token": self.special[match[0]]})
            at = match.end()
        if at < len(text):
            formats.append({"type": "const_string", "value": text[at:]})
        return formats
