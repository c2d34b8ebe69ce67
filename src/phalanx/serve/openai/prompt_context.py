# SPDX-License-Identifier: Apache-2.0
"""What prompts are made with: the tokenizer, the format of outputs and the facts of an engine, in any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from phalanx.engine.messages import EngineFacts
from phalanx.errors import PromptTooLong
from phalanx.serve.openai.yes_no import YesNo
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.tokenizer import Tokenizer


class PromptContext(Protocol):
    """What makes a prompt of a request: a `ServingEngine`, or a copy of its facts in another process. escape_special_tokens: texts
    of special tokens in messages stay text. yes_no: how pairs of texts are scored; None: by the cosines of vectors."""

    @property
    def facts(self) -> EngineFacts: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def output(self) -> OutputFormat: ...
    @property
    def escape_special_tokens(self) -> bool: ...
    @property
    def yes_no(self) -> YesNo | None: ...


@dataclass(frozen=True)
class PromptContextCopy:
    """The `PromptContext` of a process that has no engine."""

    facts: EngineFacts
    tokenizer: Tokenizer
    output: OutputFormat
    escape_special_tokens: bool
    yes_no: YesNo | None


def encode(context: PromptContext, text: str, *, add_special_tokens: bool = True, continues: bool = False) -> list[int]:
    """Token ids of a prompt, or of a part of one that continues another part. Raises PromptTooLong before it tokenizes a text
    that is far too long, since this takes a second and 200 MB per million characters."""
    min_tokens = len(text) // context.tokenizer.max_token_characters
    if min_tokens > context.facts.max_seq_len:
        raise PromptTooLong(
            f"the prompt has at least {min_tokens} tokens, and max_seq_len is {context.facts.max_seq_len}",
            next="shorten the prompt",
        )  # fmt: skip
    if continues:
        return context.tokenizer.encode_continuation(text)
    return context.tokenizer.encode(text, add_special_tokens=add_special_tokens)
