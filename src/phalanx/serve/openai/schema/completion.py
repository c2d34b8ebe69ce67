# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.chat import ResponseFormat
from phalanx.serve.openai.schema.fields import MAX_N, FirstError, SampledRequest, TokenId

MAX_PROMPTS = 1024
"""Maximum number of prompts per request."""

TokenIds = Annotated[list[TokenId], Field(min_length=1), FirstError()]


class CompletionRequest(SampledRequest):
    """A text, token ids, or a list of either. `max_tokens: 0` with `echo` only scores the prompt."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FirstError()]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), FirstError()]
    )
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_COUNT)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    response_format: ResponseFormat | None = None
