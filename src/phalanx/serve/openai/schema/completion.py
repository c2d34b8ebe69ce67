# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.chat import ResponseFormat
from phalanx.serve.openai.schema.fields import MAX_N, FirstError, SampledRequest, TokenId

MAX_PROMPTS = 1024
"""Maximum number of prompts per request."""

TokenIds = Annotated[list[TokenId], Field(min_length=1), FirstError()]


class OneShape:
    """Annotates the union of a text, texts, token ids and lists of token ids, in this order. A value is one of them by its first
    element, and has the errors of that one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        shapes = ("<text>", "<texts>", "<ids>", "<lists>")
        return core_schema.tagged_union_schema(
            dict(zip(shapes, map(handler.generate_schema, get_args(source)), strict=True)), _shape
        )


def _shape(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    return "<lists>" if isinstance(first, list) else "<ids>" if isinstance(first, (int, float)) else "<texts>"


class CompletionRequest(SampledRequest):
    """A text, token ids, or a list of either. `max_tokens: 0` with `echo` only scores the prompt."""

    prompt: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FirstError()]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), FirstError()],
        OneShape(),
    ]
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_COUNT)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    response_format: ResponseFormat | None = None
