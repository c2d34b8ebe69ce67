# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings`: vectors of texts, by the hidden states of a decoder. `POST /v1/rerank` and `POST /v1/score`: how near two
texts are, by the cosine of their vectors or, of a model that answers yes or no, by its answer."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.errors import EngineError
from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.body import RequestRoute
from phalanx.serve.openai.generate import generate
from phalanx.serve.openai.long_answers import JsonParts, encode_small, off_loop
from phalanx.serve.openai.prepare import EMBEDDINGS, RERANK, SCORE, Prepared
from phalanx.serve.openai.respond import Handler, respond
from phalanx.serve.openai.schema.embeddings import (
    EmbeddingList,
    EmbeddingsRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
)
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.service import Service, ServingEngine

router = APIRouter(route_class=RequestRoute)

Vectors = np.ndarray[Any, np.dtype[np.float32]]


@router.post(EMBEDDINGS.path, responses=responses_of(EmbeddingList), openapi_extra=request_body(EmbeddingsRequest))
async def create_embeddings(http_request: Request) -> Response:
    """The vectors of one or several texts."""
    return await respond(http_request, EMBEDDINGS, EmbeddingsHandler)


@router.post("/rerank", include_in_schema=False)  # vLLM's, by which LiteLLM asks
@router.post("/v2/rerank", include_in_schema=False)  # Cohere's
@router.post(RERANK.path, responses=responses_of(RerankResponse), openapi_extra=request_body(RerankRequest))
async def rerank(http_request: Request) -> Response:
    """Order documents by how near their vectors are to that of a query."""
    return await respond(http_request, RERANK, RerankHandler)


@router.post("/score", include_in_schema=False)  # vLLM's
@router.post(SCORE.path, responses=responses_of(ScoreList), openapi_extra=request_body(ScoreRequest))
async def score(http_request: Request) -> Response:
    """How near the texts of each pair are."""
    return await respond(http_request, SCORE, ScoreHandler)


class VectorsHandler(Handler):
    """A request whose prompts become vectors."""

    def __init__(self, service: Service, engine: ServingEngine, prepared: Prepared[Any]) -> None:
        self._service, self._engine, self._prepared, self._request = service, engine, prepared, prepared.request
        self._accepted = time.monotonic()
        params = service.with_adapter(prepared.params, prepared.request.model)
        self._params = params if params.pooling else msgspec.structs.replace(params, pooling=service.pooling)

    async def _vectors(self) -> tuple[Vectors, dict[str, int]]:
        """The vector of each prompt [prompts, hidden_size], not normalized, or the logits of no and yes of each pair [pairs, 2];
        and the usage of the request."""
        service, engine, params = self._service, self._engine, self._params
        places = min(self._prepared.count, service.admission.batch)  # which later prompts take over from earlier ones
        with service.admission.enter(places) as ticket:
            tokens = await service.token_ids(self._prepared, engine)
            await service.check(tokens, params, engine, self._prepared.name)
            ticket.prompt([len(one) for one in tokens[:places]])
            pooled = [b""] * len(tokens)
            for first in range(0, len(tokens), places):
                group = tokens[first : first + places]
                async with aclosing(generate(engine, group, params, ticket, service.metrics, accepted=self._accepted)) as deltas:
                    async for delta in deltas:
                        pooled[first + delta.index] = delta.pooled or pooled[first + delta.index]
        if not all(pooled):
            raise EngineError("the engine has returned no vector", next="report this with the log")
        count = sum(map(len, tokens))
        return np.stack([np.frombuffer(one, "<f4") for one in pooled]), {"prompt_tokens": count, "total_tokens": count}


class EmbeddingsHandler(VectorsHandler):
    """The vectors themselves."""

    async def body(self) -> dict[str, Any]:
        request = self._request
        vectors, usage = await self._vectors()
        if request.dimensions is not None:
            if request.dimensions > vectors.shape[1]:
                message = f"dimensions={request.dimensions} exceeds the {vectors.shape[1]} of this model"
                raise bad_request(message, param="dimensions", code="invalid_value")
            vectors = vectors[:, : request.dimensions]
        if request.normalize is not False:
            vectors = _normalized(vectors)
        encoded: Callable[[Vectors], bytes] = _base64 if request.encoding_format == "base64" else _numbers
        data = await off_loop(_data, vectors, encoded, entries=vectors.size)
        return {"object": "list", "data": data, "model": self._service.name_in_answers(request.model), "usage": usage}


class RerankHandler(VectorsHandler):
    """The order of the documents."""

    async def body(self) -> dict[str, Any]:
        vectors, usage = await self._vectors()
        scores = _of_answers(vectors) if self._params.pooling == "logits" else _cosines(vectors[1:], vectors[:1])
        order = np.argsort(-scores, kind="stable")[: self._request.top_n]
        results: list[dict[str, Any]] = [{"index": int(index), "relevance_score": float(scores[index])} for index in order]
        if self._request.return_documents:
            for result in results:
                result["document"] = {"text": self._prepared.prompts[result["index"] + 1]}
        name = self._service.name_in_answers(self._request.model)
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": name, "results": results, "usage": usage}


class ScoreHandler(VectorsHandler):
    """The scores of the pairs."""

    async def body(self) -> dict[str, Any]:
        vectors, usage = await self._vectors()
        scores = _of_answers(vectors) if self._params.pooling == "logits" else _cosines(vectors[::2], vectors[1::2])
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]
        name = self._service.name_in_answers(self._request.model)
        return {"id": f"score-{uuid.uuid4().hex}", "object": "list", "model": name, "data": data, "usage": usage}


def _of_answers(logits: Vectors) -> Vectors:
    """The probability of yes [pairs], by the logits of no and yes [pairs, 2]."""
    probabilities: Vectors = (1.0 / (1.0 + np.exp((logits[:, 0] - logits[:, 1]).astype(np.float64)))).astype(np.float32)
    return probabilities


def _cosines(one: Vectors, other: Vectors) -> Vectors:
    """Of the rows of two matrices; a single row goes with each."""
    cosines: Vectors = (_normalized(one) * _normalized(other)).sum(axis=1)
    return cosines


def _normalized(vectors: Vectors) -> Vectors:
    """Of length 1 each; a vector of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    normalized: Vectors = (vectors / np.maximum(lengths, 1e-30)).astype(np.float32)
    return normalized


def _data(vectors: Vectors, encoded: Callable[[Vectors], bytes]) -> JsonParts:
    """The list of the answer, in parts of one vector each."""
    parts: list[bytes | memoryview] = []
    for index, vector in enumerate(vectors):
        head = b'%b{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"[", index)
        parts += [head, encoded(vector), b"}"]
    return JsonParts([*parts, b"]"], vectors.size)


def _numbers(vector: Vectors) -> bytes:
    return encode_small(vector.tolist())


def _base64(vector: Vectors) -> bytes:
    return b'"%b"' % base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes())
