# SPDX-License-Identifier: Apache-2.0
"""Which prompts are so short that they are encoded on the event loop. What they become: test_chat.py and test_completions.py."""

from __future__ import annotations

from phalanx.serve.openai.prompts import encodes_quickly, renders_quickly
from phalanx.serve.openai.schema.chat import ChatRequest


def chat(*contents: str) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": text} for text in contents]})


def test_many_empty_texts_are_not_short():
    """Each takes time, too: a body below the size of a large one has two thousand messages."""
    assert renders_quickly(chat("hello", "", ""))
    assert not renders_quickly(chat(*[""] * 2000))
    assert encodes_quickly(["hello", ""])
    assert not encodes_quickly([""] * 2000)
    assert not encodes_quickly([[5]] * 2000)
