# SPDX-License-Identifier: Apache-2.0
"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import pytest

from phalanx.serve.openai.schema.responses import DetokenizeResponse, TokenizeResponse
from tests.support.serve_http_app import MODEL, tokenizer_of


@pytest.mark.parametrize("text", ["", "What is a rank?", "héllo 🙂\0\n你好"])
def test_there_and_back(http, text):
    response = TokenizeResponse.model_validate(http.post("/tokenize", json={"prompt": text}).json())
    assert response.tokens == tokenizer_of().encode(text)
    assert response.count == len(response.tokens) == len(response.token_strs)
    assert response.max_model_len == 1024
    back = http.post("/detokenize", json={"tokens": response.tokens, "skip_special_tokens": True}).json()
    assert DetokenizeResponse.model_validate(back).prompt == text
    assert http.post("/detokenize", json={"tokens": response.tokens}).json()["prompt"] == "<s>" + text
    assert http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"] == response.tokens[1:]


def test_warm_up(server, caplog):
    """The compiler of structured output can be started early; a failure is only logged."""
    import asyncio

    engine = server.service.engine
    asyncio.run_coroutine_threadsafe(server.service.warm_up(engine), server.loop).result(120)
    assert "not available" not in caplog.text


def test_refusals(http):
    assert http.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    assert http.post("/tokenize", json={"prompt": 3}).status_code == 400
    assert http.post("/detokenize", json={"tokens": [10**5]}).json()["error"]["param"] == "tokens"


def test_messages(http, server):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What?"}]}
    answer = TokenizeResponse.model_validate(http.post("/tokenize", json=body).json())
    http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert answer.tokens == server.engine.added[-1].token_ids
    bare = http.post("/tokenize", json={**body, "add_generation_prompt": False}).json()["tokens"]
    assert bare == answer.tokens[: len(bare)]
    assert len(bare) < len(answer.tokens)
    for wrong in ({"model": MODEL}, {**body, "prompt": "x"}, {"prompt": "x", "tools": []}):
        assert http.post("/tokenize", json=wrong).status_code == 400
