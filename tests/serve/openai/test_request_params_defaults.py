# SPDX-License-Identifier: Apache-2.0
"""Requests have the checkpoint's defaults for the fields that they do not state, on every route and for bodies of every size."""

from __future__ import annotations

import shutil

import msgspec
import pytest

from tests.support.serve_http_app import MODEL, Scripted, live
from tests.support.serve_processes import fake_server

DEFAULTS = {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05, "max_tokens": 30}
MESSAGES = [{"role": "user", "content": "x"}]
ROUTES = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": ["x"] * 3, "user": "y" * 70000}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "user": "y" * 70000}),
    ("/v1/responses", {"input": "x"}),
]


@pytest.fixture(scope="module")
def served():
    engine = Scripted("hello", max_seq_len=8192)
    engine.facts = msgspec.structs.replace(engine.facts, sampling_defaults=DEFAULTS)
    with live(engine) as server, server.client() as http:
        yield engine, http


def params_of(served, path, body):
    engine, http = served
    answer = http.post(path, json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return engine.added[-1].params, answer.json()


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_what_is_not_stated(served, path, body):
    params, answer = params_of(served, path, body)
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.5, 0.8)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_what_is_stated_wins_and_null_states_nothing(served, path, body):
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    params, answer = params_of(served, path, {**body, "temperature": 0, "top_p": 1, "top_k": None, length: 7})
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 1, 20, 7)
    assert params.greedy
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0, 1)


def test_the_model_card_shows_them(served):
    assert served[1].get("/v1/models").json()["data"][0]["default_sampling_params"] == DEFAULTS


def test_impossible_defaults_end_a_start_before_weights_are_read(tmp_path, tiny_model, forked_python):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": "hot"}', encoding="utf-8")
    with fake_server(tmp_path, folder) as running:
        assert running.process.wait(60) != 0
    assert "temperature='hot' is not valid" in running.log
    assert "start the ranks" not in running.log


def test_without_defaults(served):
    with live(Scripted("hello")) as server, server.client() as http:
        http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        params = server.engine.added[-1].params
        assert (params.temperature, params.max_tokens, params.top_k) == (1.0, 16, 0)
        assert http.get("/v1/models").json()["data"][0]["default_sampling_params"] == {}
