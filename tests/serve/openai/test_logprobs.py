# SPDX-License-Identifier: Apache-2.0
"""Offsets of tokens in the text, and their bytes, for tokenizers of both kinds."""

from __future__ import annotations

import pytest

from phalanx.engine.messages import TokenLogprobs
from phalanx.serve.openai.logprobs import CompletionLogprobsWriter, EchoedText, chat_logprobs
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_small_tokenizers import byte_level, sentencepiece, write


@pytest.fixture(params=[byte_level, sentencepiece])
def tokenizer(request, tmp_path) -> Tokenizer:
    return Tokenizer.load(write(tmp_path, request.param()))


def scores(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token=token, logprob=-1.0, rank=1, top=[]) for token in tokens]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_offset_is_the_length_of_the_complete_text_before(tokenizer, size):
    """However the tokens are divided, and with the prompt's text before."""
    text = "a 😀 rank 你 🙂 world"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    writer = CompletionLogprobsWriter(tokenizer, skip_special_tokens=True, top=False)
    prompt = writer.echo(scores(tokens), tokens, EchoedText(text, 0, len(tokens), skip_special_tokens=False))
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    offsets = [offset for part in parts for offset in writer.push(scores(part), part)["text_offset"]]
    assert prompt["text_offset"] == [len(tokenizer.decode(tokens[:i]).rstrip("�")) for i in range(len(tokens))]
    assert offsets == [len(text) + offset for offset in prompt["text_offset"]]
    assert writer.push(scores(tokens[:1]), tokens[:1])["text_offset"] == [2 * len(text)]


def test_the_tokens_around_a_text(tokenizer):
    before, after = tokenizer.tokens_around
    assert [*before, *tokenizer.encode("x", add_special_tokens=False), *after] == tokenizer.encode("x")


def test_bytes_of_tokens_join_to_the_characters(tokenizer):
    text = "😀你🙂\n"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    content = chat_logprobs(scores(tokens), tokenizer)["content"]
    assert any("�" in one["token"] for one in content)
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == text


def test_every_token_has_bytes(tokenizer):
    """As the decoder joins them: those of U+FFFD itself too."""
    for token in tokenizer.known_ids:
        text = tokenizer.token_text(token)
        assert tokenizer.token_bytes(token).decode(errors="replace") == text
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode("�", add_special_tokens=False)[-3:]) == "�".encode()
