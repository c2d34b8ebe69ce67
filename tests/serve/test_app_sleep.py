# SPDX-License-Identifier: Apache-2.0
"""The routes of sleep, wake-up and new weights over a real rank, as a stranger calls them."""

from __future__ import annotations

import signal
import threading

import httpx
import openai
import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, rank_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

LONG = {"model": MODEL, "prompt": "What is a rank?", "max_tokens": 3000, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sleep") / "llama", "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def served(tmp_path_factory, folder):
    with rank_server(tmp_path_factory.mktemp("served"), folder, "--enable_sleep_mode") as running:
        yield running.wait_ready()


@pytest.fixture
def http(served):
    with served.http() as client:
        client.post("/wake_up").raise_for_status()
        yield client


def test_asleep_every_request_is_told_why_and_the_process_is_live(served, http):
    assert http.get("/is_sleeping").json()["is_sleeping"] is False
    assert http.post("/wake_up").json()["level"] == 0  # without a sleep
    slept = http.post("/sleep", params={"level": 1})
    assert slept.json()["is_sleeping"] is True
    assert slept.json()["freed_bytes"] > 1 << 25
    until(lambda: served.metric("rank_memory_bytes") > 0)
    again = http.post("/sleep")
    assert (again.status_code, again.json()["freed_bytes"]) == (200, 0)
    assert http.get("/live").status_code == 200
    for path in ("/ready", "/health"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "sleeping")
        assert "sleeps at level 1: POST /wake_up" in answer.json()["reason"]
    with served.openai() as client, pytest.raises(openai.InternalServerError, match="the engine sleeps; POST /wake_up") as caught:
        client.completions.create(**LONG)
    assert (caught.value.status_code, caught.value.body["code"]) == (503, "engine_asleep")
    assert http.post("/tokenize", json={"prompt": "rank"}).status_code == 200  # it needs no model
    assert http.post("/wake_up", params={"tags": "weights"}).json()["is_sleeping"] is True
    assert http.get("/ready").status_code == 503
    assert http.post("/wake_up", params={"tags": "kv_cache"}).json()["is_sleeping"] is False
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("path", "params", "body", "words"),
    [
        ("/sleep", {"level": "0"}, None, "level='0' must be one of 1, 2"),
        ("/sleep", {"level": ["1", "2"]}, None, "level is given 2 times"),
        ("/sleep", {"mode": "now"}, None, "mode='now' must be one of wait, abort, keep"),
        ("/sleep", {"depth": "1"}, None, "unknown parameter 'depth'; known: level, mode"),
        ("/sleep", {}, {"level": 2}, "unknown field 'level'; parameters of /sleep are in its query"),
        ("/wake_up", {}, {"tags": ["weights"]}, "parameters of /wake_up are in its query"),
        ("/weights/update", {"mode": "abort"}, {"model_path": "x"}, "unknown parameter 'mode'; the query has none here"),
        ("/wake_up", {"tags": "graphs"}, None, "tags='graphs' must be one of weights, kv_cache"),
        ("/weights/update", {}, {"model": "x"}, "model"),
        ("/weights/update", {}, {"model_path": "/nowhere"}, "'/nowhere' is no folder on this host"),
        ("/weights/update", {}, {"model_path": "x", "mode": "keep"}, "mode"),
        ("/weights/update", {}, {"model_path": "x" * 70_000}, "too large"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(http, path, params, body, words):
    answer = http.post(path, params=params, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert http.get("/ready").status_code == 200


def streaming(served, **fields):
    """A completion that has begun -> the thread that reads it, its finish reasons and its errors so far."""
    chunks: list[str | None] = []
    errors: list[openai.APIError] = []
    begun = threading.Event()

    def stream() -> None:
        with served.openai() as client:
            try:
                for chunk in client.completions.create(stream=True, **{**LONG, **fields}):
                    chunks.append(chunk.choices[0].finish_reason)
                    begun.set()
            except openai.APIError as error:
                errors.append(error)

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(30)
    return reader, chunks, errors


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_sleep_while_an_answer_streams(served, http, mode):
    reader, chunks, errors = streaming(served, max_tokens=300)
    state = http.post("/sleep", params={"mode": mode, "level": "2"}).json()
    assert (state["is_sleeping"], state["kept_requests"]) == (True, mode == "keep")
    http.post("/wake_up").raise_for_status()
    reader.join(60)
    if mode == "abort":
        assert "the server stopped the completion" in str(errors[0])
    else:
        assert (chunks[-1], errors) == ("length", [])


def test_kept_requests_can_be_ended_so_that_weights_may_change(served, http, folder):
    reader, _, errors = streaming(served)
    assert http.post("/sleep", params={"mode": "keep"}).json()["kept_requests"] == 1
    refused = http.post("/weights/update", json={"model_path": str(folder)})
    assert "end them with mode 'abort'" in refused.json()["error"]["message"]
    assert http.post("/sleep", params={"mode": "abort"}).json()["kept_requests"] == 0
    reader.join(30)
    assert "the server stopped the completion" in str(errors[0])
    http.post("/weights/update", json={"model_path": str(folder)}).raise_for_status()


def test_weights_change_without_a_new_start(http, folder):
    answer = http.post("/weights/update", json={"model_path": str(folder), "mode": "abort"})
    assert answer.json()["weights_generation"] == 2
    assert http.get("/is_sleeping").json()["weights_generation"] == 2


def test_sigterm_ends_a_sleeping_server_in_order(served, http):
    """The last test of this server."""
    http.post("/sleep", params={"level": "2"}).raise_for_status()
    served.process.send_signal(signal.SIGTERM)
    served.gone(10.0)
    assert served.process.returncode == 0
    assert "Traceback" not in served.log
    with pytest.raises(httpx.TransportError):
        http.get("/live")
