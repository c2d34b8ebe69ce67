# SPDX-License-Identifier: Apache-2.0
"""Pages of other origins: who may call, and what a preflight request gets."""

from __future__ import annotations

import httpx

from phalanx import log
from tests.support.serve_http_app import MODEL, Scripted, live

ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_allowed_origins():
    with live(Scripted("x"), cors_origins=f"{ORIGIN},http://localhost:3000", api_key="k") as server, server.client() as http:
        answer = http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 200, "a preflight request carries no key"
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        for headers, status in (({"Authorization": "Bearer k"}, 200), ({}, 401)):
            response = http.post("/v1/completions", json=body, headers={"Origin": ORIGIN, **headers})
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, ORIGIN), (
                "a page may read the error, too"
            )
        other = {**PREFLIGHT, "Origin": "https://evil.example.org"}
        assert http.options("/v1/chat/completions", headers=other).status_code == 400
        assert "access-control-allow-origin" not in http.get("/live", headers={"Origin": other["Origin"]}).headers


def test_a_request_has_an_id():
    with live(Scripted("x"), api_key="k", cors_origins=ORIGIN) as server, server.client() as http:
        key = {"Authorization": "Bearer k"}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "stream": True}
        answers = [
            http.post("/v1/completions", json=body, headers={**key, "X-Request-Id": "of-the-client"}),
            http.post("/v1/completions", json={}, headers={**key, "X-Request-Id": "refused"}),
            http.get("/none", headers={**key, "X-Request-Id": "nowhere"}),
            http.get("/v1/models", headers={"X-Request-Id": "no-key"}),
        ]
        assert [(answer.status_code, answer.headers["x-request-id"]) for answer in answers] == [
            (200, "of-the-client"), (400, "refused"), (404, "nowhere"), (401, "no-key"),
        ]  # fmt: skip
        assert server.engine.added[0].request_id.startswith("of-the-client-"), "the engine's log names the request, too"
        for unusable in ("", "a b", "x" * 129, "ä"):
            own = http.get("/v1/models", headers={**key, b"X-Request-Id": unusable.encode()}).headers["x-request-id"]
            assert len(own) == 32
        assert "X-Request-Id" in http.get("/live", headers={"Origin": ORIGIN}).headers["access-control-expose-headers"]


def test_an_error_inside_the_server_is_logged_with_the_id(monkeypatch, capsys):
    log.configure("server")
    with live(Scripted("x")) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        monkeypatch.setattr(server.service, "require_engine", lambda *_: 1 / 0)
        answer = http.get("/v1/models", headers={"X-Request-Id": "r-7"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "r-7")
    error = capsys.readouterr().err
    assert "a request failed inside the server request_id=r-7" in error
    assert "ZeroDivisionError" in error


def test_any_origin_and_none():
    with live(Scripted("x"), cors_origins="*") as server, server.client() as http:
        assert http.get("/v1/models", headers={"Origin": ORIGIN}).headers["access-control-allow-origin"] == "*"
        with http.stream(
            "POST", "/v1/completions", headers={"Origin": ORIGIN}, json={"model": MODEL, "prompt": "x", "stream": True}
        ) as stream:
            assert stream.headers["access-control-allow-origin"] == "*"
    with live(Scripted("x")) as server, server.client() as http:
        assert http.options("/v1/chat/completions", headers=PREFLIGHT).status_code == 405
        assert "access-control-allow-origin" not in http.get("/live", headers={"Origin": ORIGIN}).headers
