# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of tiktoken: a file of tokens with their ranks, which merges follow, and a pattern that divides texts (Kimi-K2).

The checkpoint's own Python code, which has the pattern, is not run: it is here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from phalanx.errors import ModelError

RANKS = "tiktoken.model"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join((
    r"[\p{Han}]+", f"{_BEFORE}{_UPPER}*{_LOWER}+{_BEHIND}", f"{_BEFORE}{_UPPER}+{_LOWER}*{_BEHIND}", r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
))  # fmt: skip
PATTERNS = {"TikTokenTokenizer": KIMI_PATTERN}
"""By the tokenizer class that the checkpoint names."""
RESERVED = 256
"""Special tokens behind those of the ranks. One without a name is <|reserved_token_ID|>."""


def read_ranks(path: Path, pattern: str, named: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """The tokenizer of a file of ranks. named: the special tokens that have a name, by id. Raises ModelError for a file that is
    none, and for a token that has an id of another."""
    ranks = _ranks(path)
    letters = _letters()
    texts = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    merges = [(texts[left], texts[right]) for left, right in _merges(ranks)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    letters_of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([split, letters_of_bytes]), decoders.ByteLevel()
    ids = range(len(ranks), len(ranks) + RESERVED)
    if strange := next((token_id for token_id in named if token_id not in ids), None):
        raise ModelError(
            f"tokenizer_config.json beside {path.name} gives {named[strange].content!r} the id {strange}",
            held=f"special tokens are {ids.start} to {ids.stop - 1}, behind those of {path.name}", next="download both files again",
        )  # fmt: skip
    reserved = {each: named.get(each) or AddedToken(f"<|reserved_token_{each}|>", special=True, normalized=False) for each in ids}
    backend.add_tokens(list(reserved.values()))
    other = next((each for each, token in reserved.items() if backend.token_to_id(token.content) != each), None)
    if other is not None:
        raise ModelError(
            f"tokenizer_config.json beside {path.name} gives {reserved[other].content!r} the id {other}",
            held=f"it has the id {backend.token_to_id(reserved[other].content)}, or is empty",
            why="the ids of all special tokens behind it would be others", next="download both files again",
        )  # fmt: skip
    return backend


def _ranks(path: Path) -> dict[bytes, int]:
    """In the order of their ranks, which are 0, 1 and so on. Each byte has one."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ModelError(
            f"{path} cannot be read", why=f"it has no token and rank on each line: {error}", next="download it again"
        ) from None
    if list(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelError(
            f"{path} has {len(ranks)} tokens whose ranks are not 0, 1 and so on, or which lack a byte", next="download it again"
        )
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """tiktoken merges the neighbours that together have the lowest rank: so each token merges from all parts that are tokens."""
    for token in ranks:
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in parts if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _letters() -> dict[int, str]:
    """Byte -> the letter that stands for it in byte-level BPE (GPT-2): itself where it is printable."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + number) for number, byte in enumerate(others)}
