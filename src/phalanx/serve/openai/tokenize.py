# SPDX-License-Identifier: Apache-2.0
"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.openai import body
from phalanx.serve.openai.sampling import check_token
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import DetokenizeResponse, TokenizeResponse
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from phalanx.serve.openai.service import Ready, service_of
from phalanx.serve.openai.stream import CancellableResponse

router = APIRouter()


@router.post("/tokenize", responses=responses_of(TokenizeResponse), openapi_extra=request_body(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Cut a text into the model's tokens."""
    service = service_of(request)
    asked = await body.read(request, TokenizeRequest)
    return CancellableResponse(service.run_on_thread(_tokenize, asked, service.ready(asked.model)), service.answer)


@router.post("/detokenize", responses=responses_of(DetokenizeResponse), openapi_extra=request_body(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Put the model's tokens together."""
    service = service_of(request)
    asked = await body.read(request, DetokenizeRequest)
    ready = service.ready(asked.model)
    for token in asked.tokens:
        check_token(token, ready.facts, "tokens")
    return CancellableResponse(service.run_on_thread(_detokenize, asked, ready), service.answer)


def _tokenize(asked: TokenizeRequest, ready: Ready) -> dict[str, Any]:
    tokens = ready.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    texts = [ready.tokenizer.token_text(token) for token in tokens]
    return {"count": len(tokens), "max_model_len": ready.facts.max_seq_len, "tokens": tokens, "token_strs": texts}


def _detokenize(asked: DetokenizeRequest, ready: Ready) -> dict[str, Any]:
    return {"prompt": ready.tokenizer.decode(asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))}
