# SPDX-License-Identifier: Apache-2.0
"""Pages of other origins: who may call, and what a preflight request gets."""

from __future__ import annotations

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
