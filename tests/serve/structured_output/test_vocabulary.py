# SPDX-License-Identifier: Apache-2.0
"""The bytes of tokens undo a vocabulary."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from phalanx.engine.messages import Vocabulary
from phalanx.serve.structured_output.vocabulary import NO_TEXT, token_bytes, vocabulary_of
from phalanx.serve.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|user|>"]


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(['{"name": "Ann", "age": 31}, {"name": "Zoë"}', "the cat sat on the mat in the hall"] * 20, trainer)
    return Tokenizer(backend, {"eos_token": "<|end|>"}, {}, origin="toy")


def test_a_byte_level_vocabulary(tokenizer):
    contents = token_bytes(tokenizer)
    for text in ('{"name": "Zoë"}', "the cat\n\t sat", "日本"):
        assert b"".join(contents[i] for i in tokenizer.encode(text)) == text.encode()
    assert all(contents[tokenizer.backend.token_to_id(name)] == NO_TEXT + name.encode() for name in SPECIAL)
    assert vocabulary_of(tokenizer) == Vocabulary(contents, [tokenizer.eos_token_id])


def test_a_byte_fallback_vocabulary():
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "▁the": 2, "▁": 3, "<0xE6>": 4, "<tool>": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>"])
    backend.add_tokens(["<tool>"])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert vocabulary_of(Tokenizer(backend, {}, {}, origin="toy")) == Vocabulary(
        [NO_TEXT + b"<unk>", b"\n", b" the", b" ", b"\xe6", b"<tool>"]
    )
