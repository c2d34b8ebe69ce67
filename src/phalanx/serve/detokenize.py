# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization: `Detokenizer`. The parts of the text, joined, are equal to the text that is decoded at once.

Two things are held back: an incomplete character (it decodes to U+FFFD at the end), and text that may be the beginning of a stop
string. Both are emitted once it is clear what they are, or by `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.config import SamplingParams
from phalanx.serve.tokenizer import Tokenizer

_INCOMPLETE = "�"
_MAX_HELD_TOKENS = 8
"""Tokens that may be held back for an incomplete character (of at most 4 bytes) before the text is cut."""


class TextStream:
    """Decodes token by token. The last emitted tokens are decoded again with those that follow, as context, because a decoder may
    treat the first token of a text differently (SentencePiece drops its space).

    Most tokens need no decoding: if nothing is held back, the text of a token that does not depend on its neighbours is looked up
    in `Tokenizer.fragments`.

    shown: special tokens that add these texts, whatever skip_special_tokens says. No other token adds a character of these texts:
    it is replaced by U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, shown: Mapping[int, str]) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self._reserved = {ord(character): _INCOMPLETE for text in shown.values() for character in text}
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._read_from = 0
        self._context = ""  # the text of the tokens before _read_from
        self._partial = ""  # the emitted part of the text of the tokens from _read_from on
        self._fragments = tokenizer.fragments
        self._complete = self._fragments.from_start  # nothing is held back, so a fragment may follow
        self._looked_up: int | None = None  # the last token, if its text was looked up

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete. O(1) amortized."""
        if not self._shown:
            return self._ordinary(token_id)
        if token_id in self._shown:
            return self.finish() + self._shown[token_id]
        text = self._ordinary(token_id)
        return text if text.isascii() else text.translate(self._reserved)

    def _ordinary(self, token_id: int) -> str:
        if self._complete:
            text = self._fragments[token_id]
            if text is not None:
                self._looked_up = token_id
                return text
        return self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        if (self._skip_special and token_id in self._tokenizer.special_ids) or token_id not in self._tokenizer.known_ids:
            return ""  # decoding drops these tokens first, so they must not take a place in the context
        if self._looked_up is not None:
            self._ids, self._read_from = [self._looked_up], 1
            self._context, self._looked_up = self._decode(self._ids), None
        self._ids.append(token_id)
        text = self._pending()
        self._complete = bool(text) and not text.endswith(_INCOMPLETE)
        if self._complete:
            return self._advance(text, len(self._ids))
        if len(self._ids) - self._read_from > _MAX_HELD_TOKENS and (cut := self._cut(text)):
            return cut
        # A token may end one character and begin the next.
        new, self._partial = self._beyond(text.rstrip(_INCOMPLETE)), text.rstrip(_INCOMPLETE)
        return new

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for an incomplete character."""
        if self._looked_up is not None:
            return ""
        return self._advance(self._pending(), len(self._ids))

    def _pending(self) -> str:
        text = self._decode(self._ids)
        if text.startswith(self._context):
            return text[len(self._context) :]
        # Bytes that are no character after all change how their neighbours decode (byte fallback of SentencePiece). The emitted
        # text stays; the rest is decoded without it.
        return self._decode(self._ids[self._read_from :])

    def _cut(self, text: str) -> str:
        """Emit what is final of a text that ends with bytes that may never become a character.

        A character spans at most 4 tokens. So one of the last positions that leave 3 or more tokens lies between two characters.
        """
        for end in range(len(self._ids) - 3, len(self._ids) - 8, -1):
            before, after = self._decode(self._ids[self._read_from : end]), self._decode(self._ids[end:])
            if before and before + after == text and before.startswith(self._partial):
                return self._advance(before, end)
        return ""

    def _beyond(self, text: str) -> str:
        """The part of a text that is not emitted yet."""
        return text[len(self._partial) :] if text.startswith(self._partial) else ""

    def _advance(self, text: str, end: int) -> str:
        """Emit the text of the tokens before `end`; the last emitted tokens stay as context."""
        new, self._partial = self._beyond(text), ""
        del self._ids[: self._read_from]
        self._read_from = end - self._read_from
        self._context = self._decode(self._ids[: self._read_from])
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special) if ids else ""


class StopString:
    """Finds one stop string character by character with the Knuth-Morris-Pratt automaton; O(1) amortized per character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Number of characters of the stop string at the end of the text so far."""
        self._fallback = [0] * len(text)  # per prefix: length of its longest proper prefix that is also a suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def push(self, character: str) -> bool:
        """True if the stop string ends with this character."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)


class Detokenizer:
    """The growing text of one completion, and its stop strings.

    The stop string that ends first ends the text (the longer one of two that end together). A stop string that ends before
    `min_tokens` tokens does not count. The result depends on the tokens only, not on how they are grouped into pushes.

    text: the emitted text. stop_reason: the stop string that ended the text, else None. count: number of consumed tokens, up to and
    including the one that completed the stop string. shown: see `TextStream`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, shown: Mapping[int, str] | None = None) -> None:
        self.stop_reason: str | None = None
        self.count = 0
        self._pieces: list[str] = []
        self._stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens, shown=shown or {})
        self._stops = [StopString(stop) for stop in sorted(set(params.stops), key=len, reverse=True)]
        self._min_tokens = params.min_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._held_back = ""  # text that may be the beginning of a stop string

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int], *, silent: int = 0) -> str:
        """The new text. Tokens after the one that completes a stop string are not consumed: see `count` and `stop_reason`.

        The last `silent` tokens are counted but add no text: a stop token that must not be shown.
        """
        if not self._stops:
            self.count += len(token_ids)
            text = "".join(map(self._stream.push, token_ids[: len(token_ids) - silent] if silent else token_ids))
            self._emit(text)
            return text
        before = len(self._pieces)
        for i, token_id in enumerate(token_ids):
            if self.stop_reason is not None:
                break
            self.count += 1
            if i < len(token_ids) - silent:
                self._scan(self._stream.push(token_id))
        return "".join(self._pieces[before:])

    def finish(self) -> str:
        """The text that was held back, when no more tokens follow."""
        before = len(self._pieces)
        if self.stop_reason is None:
            self._scan(self._stream.finish())
        if self.stop_reason is None:
            self._emit(self._held_back)
            self._held_back = ""
        return "".join(self._pieces[before:])

    def _scan(self, text: str) -> None:
        if not self._stops:
            self._emit(text)
            return
        self._held_back += text
        for i, character in enumerate(text):
            ended = [stop for stop in self._stops if stop.push(character)]  # every automaton must get every character
            if ended and self.count >= self._min_tokens:
                end = len(self._held_back) - len(text) + i + 1
                self.stop_reason = ended[0].text
                self._emit(self._held_back[: end if self._keep_stop else end - len(self.stop_reason)])
                self._held_back = ""
                return
        keep = max(stop.matched for stop in self._stops)
        self._emit(self._held_back[: len(self._held_back) - keep])
        self._held_back = self._held_back[len(self._held_back) - keep :]

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(text)
