# SPDX-License-Identifier: Apache-2.0
"""Token ids become text while they arrive: `Detokenizer`. The pieces joined are the whole text, to the byte.

Two things are held back. A character whose bytes are not all there (it decodes to U+FFFD at the end), and text that may be the
beginning of a stop string. Both are let go when it is clear what they are, or by `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.config import SamplingParams
from phalanx.serve.tokenizer import Tokenizer

_UNFINISHED = "�"
_PATIENCE = 8
"""Tokens that may be held back for an unfinished character, which has 4 bytes at most, before a cut is looked for."""


class TextStream:
    """Decodes token by token. The last tokens that went out are decoded again with those that follow, as their context, because a
    decoder may treat the first token of a text in a special way (SentencePiece drops its space).

    Most tokens need none of this: where everything before is out, and what the token adds is known of it alone
    (`Tokenizer.fragments`), that is looked up.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._read_from = 0
        self._context = ""  # the text of the tokens before read_from
        self._partial = ""  # what went out of the text of the tokens from read_from on
        self._fragments = tokenizer.fragments
        self._whole = self._fragments.from_start  # nothing is held back, and a token that is known alone may follow
        self._looked_up: int | None = None  # the last token, where it was

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished. O(1) amortized."""
        if self._whole:
            text = self._fragments[token_id]
            if text is not None:
                self._looked_up = token_id
                return text
        return self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        if (self._skip_special and token_id in self._tokenizer.special_ids) or token_id not in self._tokenizer.known_ids:
            return ""  # decoding drops these before it joins anything, and so they must not lengthen what is decoded again
        if self._looked_up is not None:
            self._ids, self._read_from = [self._looked_up], 1
            self._context, self._looked_up = self._decode(self._ids), None
        self._ids.append(token_id)
        text = self._pending()
        self._whole = bool(text) and not text.endswith(_UNFINISHED)
        if self._whole:
            return self._advance(text, len(self._ids))
        if len(self._ids) - self._read_from > _PATIENCE and (cut := self._cut(text)):
            return cut
        # A token may end one character and begin the next.
        new, self._partial = self._beyond(text.rstrip(_UNFINISHED)), text.rstrip(_UNFINISHED)
        return new

    def finish(self) -> str:
        """What is left, with U+FFFD for an unfinished character."""
        if self._looked_up is not None:
            return ""
        return self._advance(self._pending(), len(self._ids))

    def _pending(self) -> str:
        whole = self._decode(self._ids)
        if whole.startswith(self._context):
            return whole[len(self._context) :]
        # Bytes that turned out to be no character change how their neighbours decode (SentencePiece's byte fallback). What is out
        # is out; the rest is decoded by itself.
        return self._decode(self._ids[self._read_from :])

    def _cut(self, whole: str) -> str:
        """Bytes that are no text could be held back for ever. A character spans 4 tokens at most, so that one of the last cuts that
        leave 3 or more tokens is between characters: the text before it is final."""
        for end in range(len(self._ids) - 3, len(self._ids) - 8, -1):
            before, after = self._decode(self._ids[self._read_from : end]), self._decode(self._ids[end:])
            if before and before + after == whole and before.startswith(self._partial):
                return self._advance(before, end)
        return ""

    def _beyond(self, text: str) -> str:
        """What of a text is not out yet."""
        return text[len(self._partial) :] if text.startswith(self._partial) else ""

    def _advance(self, text: str, end: int) -> str:
        """Let the text of the tokens before `end` out; those that went out last stay as context."""
        new, self._partial = self._beyond(text), ""
        del self._ids[: self._read_from]
        self._read_from = end - self._read_from
        self._context = self._decode(self._ids[: self._read_from])
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special) if ids else ""


class StopString:
    """Finds one stop string in characters that come one by one: Knuth, Morris and Pratt's automaton, O(1) amortized each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """How many characters of the stop string the text so far ends with."""
        self._shorter = [0] * len(text)  # for each prefix, the length of its longest proper prefix that is also its suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._shorter[length - 1]
            length += text[i] == text[length]
            self._shorter[i] = length

    def push(self, character: str) -> bool:
        """True when the stop string ends here."""
        if self.matched == len(self.text):
            self.matched = self._shorter[-1]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._shorter[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)


class Detokenizer:
    """The text of one completion, as it grows, with its stop strings.

    The stop string that ends first ends the text (of two that end together, the longer); one that ends before `min_tokens` tokens
    are out does not count. Where the text is cut depends on the tokens alone, not on how they are grouped into pushes.

    text: everything let go so far. stop_reason: the stop string that was found, else None. count: tokens taken, those up to the
    one that completed the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self.count = 0
        self._pieces: list[str] = []
        self._stream = TextStream(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = [StopString(stop) for stop in sorted(set(params.stops), key=len, reverse=True)]
        self._min_tokens = params.min_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._held = ""  # may be the beginning of a stop string

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int], *, silent: int = 0) -> str:
        """The new text. Tokens after the one that completes a stop string are not taken: see `count` and `stop_reason`.

        The last `silent` tokens are counted but have no text: a stop token that is not to be seen.
        """
        before = len(self._pieces)
        if not self._stops:
            self.count += len(token_ids)
            self._let_go("".join(map(self._stream.push, token_ids[: len(token_ids) - silent] if silent else token_ids)))
            return self._pieces[-1] if len(self._pieces) > before else ""
        for i, token_id in enumerate(token_ids):
            if self.stop_reason is not None:
                break
            self.count += 1
            if i < len(token_ids) - silent:
                self._take(self._stream.push(token_id))
        return "".join(self._pieces[before:])

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        before = len(self._pieces)
        if self.stop_reason is None:
            self._take(self._stream.finish())
        if self.stop_reason is None:
            self._let_go(self._held)
            self._held = ""
        return "".join(self._pieces[before:])

    def _take(self, text: str) -> None:
        if not self._stops:
            self._let_go(text)
            return
        self._held += text
        for i, character in enumerate(text):
            ended = [stop for stop in self._stops if stop.push(character)]  # every automaton must see every character
            if ended and self.count >= self._min_tokens:
                end = len(self._held) - len(text) + i + 1
                self.stop_reason = ended[0].text
                self._let_go(self._held[: end if self._keep_stop else end - len(self.stop_reason)])
                self._held = ""
                return
        keep = max(stop.matched for stop in self._stops)
        self._let_go(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]

    def _let_go(self, text: str) -> None:
        if text:
            self._pieces.append(text)
