# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of tiktoken against its algorithm: of two neighbours those are merged first that together have the lowest rank."""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.errors import ModelError
from phalanx.serve.tiktoken_ranks import KIMI_PATTERN, RANKS
from phalanx.serve.tokenizer import Tokenizer
from phalanx.serve.tokenizer_folder import read_tokenizer_folder

TEXT = (
    (
        "It's what THEY'LL say, isn't it? "
        "HTTPServer v1234567 \u4f60\u597d\u4e16\u754c hello\u4f60 na\u00efve caf\u00e9  \n\n  x = y+1;\r\n\t\tif (a&&b) {}"
        " <think>\u3053\u3093 \u00c9COLE \ud83d\ude00\ud83d\ude00 don't DON'T 12 3 1234 ... --- end. "
    )
    .encode("utf-16", "surrogatepass")
    .decode("utf-16")
)
PATTERN = regex.compile(f"(?V1){KIMI_PATTERN}")


def trained(merges: int) -> dict[bytes, int]:
    """Ranks of byte pairs, the most frequent first; not each token's parts are all tokens."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in PATTERN.findall(TEXT * 3)]
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        (left, right), _count = pairs.most_common(1)[0]
        ranks[left + right] = len(ranks)
        words = [merged(word, left + right) for word in words]
    return ranks


def merged(word: list[bytes], token: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] + part == token:
            out[-1] = token
        else:
            out.append(part)
    return out


def reference(text: str, ranks: dict[bytes, int]) -> list[int]:
    ids: list[int] = []
    for word in PATTERN.findall(text):
        letters = word.encode()
        parts = [letters] if letters in ranks else [bytes([byte]) for byte in letters]
        while len(parts) > 1:
            rank, at = min((ranks.get(left + right, 1 << 60), at) for at, (left, right) in enumerate(itertools.pairwise(parts)))
            if rank == 1 << 60:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


RANKS_OF_TEXT = trained(120)
NAMED = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<think>": 22, "</think>": 23}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Kimi-K2-Thinking has it: names for some of the 256 special tokens, of which <think> is none that is left out of texts."""
    folder = tmp_path_factory.mktemp("kimi")
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS_OF_TEXT.items()]
    (folder / RANKS).write_bytes(b"".join(lines))
    first = len(RANKS_OF_TEXT)
    decoder = {
        str(first + at): {"content": text, "special": "think" not in text, "normalized": False} for text, at in NAMED.items()
    }  # fmt: skip
    config = {
        "tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "[EOS]", "model_max_length": 1 << 20,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def backend(folder: Path) -> tokenizers.Tokenizer:
    return read_tokenizer_folder(folder).backend


def test_ids_equal_tiktoken(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.backend.encode(TEXT.replace("<think>", ""), add_special_tokens=False).ids
    assert ids == reference(TEXT.replace("<think>", ""), RANKS_OF_TEXT)
    assert tokenizer.backend.decode(ids) == TEXT.replace("<think>", "")
    assert len(set(ids)) > 40


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=40) | st.lists(st.sampled_from([*TEXT.split(" "), " ", "\n", "'LL", "\u4f60"]), max_size=12).map("".join)
)
def test_ids_of_any_text(backend: tokenizers.Tokenizer, text: str) -> None:
    assume(not any(name in text for name in NAMED))
    assert backend.encode(text, add_special_tokens=False).ids == reference(text, RANKS_OF_TEXT)


def test_special_tokens_lie_behind_the_ranks(folder: Path) -> None:
    read, first = read_tokenizer_folder(folder), len(RANKS_OF_TEXT)
    assert read.special == {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    assert read.backend.get_vocab_size() == first + 256
    assert read.backend.encode(f"[BOS]a<think><|reserved_token_{first + 9}|>").ids == [first, ord("a"), first + 22, first + 9]
    assert read.backend.decode([first, first + 22, ord("a"), first + 1], skip_special_tokens=True) == "<think>a"


@pytest.mark.parametrize("content", [b"no ranks", b"YQ== 0\nYg== 2\n", b"YQ== 0\n"])
def test_what_is_no_file_of_ranks(content: bytes, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    (tmp_path / RANKS).write_bytes(content)
    with pytest.raises(ModelError, match="download it again"):
        read_tokenizer_folder(tmp_path)


def test_an_id_of_a_rank_is_none_of_a_special_token(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["7"] = {"content": "[X]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / RANKS).write_bytes((folder / RANKS).read_bytes())
    with pytest.raises(ModelError, match="gives '\\[X\\]' the id 7"):
        read_tokenizer_folder(tmp_path)


@pytest.mark.parametrize("text", ["[BOS]", "a", "", "<|reserved_token_{}|>"])
def test_a_special_token_that_has_another_id_moves_no_others(text: str, folder: Path, tmp_path: Path) -> None:
    """Two ids of one text, an ordinary token, no text, and the name that another id has."""
    config, first = json.loads((folder / "tokenizer_config.json").read_text()), len(RANKS_OF_TEXT)
    config["added_tokens_decoder"][str(first + 11)] = {"content": text.format(first + 9), "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / RANKS).write_bytes((folder / RANKS).read_bytes())
    with pytest.raises(ModelError, match="would be others"):
        read_tokenizer_folder(tmp_path)
    config["added_tokens_decoder"] = {"x": {"content": "[X]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="the id 'x' in added_tokens_decoder"):
        read_tokenizer_folder(tmp_path)
