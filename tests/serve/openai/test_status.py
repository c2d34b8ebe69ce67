# SPDX-License-Identifier: Apache-2.0
"""What load balancers and scrapers read, in each phase of a server's life; and who may ask."""

from __future__ import annotations

import logging

import httpx
import openai
import pytest

from phalanx.engine.messages import Stats
from phalanx.errors import RankDied
from phalanx.serve.openai.schema.responses import ErrorResponse, ModelList, StatusResponse
from phalanx.version import __version__
from tests.support.serve_http_app import MODEL, Scripted, live

ASK = {"model": MODEL, "prompt": "x", "max_tokens": 1}


def statuses(http: httpx.Client) -> list[int]:
    for path in ("/live", "/ready", "/health"):
        StatusResponse.model_validate(http.get(path).json())
    return [http.get(path).status_code for path in ("/live", "/ready", "/health")]


def test_ready(http, client):
    assert statuses(http) == [200, 200, 200]
    assert http.get("/version").json() == {"version": __version__}
    card = ModelList.model_validate(http.get("/v1/models").json()).data[0]
    assert (card.id, card.max_model_len) == (MODEL, 1024)
    assert client.models.list().data[0].id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_starting():
    with live(Scripted("x"), ready=False) as server, server.client() as http:
        assert statuses(http) == [200, 503, 503]
        answer = http.post("/v1/completions", json=ASK)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert "still starting" in ErrorResponse.model_validate(answer.json()).error.message
        assert http.get("/metrics").status_code == 200


def test_draining():
    with live(Scripted("x")) as server, server.client() as http:
        server.on_loop(server.service.admission.drain)
        assert statuses(http) == [200, 503, 503]
        answer = http.post("/v1/completions", json=ASK)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert 'request_refused_total{engine="0",model_name="tiny",reason="draining"} 1.0' in http.get("/metrics").text


def test_stalled():
    with live(Scripted("x")) as server, server.client() as http:
        server.engine.latest = Stats(stalled="step 12 has run for 4 s")
        assert statuses(http) == [200, 503, 503]
        assert http.get("/ready").json() == {"status": "stalled", "reason": "step 12 has run for 4 s"}
        assert http.get("/ready").headers["retry-after"]
        server.engine.latest = Stats()
        assert statuses(http) == [200, 200, 200]


def test_failed():
    with live(Scripted("x")) as server, server.client() as http:
        server.on_loop(server.engine.fail, RankDied("rank 1 died", why="SIGKILL"))
        assert statuses(http) == [200, 503, 503]
        assert "rank 1 died" in http.get("/ready").json()["reason"]
        answer = http.post("/v1/completions", json=ASK)
        assert answer.status_code == 503
        assert "rank 1 died" in answer.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200


@pytest.mark.parametrize("key", ["secret-key", "pässwörd"])
def test_key(key, caplog):
    caplog.set_level(logging.DEBUG)
    with live(Scripted("x"), api_key=key) as server, server.client() as http:
        for path in ("/live", "/ready", "/health"):  # a probe sends no key
            assert http.get(path).status_code == 200, path
        right = b"Bearer " + key.encode()
        wrong = [b"Bearer wrong", b"Basic " + key.encode(), key.encode(), b"Bearer", right[:-1]]
        for headers in [{}, *({"Authorization": value} for value in wrong)]:
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/chat/completions"),
                ("POST", "/tokenize"),
                ("GET", "/nothing"),
                ("GET", "/version"),
                ("GET", "/metrics"),
                ("GET", "/openapi.json"),
            ):
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401, (headers, path)
                assert ErrorResponse.model_validate(answer.json()).error.code == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert key not in answer.text
        headers = {"Authorization": right}
        assert http.get("/v1/models", headers=headers).status_code == 200
        assert http.post("/v1/completions", json=ASK, headers=headers).status_code == 200
        assert http.get("/openapi.json", headers=headers).json()["components"]["securitySchemes"]
    assert key not in caplog.text


def test_key_of_the_client():
    with live(Scripted("x"), api_key="k1") as server:
        with server.openai(api_key="k1") as client:
            assert client.models.list().data
        with server.openai(api_key="k2") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_several_keys_and_open_metrics():
    with live(Scripted("x"), api_key="k1, k2", open_metrics=True) as server, server.client() as http:
        for key in ("k1", "k2"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for key in ("k1, k2", "k", "k1,k2"):
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        assert [http.get(path).status_code for path in ("/metrics", "/version")] == [200, 401]


def test_head(http):
    for path in ("/live", "/ready", "/metrics", "/v1/models", "/version"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert http.head("/v1/completions").status_code == 405
    assert http.put("/v1/responses/x").headers["allow"] == "DELETE, GET, HEAD"
    assert http.head("/nothing").status_code == 404


# What Prometheus 2.42 and 3 send, an older collector, and a browser.
@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=underscores;q=0.4,*/*;q=0.2",
        "text/plain;version=1.0.0;escaping=values", "application/openmetrics-text", "text/html", "",
    ],
)  # fmt: skip
def test_metrics_have_their_names_for_every_scraper(http, accept):
    answer = http.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nphalanx:num_requests_queued{" in answer.text
    assert "phalanx_" not in answer.text
