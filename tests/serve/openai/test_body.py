# SPDX-License-Identifier: Apache-2.0
"""Bodies that nobody should send: each is a 400 or 413 with OpenAI's error, in bounded time, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from pydantic import BaseModel
from starlette.requests import Request

from phalanx.serve.openai import body
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.body import MAX_BODY_BYTES
from phalanx.serve.openai.large_bodies.gate import Gate
from phalanx.serve.openai.schema.responses import ErrorResponse
from tests.support.serve_http_app import MODEL

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def post(http, path, content, **headers):
    began = time.monotonic()
    answer = http.post(path, content=content, headers={"content-type": "application/json", **headers})
    assert time.monotonic() - began < 10
    return answer


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    error = ErrorResponse.model_validate(answer.json()).error
    assert len(error.message) < 2000
    return error


def chat(**fields):
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields})


@pytest.fixture(autouse=True)
def readers(server):
    """The process of large bodies runs: a busy machine takes long to start it."""
    asyncio.run_coroutine_threadsafe(server.service.large_bodies.warm_up(), server.loop).result(120)


NESTED = "[" * 20_000

BAD = {
    "nothing": (CHAT, ""),
    "no JSON": (CHAT, "{"),
    "NUL byte": (CHAT, '{"model": "tiny\0"}'),
    "not UTF-8": (CHAT, b'{"model": "\xff"}'),
    "a list": (CHAT, "[]"),
    "a text": (CHAT, '"x"'),
    "null": (PLAIN, "null"),
    "brackets": (CHAT, NESTED),
    "closed brackets": (CHAT, NESTED + "]" * 20_000),
    "brackets as prompt": (PLAIN, '{"model": "tiny", "prompt": ' + NESTED + "]" * 20_000 + "}"),
    "braces in a schema": (CHAT, chat()[:-1] + ', "guided_json": ' + '{"a":' * 20_000 + "1" + "}" * 20_000 + "}"),
    "brackets in a schema text": (CHAT, chat(guided_json=NESTED)),
    "brackets in a regex": (CHAT, chat(guided_regex="(" * 20_000 + "a" + ")" * 20_000)),
    "brackets in a grammar": (CHAT, chat(guided_grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000)),
    "NUL in a grammar": (CHAT, chat(guided_grammar='root ::= "a\0"')),
    "long regex": (CHAT, chat(guided_regex="a" * 100_000)),
    "lone surrogate": (PLAIN, '{"model": "tiny", "prompt": "\\ud800"}'),
    "huge number": (PLAIN, '{"model": "tiny", "prompt": "x", "max_tokens": ' + "9" * 100_000 + "}"),
    "huge float": (PLAIN, '{"model": "tiny", "prompt": "x", "temperature": 1e999}'),
    "NaN": (PLAIN, '{"model": "tiny", "prompt": "x", "temperature": NaN}'),
    "infinity": (PLAIN, '{"model": "tiny", "prompt": "x", "top_p": Infinity}'),
    "a float for a whole": (PLAIN, '{"model": "tiny", "prompt": "x", "n": 1.0}'),
    "a text for a number": (PLAIN, '{"model": "tiny", "prompt": "x", "n": "1"}'),
    "a number for a truth": (PLAIN, '{"model": "tiny", "prompt": "x", "stream": 1}'),
    "negative token": (PLAIN, '{"model": "tiny", "prompt": [-1]}'),
    "huge token": (PLAIN, '{"model": "tiny", "prompt": [99999999999999999999]}'),
    "mixed prompt": (PLAIN, '{"model": "tiny", "prompt": [1, "a"]}'),
    "no prompt": (PLAIN, '{"model": "tiny"}'),
    "no model": (PLAIN, '{"prompt": "x"}'),
    "too many prompts": (PLAIN, json.dumps({"model": MODEL, "prompt": ["x"] * 1025})),
    "too many completions": (PLAIN, json.dumps({"model": MODEL, "prompt": ["x"] * 10, "n": 128})),
    "too many stops": (PLAIN, json.dumps({"model": MODEL, "prompt": "x", "stop": ["a"] * 17})),
    "empty messages": (CHAT, '{"model": "tiny", "messages": []}'),
    "messages as text": (CHAT, '{"model": "tiny", "messages": "hi"}'),
    "long unknown name": (CHAT, chat(**{"x" * 100_000: 1})),
    "unknown name with a line break": (CHAT, chat(**{"a\nb\0": 1})),
    "too many tools": (CHAT, chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)])),
    "too many biases": (PLAIN, json.dumps({"model": MODEL, "prompt": "x", "logit_bias": dict.fromkeys(range(5000), 1)})),
    "token of no model": ("/detokenize", '{"tokens": [2147483647]}'),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_bodies(http, server, case):
    path, content = BAD[case]
    refused(post(http, path, content))
    assert server.service.admission.open == 0
    assert http.get("/live", timeout=5).status_code == 200


def test_too_long_prompt_says_both_numbers(http):
    error = refused(post(http, PLAIN, json.dumps({"model": MODEL, "prompt": [1] * 3000, "max_tokens": 1})))
    assert "3000" in error.message
    assert "1024" in error.message
    assert error.code == "context_length_exceeded"


def test_nul_in_a_prompt_is_text(http):
    answer = post(http, PLAIN, json.dumps({"model": MODEL, "prompt": "a\0b", "max_tokens": 1, "echo": True}))
    assert answer.json()["choices"][0]["text"].startswith("a\0b")


def test_large_bodies(http, server):
    large = json.dumps({"model": MODEL, "prompt": "x" * MAX_BODY_BYTES})
    error = refused(post(http, PLAIN, large), 413)
    assert error.code == "request_too_large"

    def drip():
        for _ in range(MAX_BODY_BYTES // 2**16 + 2):
            yield b" " * 2**16

    refused(post(http, PLAIN, drip()), 413)
    assert http.get("/live").status_code == 200


def test_large_but_fair_body(http):
    for text in ("This is a rank. " * 200, "This is a rank. " * 400_000):  # the second is refused before it is tokenized
        error = refused(post(http, PLAIN, json.dumps({"model": MODEL, "prompt": text})))
        assert error.code == "context_length_exceeded"
        assert "1024" in error.message
        error = refused(post(http, CHAT, chat(messages=[{"role": "user", "content": text}])))
        assert error.code == "context_length_exceeded"
    refused(post(http, "/tokenize", json.dumps({"prompt": "x" * (2**20 + 1)})))


@pytest.mark.parametrize("unit", ["[],", '{"a":1},', '"\\\\",{},', '"\\"[",[],', '"[",1,'])
def test_counts(unit):
    """Commas, colons and brackets count outside of strings only, wherever the parts that are scanned at once end."""
    for before in range(4):
        text = (" " * before + "[" + unit * 12_000 + "1]").encode()
        parsed = json.loads(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body, "MAX_CONTAINERS", sum(isinstance(value, (list, dict)) for value in parsed) + 1)
            body.check_counts(text)
            patch.setattr(body, "MAX_CONTAINERS", body.MAX_CONTAINERS - 1)
            with pytest.raises(ApiError, match="objects and lists"):
                body.check_counts(text)
            patch.undo()
            patch.setattr(body, "MAX_VALUES", len(parsed) - 2)
            with pytest.raises(ApiError, match="more than"):
                body.check_counts(text)


def test_content_type(http):
    answer = http.post(PLAIN, content='{"model": "tiny", "prompt": "x"}', headers={"content-type": "text/plain"})
    assert refused(answer).code == "invalid_content_type"
    assert http.post(PLAIN, data={"model": MODEL}).status_code == 400


def test_addresses(http):
    assert refused(http.get("/v2/nothing"), 404).code == "not_found"
    answer = http.delete(CHAT)
    assert refused(answer, 405).code == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


def test_a_body_that_never_comes(server):
    """A client that announces a body and sends none of it holds nothing but its own connection."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port)) as stuck:
        stuck.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        with server.client() as http:
            assert http.get("/ready").status_code == 200
        assert server.service.admission.open == 0


def test_bodies_that_come_together_are_parsed_one_by_one():
    """One in each iteration of the event loop, in which streams go on."""

    async def run():
        iteration, parsed = 0, []
        service = SimpleNamespace(parsing=asyncio.Lock(), gate=Gate(refused=lambda _: None))
        content = json.dumps({"prompt": [[5]] * 5000}).encode()

        async def count():
            nonlocal iteration
            while True:
                iteration += 1
                await asyncio.sleep(0)

        async def receive():
            return {"type": "http.request", "body": content, "more_body": False}

        def request():
            app = SimpleNamespace(state=SimpleNamespace(service=service))
            return Request({"type": "http", "method": "POST", "headers": [], "app": app}, receive)

        counting = asyncio.create_task(count())
        reads = [body.read_request(request(), TokenizeBody, lambda _: parsed.append(iteration) or 1, None) for _ in range(6)]
        await asyncio.gather(*reads)
        counting.cancel()
        assert len(set(parsed)) == len(parsed) == 6

    asyncio.run(asyncio.wait_for(run(), 30))


class TokenizeBody(BaseModel):
    prompt: list[list[int]]


@pytest.mark.parametrize("more", [0, 70_000])
def test_a_byte_order_mark_is_ignored(http, more):
    """PowerShell and .NET write one; RFC 8259 lets a reader ignore it. A large body is read by another process."""
    content = b"\xef\xbb\xbf" + chat(user="u" * more).encode()
    assert post(http, CHAT, content).status_code == 200
    if not more:
        assert "UTF-16" in refused(post(http, CHAT, chat().encode("utf-16"))).message


def test_a_byte_order_mark_in_parts():
    text = b'\xef\xbb\xbf{"a": 1}'
    for size in range(1, 6):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert b"".join(body.without_mark(parts)) == b'{"a": 1}'
    assert body.without_mark([]) == []
    assert body.without_mark([b"{", b"}"]) == [b"{", b"}"]
