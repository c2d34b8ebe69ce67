# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phalanx.serve.openai.schema.fields import Body, FirstError, TokenId


class TokenizeRequest(Body):
    """A text to tokenize. `add_special_tokens`: add the special tokens of a prompt, as for a completion."""

    prompt: str = Field(max_length=2**20)
    model: str | None = Field(None, min_length=1, max_length=512)
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    tokens: Annotated[list[TokenId], FirstError()]
    model: str | None = Field(None, min_length=1, max_length=512)
    skip_special_tokens: bool | None = None
