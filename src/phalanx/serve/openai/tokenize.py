# SPDX-License-Identifier: Apache-2.0
"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.openai.body import read_body
from phalanx.serve.openai.request_params import check_token
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import DetokenizeResponse, TokenizeResponse
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from phalanx.serve.openai.service import ServingEngine, service_of
from phalanx.serve.openai.stream import CancellableResponse, encode_json

router = APIRouter()


@router.post("/tokenize", responses=responses_of(TokenizeResponse), openapi_extra=request_body(TokenizeRequest))
async def tokenize(http_request: Request) -> Response:
    """Tokenize a text with the model's tokenizer."""
    service = service_of(http_request)
    request = await read_body(http_request, TokenizeRequest)
    return CancellableResponse(service.run_on_thread(_tokenize, request, service.require_engine(request.model)), service.api_error)


@router.post("/detokenize", responses=responses_of(DetokenizeResponse), openapi_extra=request_body(DetokenizeRequest))
async def detokenize(http_request: Request) -> Response:
    """Turn token ids into text."""
    service = service_of(http_request)
    request = await read_body(http_request, DetokenizeRequest)
    engine = service.require_engine(request.model)
    return CancellableResponse(service.run_on_thread(_detokenize, request, engine), service.api_error)


def _tokenize(request: TokenizeRequest, engine: ServingEngine) -> msgspec.Raw:
    tokens = engine.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    texts = [engine.tokenizer.token_text(token) for token in tokens]
    body = {"count": len(tokens), "max_model_len": engine.facts.max_seq_len, "tokens": tokens, "token_strs": texts}
    return msgspec.Raw(encode_json(body))  # encoded on this thread: it may have a million tokens


def _detokenize(request: DetokenizeRequest, engine: ServingEngine) -> dict[str, Any]:
    check_token(max(request.tokens, default=0), engine.facts, "tokens")
    return {"prompt": engine.tokenizer.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))}
