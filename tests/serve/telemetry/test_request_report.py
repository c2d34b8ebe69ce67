# SPDX-License-Identifier: Apache-2.0
"""`--log_requests`: a line of each request that was answered, with its id and its times, and never its content.

The engine process is real; its executor is the fake one, with one place in the batch and 10 ms for a step.
"""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from tests.support.serve_processes import MODEL, fake_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

SECRET = "xylophone"


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model):
    options = {"log_format": "json", "log_level": "warning", "log_requests": True}
    fake, engine = {"latency": 0.01}, {"max_batch_size": 1}
    with fake_server(
        tmp_path_factory.mktemp("log"), tiny_model, fake=fake, engine=engine, max_num_queued_reqs=4, **options
    ) as running:
        yield running.wait_ready()


def ask(served, name, *, path="/v1/completions", expected=200, **body):
    """Send a request named `name`; returns its line in the log."""
    body = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, **body}
    with served.http() as http:
        answer = http.post(path, json=body, headers={"X-Request-Id": name})
    assert answer.status_code == expected, answer.text
    assert answer.headers["x-request-id"] == name
    return line_of(served, name)


def line_of(served, name):
    return until(lambda: next((line for line in lines(served) if line.get("request_id") == name), None))


def lines(served):
    complete = served.log.rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in complete]  # every line of every process is an object


def test_a_completion(served):
    line = ask(served, "plain", prompt=SECRET)
    numbers = {key: line.pop(key) for key in ("queue_seconds", "first_token_seconds", "total_seconds")}
    assert 0 <= numbers["queue_seconds"] < numbers["first_token_seconds"] < numbers["total_seconds"] < 5
    assert numbers["total_seconds"] - numbers["first_token_seconds"] > 0.03, "four more steps of 10 ms"
    del line["time"], line["logger"]
    assert line == {
        "level": "info", "process": "phalanx server", "message": "request", "request_id": "plain", "method": "POST",
        "path": "/v1/completions", "status": 200, "model": MODEL, "prompt_tokens": line["prompt_tokens"], "cached_tokens": 0,
        "completion_tokens": 5, "finish_reason": "length",
    }  # fmt: skip
    assert line["prompt_tokens"] >= 1


def test_several_prompts_and_completions_are_one_request(served):
    one, line = ask(served, "one", prompt="a"), ask(served, "several", prompt=["a", "b"], n=2)
    assert (line["completion_tokens"], line["prompt_tokens"]) == (20, 2 * one["prompt_tokens"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_conversation(served, path):
    field = {"messages": [{"role": "user", "content": SECRET}]} if "chat" in path else {"input": SECRET}
    limit = {} if "chat" in path else {"max_output_tokens": 5, "max_tokens": None}
    body = {**field, **limit}
    with served.http() as http:
        body = {"model": MODEL, "max_tokens": 5, **body}
        answer = http.post(path, json={key: value for key, value in body.items() if value}, headers={"X-Request-Id": path[4:]})
    assert answer.status_code == 200, answer.text
    assert line_of(served, path[4:])["completion_tokens"] <= 5


def test_waiting_is_told_from_computing(served):
    first = threading.Thread(target=ask, args=(served, "long"), kwargs={"prompt": "x", "max_tokens": 60})
    first.start()
    until(lambda: served.metric("num_requests_running") == 1)
    second = ask(served, "waits", prompt="x")
    first.join()
    assert second["queue_seconds"] > 0.2, "it waited for the only place of the batch"
    assert second["first_token_seconds"] - second["queue_seconds"] < 0.15
    assert line_of(served, "long")["queue_seconds"] < 0.1


def test_a_client_that_leaves(served):
    with served.http() as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "left"}) as answer:
            next(answer.iter_bytes())
    line = line_of(served, "left")
    assert (line["finish_reason"], line["status"]) == ("abort", 200)
    assert 1 <= line["completion_tokens"] < 2000


def test_a_client_that_leaves_before_an_answer(served):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    with served.http(timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, headers={"X-Request-Id": "left-early"})
    line = line_of(served, "left-early")
    assert line["finish_reason"] == "abort"
    assert "status" not in line, "no answer was sent, so none has a status"


def test_a_refused_request_has_its_status_and_nothing_else(served):
    line = ask(served, "refused", prompt=SECRET, temperature=9, expected=400)
    assert line["status"] == 400
    assert "model" not in line


def test_nothing_of_content_and_no_probe_is_logged(served):
    with served.http() as http:
        assert len(http.get("/ready").headers["x-request-id"]) == 32
    assert SECRET not in served.log
    assert {line.get("method") for line in lines(served)} <= {"POST", None}
