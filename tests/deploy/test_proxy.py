# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of a live server with the shipped fake engine."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from phalanx.deploy.proxy import Proxy
from tests.support.serve_http_app import Scripted, live

BODY = {"model": "tiny", "prompt": "one two", "max_tokens": 8, "temperature": 0}


def through(url: str, method: str, path: str, *, root_path: str = "", **request) -> httpx.Response:
    async def ask() -> httpx.Response:
        proxy = Proxy(url)
        try:
            transport = httpx.ASGITransport(proxy, root_path=root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
                return await client.request(method, path, **request)
        finally:
            await proxy.close()

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def server():
    with live(Scripted("alpha beta gamma")) as one:
        yield one


@pytest.fixture
def url(server):
    with server.client() as client:
        return str(client.base_url)


def test_answers_refusals_and_paths_are_those_of_the_server(server, url):
    with server.client() as direct:
        for method, path, body in (
            ("POST", "/v1/completions", {**BODY, "max_tokens": -1}), ("GET", "/v1/models", None), ("GET", "/nowhere?a=%2Fb", None),
        ):  # fmt: skip
            expected, answer = direct.request(method, path, json=body), through(url, method, path, json=body)
            assert (answer.status_code, answer.json()) == (expected.status_code, expected.json())
            assert answer.headers["content-type"] == expected.headers["content-type"]
    answer = through(url, "POST", "/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["text"].strip()


def test_the_prefix_of_a_route_is_taken_away(url):
    assert through(url, "GET", "/one/live", root_path="/one").json()["status"] == "live"


def test_a_server_that_does_not_answer_is_a_503():
    answer = through("http://127.0.0.1:9", "GET", "/ready")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"] == "5"


def call(url: str, receive, body: dict) -> list[dict]:
    """What the proxy sends for a POST of this body; receive: gives the messages of the client after it."""
    import json

    sent: list[dict] = []
    first = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def read():
        return first.pop() if first else await receive(sent)

    async def send(message):
        sent.append(dict(message))

    async def run():
        proxy = Proxy(url)
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await asyncio.wait_for(proxy(scope, read, send), 20)
        await proxy.close()

    asyncio.run(run())
    return sent


async def never(sent):
    await asyncio.Event().wait()


def test_a_stream_comes_in_parts(url):
    sent = call(url, never, {**BODY, "stream": True})
    assert sent[0]["status"] == 200
    bodies = [message["body"] for message in sent[1:]]
    assert len(bodies) > 2
    assert b"".join(bodies).endswith(b"data: [DONE]\n\n")
    assert sent[-1]["more_body"] is False


def test_a_client_that_goes_away_ends_its_request_at_the_server():
    with live(Scripted("alpha beta gamma " * 200, delay=0.05)) as slow:

        async def leave(sent):
            while len(sent) < 4:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with slow.client() as direct:
            sent = call(str(direct.base_url), leave, {**BODY, "max_tokens": 400, "stream": True})
            assert all(message.get("more_body", True) for message in sent)
            for _ in range(100):
                text = direct.get("/metrics").text
                running = [line for line in text.splitlines() if line.startswith("phalanx:num_requests_running")]
                if running and running[0].endswith(" 0.0"):
                    break
            else:
                pytest.fail("the request still runs: " + running[0])
