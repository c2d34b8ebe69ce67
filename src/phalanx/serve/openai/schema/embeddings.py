# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /v1/embeddings`, `/v1/rerank` and `/v1/score`, and of their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phalanx.config.sampling_params import MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.completion import OneShape, TokenIds
from phalanx.serve.openai.schema.fields import Body, FirstError, OneOf
from phalanx.serve.openai.schema.responses import ResponseModel

MAX_INPUTS = 2048
"""Texts of a request: OpenAI's limit."""


class EmbeddingsRequest(Body):
    """A text, token ids, or a list of either."""

    model: str = Field(min_length=1, max_length=512)
    input: Annotated[
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), FirstError()]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS), FirstError()],
        OneShape(),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    normalize: bool | None = None


class RerankDocument(Body):
    """A document as an object."""

    text: str


class RerankRequest(Body):
    """A query, and documents to compare with it."""

    model: str = Field(min_length=1, max_length=512)
    query: str = Field(min_length=1)
    documents: Annotated[
        list[Annotated[str | RerankDocument, OneOf()]], Field(min_length=1, max_length=MAX_INPUTS - 1), FirstError()
    ]
    top_n: int | None = Field(None, ge=1, le=MAX_INPUTS)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_TOKEN_COUNT)
    instruction: str | None = Field(None, min_length=1)


class ScoreRequest(Body):
    """Pairs of texts to compare: one with many, or as many with as many."""

    model: str = Field(min_length=1, max_length=512)
    text_1: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS // 2), FirstError()]
    text_2: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS // 2), FirstError()]
    instruction: str | None = Field(None, min_length=1)


class PromptUsage(ResponseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(ResponseModel):
    """A vector: numbers, or their 32 bits each as base64, little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    """The vectors, in the order of the input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class RerankResult(ResponseModel):
    """A document by its place in the request. relevance_score: the cosine of the angle between its vector and the query's,
    or the probability of yes. document: its text, with `return_documents`."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankResponse(ResponseModel):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PromptUsage


class Score(ResponseModel):
    """Of a pair, by its place in the request: as `relevance_score` of `/v1/rerank`."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(ResponseModel):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: PromptUsage
