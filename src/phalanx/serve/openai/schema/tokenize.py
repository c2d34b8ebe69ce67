# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from phalanx.serve.openai.schema.chat import MAX_MESSAGES, MAX_TOOLS, RequestMessage, Tool
from phalanx.serve.openai.schema.fields import Body, FirstError, TokenId


class TokenizeRequest(Body):
    """A text, or messages, to tokenize. `add_special_tokens`: add the special tokens of a prompt, as for a completion."""

    prompt: str | None = Field(None, max_length=2**20)
    messages: Annotated[list[RequestMessage], FirstError()] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    model: str | None = Field(None, min_length=1, max_length=512)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    tokens: Annotated[list[TokenId], FirstError()]
    model: str | None = Field(None, min_length=1, max_length=512)
    skip_special_tokens: bool | None = None
