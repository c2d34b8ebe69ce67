# SPDX-License-Identifier: Apache-2.0
"""Adapters over HTTP: they are models with a parent, come and go with vLLM's routes, and answer under their own names."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from multiprocessing import Pipe

import httpx
import openai
import pytest

from phalanx.serve.openai.large_bodies import messages
from phalanx.serve.openai.large_bodies.processes import setup_of
from phalanx.serve.openai.large_bodies.worker import make_task
from phalanx.serve.openai.schema.responses import ErrorResponse, ModelList
from phalanx.serve.openai.service import ServingEngine
from phalanx.serve.output_parsing import OutputFormat
from tests.support.serve_http_app import MODEL, Live, Scripted, live, tokenizer_of
from tests.support.serve_processes import MODEL as NAME
from tests.support.serve_processes import fake_server

SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}


@pytest.fixture
def server() -> Iterator[Live]:
    with live(Scripted("x"), allow_runtime_lora_updating=True) as server:
        yield server


def post(server: Live, route: str, body: dict[str, object]) -> httpx.Response:
    with server.client() as http:
        return http.post(f"/v1/{route}_lora_adapter", json=body)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, ErrorResponse.model_validate(answer.json()).error.message


def test_an_adapter_is_a_model_with_a_parent_until_it_is_unloaded(server):
    answer = post(server, "load", SQL)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    with server.client() as http:
        base, card = ModelList.model_validate(http.get("/v1/models").json()).data
        assert (base.id, base.parent, card.id, card.root, card.parent) == (MODEL, None, "sql", "/adapters/sql", MODEL)
        assert http.get("/v1/models/sql").json()["parent"] == MODEL
        assert http.get(f"/v1/models/{MODEL}:sql").json()["id"] == "sql"
    answer = post(server, "unload", {"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    with server.client() as http:
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="'sql' is not served here"):
        server.openai().completions.create(model="sql", prompt="a")


def test_every_endpoint_answers_with_the_adapter_that_its_model_names(server):
    post(server, "load", SQL)
    client, hello = server.openai(), [{"role": "user", "content": "a"}]
    answers = [
        client.completions.create(model="sql", prompt="a"), client.chat.completions.create(model="sql", messages=hello),
        client.responses.create(model="sql", input="a"), client.embeddings.create(model="sql", input="a"),
    ]  # fmt: skip
    with server.client() as http:
        message = http.post("/v1/messages", json={"model": "sql", "max_tokens": 9, "messages": hello}).json()
        rerank = http.post("/v1/rerank", json={"model": "sql", "query": "a", "documents": ["b"]}).json()
    assert [answer.model for answer in answers] + [message["model"], rerank["model"]] == ["sql"] * 6
    assert [add.params.adapter for add in server.engine.added] == ["sql"] * 7
    client.completions.create(model=MODEL, prompt="a")
    assert server.engine.added[-1].params.adapter is None
    assert client.completions.create(model=f"{MODEL}:sql", prompt="a").model == f"{MODEL}:sql"
    assert server.engine.added[-1].params.adapter == "sql"
    with pytest.raises(openai.NotFoundError, match=f"'{MODEL}:law' is not served here; '{MODEL}', 'sql' are"):
        client.completions.create(model=f"{MODEL}:law", prompt="a")


def test_a_large_body_is_read_with_the_names_that_there_are_now():
    """The process that reads it may have been started before the adapter was loaded."""
    engine, tokenizer = Scripted("x"), tokenizer_of()
    output = OutputFormat.detect(tokenizer, reasoning="auto", tools="auto")
    task = make_task(messages.encode(setup_of(ServingEngine(engine, tokenizer, output))))
    replies = []
    for names in ([MODEL, "sql"], [MODEL]):
        ours, its = Pipe()
        reader = threading.Thread(target=task, args=(its,))
        reader.start()
        for frame in (messages.encode(messages.Opening("/v1/completions", names)), b'{"model":"sql","prompt":"a"}', b""):
            ours.send_bytes(frame)
        replies.append(messages.decode_reply(ours.recv_bytes()))
        reader.join()
    prepared, refused = replies
    assert isinstance(prepared, messages.PreparedMessage)
    assert b'"sql"' in prepared.request, "the server asks for the adapter that the request names"
    assert isinstance(refused, messages.ApiErrorMessage)
    assert refused.status == 404


def test_what_cannot_be_changed_is_refused(server):
    assert "the model has this name" in error_of(post(server, "load", {**SQL, "lora_name": MODEL}))[1]
    unknown = post(server, "unload", {"lora_name": "sql"})
    assert error_of(unknown) == (404, "adapter 'sql' is not loaded")
    assert unknown.json()["error"]["param"] == "lora_name"
    post(server, "load", SQL)
    assert error_of(post(server, "load", SQL)) == (400, "adapter 'sql' is already loaded")
    assert post(server, "load", {**SQL, "lora_path": "/other", "load_inplace": True}).status_code == 200
    assert [each.folder for each in server.service.adapters] == ["/other"]
    assert error_of(post(server, "load", {"lora_name": "b"}))[0] == 400
    assert "unknown field 'lora_file'" in error_of(post(server, "load", {**SQL, "lora_file": "x"}))[1]


def test_the_routes_are_closed_unless_they_are_allowed():
    with live(Scripted("x")) as server:
        for route in ("load", "unload"):
            status, message = error_of(post(server, route, SQL if route == "load" else {"lora_name": "sql"}))
            assert (status, "--allow_runtime_lora_updating" in message) == (403, True)
        assert server.engine.adapters == {}


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(("modules", "words"), [
    ("a=/nowhere", "adapter 'a' is not loaded: /nowhere is no folder; give the folder that holds adapter_config.json"),
    (f"{NAME}=/nowhere", f"adapter '{NAME}' is not loaded: the model has this name"),
])  # fmt: skip
def test_a_faulty_adapter_ends_the_start_before_an_engine_begins(tmp_path, tiny_model, modules, words):
    with fake_server(tmp_path, tiny_model, engine={"max_loras": 1}, lora_modules=modules) as served:
        assert served.process.wait(60) == 1
        assert words in served.log
        assert "engine:" not in served.log


def test_metrics_tell_of_adapters_that_have_requests():
    with live(Scripted("x"), metrics_prefix="vllm") as server:
        stats = server.engine.latest
        stats.max_adapters, stats.adapters_in_slots = 4, ["a", "b"]
        stats.adapters_running, stats.adapters_waiting = {"b": 2, "a": 1}, {"c": 3}
        server.service.metrics.engines = [stats]
        text = server.service.metrics.exposition().decode()
        again = server.service.metrics.exposition().decode()
    info = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert all(part in info[0] for part in ('max_lora="4"', 'running_lora_adapters="a,b"', 'waiting_lora_adapters="c"'))
    assert float(info[0].rpartition(" ")[2]) > 1.7e9, "the time of the last change"
    assert info == [line for line in again.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'vllm:adapter_requests{adapter="b",engine="0",model_name="tiny",state="running"} 2.0' in text
    assert 'vllm:adapter_in_slot{adapter="a",engine="0",model_name="tiny"} 1.0' in text


def test_series_of_adapters_are_those_of_slots_and_requests():
    """However many adapters come and go, and whatever names requests make up."""
    with live(Scripted("x"), metrics_prefix="vllm") as server:
        stats, lines = server.engine.latest, []
        stats.max_adapters = 2
        for number in range(200):
            stats.adapters_in_slots, stats.adapters_running = [f"a{number}", f"a{number - 1}"], {f"a{number}": 1}
            stats.adapters_waiting = {f"w{number}": 1}
            server.service.metrics.engines = [stats]
            with pytest.raises(openai.NotFoundError):
                server.openai().completions.create(model=f"made-up-{number}", prompt="a")
            lines.append([line for line in server.service.metrics.exposition().decode().splitlines() if not line.startswith("#")])
    assert len({len(each) for each in lines[2:]}) == 1, "no series is left behind"
    last = "\n".join(lines[-1])
    assert "made-up" not in last
    assert set(re.findall(r'adapter="([^"]*)"', last)) == {"a199", "a198", "w199"}
