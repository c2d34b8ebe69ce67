# SPDX-License-Identifier: Apache-2.0
"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from phalanx.serve.openai.api_errors import bad_request
from phalanx.serve.openai.long_answers import encode_json
from phalanx.serve.openai.prepare import Answer, Endpoint
from phalanx.serve.openai.prompt_context import PromptContext
from phalanx.serve.openai.prompts import encode_chat
from phalanx.serve.openai.request_params import check_token
from phalanx.serve.openai.respond import answer
from phalanx.serve.openai.schema.openapi import request_body, responses_of
from phalanx.serve.openai.schema.responses import DetokenizeResponse, TokenizeResponse
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", responses=responses_of(TokenizeResponse), openapi_extra=request_body(TokenizeRequest))
async def tokenize(http_request: Request) -> Response:
    """Tokenize a text with the model's tokenizer, or messages with its chat template."""
    return await answer(http_request, TOKENIZE)


@router.post("/detokenize", responses=responses_of(DetokenizeResponse), openapi_extra=request_body(DetokenizeRequest))
async def detokenize(http_request: Request) -> Response:
    """Turn token ids into text."""
    return await answer(http_request, DETOKENIZE)


def _check(request: TokenizeRequest) -> None:
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", param="prompt", code="missing_required_parameter")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise bad_request(f"{name} needs messages: a prompt has no template", param=name)


def _tokenized(request: TokenizeRequest, context: PromptContext) -> bytes:
    """The body of the answer. Raises ApiError 400 where the fields contradict each other."""
    _check(request)
    if request.prompt is None:
        tokens = encode_chat(request, context)
    else:
        tokens = context.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    texts = [context.tokenizer.token_text(token) for token in tokens]
    body = {"count": len(tokens), "max_model_len": context.facts.max_seq_len, "tokens": tokens, "token_strs": texts}
    return encode_json(body)


def _detokenized(request: DetokenizeRequest, context: PromptContext) -> bytes:
    """The body of the answer."""
    check_token(max(request.tokens, default=0), context.facts, "tokens")
    return encode_json({"prompt": context.tokenizer.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))})


TOKENIZE = Endpoint("/tokenize", TokenizeRequest, lambda request, context, _: Answer(partial(_tokenized, request, context)))
DETOKENIZE = Endpoint("/detokenize", DetokenizeRequest, lambda request, context, _: Answer(partial(_detokenized, request, context)))
