# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: the checkpoint's tokenizer.

`tokenizer_folder.py` reads the folder. As in transformers 5, `tokenizer.json` alone defines the tokens around a text
(`add_bos_token` in the config is not read), and the text of a special token inside a prompt becomes that token, unless
`split_special_tokens` is set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from phalanx.errors import RequestError
from phalanx.serve.chat_template import ChatTemplate, MessageDict
from phalanx.serve.tokenizer_folder import read_tokenizer_folder

MAX_LOCKED_CHARACTERS = 4096
"""Length of a text for which `encode` may hold the interpreter lock. A batch is tokenized without the lock, and starts later."""
MAX_LOCKED_TOKENS = 1024
"""Number of token ids for which `decode` may hold the interpreter lock."""
INCOMPLETE = "\ufffd"
"""What bytes that are no complete character are decoded to."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A tokenizer. Several threads may call its methods at once.

    backend: the `tokenizers.Tokenizer`. special: the named special tokens, for example {"bos_token": "<s>"}. special_ids: the
    ids that `skip_special_tokens` drops. eos_token_id: the id of the eos token, or None. origin: name of the folder, for errors.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: dict[str, str], templates: dict[str, str], *, origin: str) -> None:
        self.backend, self.special, self.origin = backend, special, origin
        self.eos_token_id = self._id_of("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._texts: dict[int, str] = {}  # of single tokens
        self._sources = templates
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder. Raises ModelNotFound if there is none, ModelError if it cannot be read."""
        read = read_tokenizer_folder(Path(folder))
        return cls(read.backend, read.special, read.chat_templates, origin=Path(folder).name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError for text that is not Unicode (a lone surrogate)."""
        try:
            if len(text) > MAX_LOCKED_CHARACTERS:
                ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            else:
                ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the prompt is not valid Unicode", why=str(error)) from None
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that goes on from another one, without special tokens around it.

        Many tokenizers (those of Llama 2 and of Mistral) write a space before each text, which nothing before this one must have:
        it is tokenized behind an end of line, whose tokens are left out.
        """
        line = self.encode("\n", add_special_tokens=False)
        joined = self.encode(f"\n{text}", add_special_tokens=False)
        return joined[len(line) :] if joined[: len(line)] == line else self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Unknown ids (the padding of the model's vocabulary) have no text."""
        if len(token_ids) > MAX_LOCKED_TOKENS:
            text: str = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        else:
            text = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special tokens included; an incomplete character is U+FFFD. It is kept: scores have twenty
        tokens at each position, and each call of the library gives up the interpreter lock."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            if 0 <= token_id < self.vocab_size:  # others are refused, or are the padding of a model's vocabulary
                self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a single token in UTF-8; of a token that is a part of a character, those of the vocabulary. None where these
        are not known."""
        text = self.token_text(token_id)
        if INCOMPLETE not in text:
            return text.encode()
        piece = self.backend.id_to_token(token_id)
        if piece is None or piece in self.added_tokens:
            return None if piece is None else text.encode()
        if _BYTE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        letters = _BYTE_OF_LETTER if self.fragments.byte_level else {}
        known = [letters[letter] for letter in piece if letter in letters]
        return bytes(known) if len(known) == len(piece) else None

    @cached_property
    def tokens_around(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` puts before and after each text."""
        text, ids = self.encode("a", add_special_tokens=False), self.encode("a")
        for begin in range(len(ids) - len(text) + 1):
            if ids[begin : begin + len(text)] == text:
                return ids[:begin], ids[begin + len(text) :]
        return [], []

    @cached_property
    def max_token_characters(self) -> int:
        """Maximum number of characters in one token. A normalizer may join characters; no known one joins more than 4."""
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self.backend.normalizer is None else 4 * longest

    @cached_property
    def text(self) -> str:
        """The text of a tokenizer.json that is equal to it."""
        return str(self.backend.to_str())

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """All ids that have a text."""
        return frozenset(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def fragments(self) -> Fragments:
        """The text that each token adds, for tokens where it does not depend on their neighbours."""
        return Fragments(self)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._sources)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Name -> source."""
        return dict(self._sources)

    @property
    def chat_template_source(self) -> str:
        """The template for conversations with tools, else the default one; "" without a template."""
        return self._sources.get("tool_use") or self._sources.get("default", "")

    def set_chat_template(self, source: str, *, origin: str) -> None:
        """Use this template instead of the model's own. Raises ModelError if it does not compile."""
        compiled = ChatTemplate(source, origin=origin)
        self._sources, self._compiled = {"default": source}, {"default": compiled}

    def apply_chat_template(
        self,
        messages: Sequence[MessageDict],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with add_special_tokens=False, because the template writes these tokens.

        variables: passed to the template (for example enable_thinking). Raises RequestError if the model has no template, or if
        the template rejects the messages.
        """
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **{**self.special, **variables})

    def template_variables(self, *, tools: bool = False) -> frozenset[str]:
        """The variables that the chat template reads. tools: of the template for tools, if the model has one of its own."""
        return self._template("tool_use" if tools and "tool_use" in self._sources else "default").variables

    @cached_property
    def added_tokens(self) -> list[str]:
        """The texts that become one token wherever they stand, special or not."""
        return [token.content for token in self.backend.get_added_tokens_decoder().values()]

    def encode_chat(self, messages: Sequence[MessageDict], **variables: Any) -> list[int]:
        """Token ids of a conversation: `apply_chat_template`, encoded."""
        return self.encode(self.apply_chat_template(messages, **variables), add_special_tokens=False)

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._sources:
            raise RequestError(
                f"{self.origin} has no chat template" if not self._sources else f"{self.origin} has no default chat template",
                held=f"its chat templates are {sorted(self._sources)}" if self._sources else "",
                why="a chat template turns messages into a prompt",
                next="use generate with a plain prompt, or give a chat template",
            )
        if name not in self._compiled:  # if two threads compile it at once, either result is right
            self._compiled[name] = ChatTemplate(self._sources[name], origin=self.origin)
        return self._compiled[name]

    def _id_of(self, name: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(self.special[name]) if name in self.special else None
        return token_id


class Fragments(dict[int, "str | None"]):
    """Token id -> the text that it adds to any text that ends with a complete character, whether special tokens are skipped or not.

    None for a token that must be decoded together with its neighbours: a part of a character, a special or unknown token, or any
    token of a decoder with more context. Filled on demand; all completions share one dictionary.
    from_start: true if this also holds for the first token of a text (a decoder may drop the space before the first word).
    byte_level: each letter in the vocabulary stands for one byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        decoder = tokenizer.backend.decoder
        parts = _parts(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = [part["type"] for part in parts]
        self.byte_level = self.from_start = kinds == ["ByteLevel"]
        self._replaced: list[tuple[str, str]] | None = None
        head = kinds.count("Replace")
        if kinds[head:] in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]) and kinds[:head] == ["Replace"] * head:
            # SentencePiece: replacements apply to each token alone, only bytes are joined, and only the ends of the text are cut.
            patterns = [(part["pattern"].get("String"), part["content"]) for part in parts[:head]]
            if all(pattern for pattern, _ in patterns) and parts[-1].get("stop", 0) == 0:
                self._replaced = patterns

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str | None:
        tokenizer = self._tokenizer
        if token_id in tokenizer.special_ids or token_id not in tokenizer.known_ids:
            return None
        if self.byte_level:
            text = tokenizer.token_text(token_id)
            return None if INCOMPLETE in text else text
        if self._replaced is None:
            return None
        text = str(tokenizer.backend.id_to_token(token_id))
        if text.startswith("<0x"):
            return None
        for pattern, content in self._replaced:
            text = text.replace(pattern, content)
        return None if text.startswith("<0x") else text


def _byte_of_letter() -> dict[str, int]:
    """The letters of byte-level vocabularies: printable characters of Latin-1 stand for their own byte, the letters from U+0100 on
    for the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, in order."""
    return [part for one in decoder["decoders"] for part in _parts(one)] if decoder["type"] == "Sequence" else [decoder]
