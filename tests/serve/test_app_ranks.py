# SPDX-License-Identifier: Apache-2.0
"""`phalanx serve` at tp 2, real ranks over a tiny random checkpoint: the official client, and ranks that die and stand still."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import time

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_http_app import HERMES_TEMPLATE
from tests.support.serve_processes import MODEL, rank_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

LONG = {"model": MODEL, "prompt": "What is a rank?", "max_tokens": 5000, "temperature": 0, "extra_body": {"ignore_eos": True}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [DIWEC] [a-z0-9 ]+: ")
TOOLS = [{"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("ranks"), "llama", max_position_embeddings=8192)
    (folder / "template.jinja").write_text(HERMES_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("served")
    with rank_server(folder, model, "--tp-size", "2", "--chat-template", str(model / "template.jinja")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def client(served):
    with served.openai() as openai_client:
        yield openai_client


def complete(client, **fields):
    return client.completions.create(**{"model": MODEL, "prompt": "What is a rank?", "max_tokens": 24, "temperature": 0, **fields})


def test_processes_and_metrics(served, client):
    titles = {process.cmdline()[0].strip() for process in served.tree}
    assert {"phalanx server", "phalanx engine", "phalanx rank 0", "phalanx rank 1"} <= titles
    before = served.metric("generation_tokens_total")
    complete(client, extra_body={"ignore_eos": True})
    assert served.metric("generation_tokens_total") == before + 24
    until(lambda: served.metric("allreduce_calls_total") > 0)  # ranks report theirs once a second
    until(lambda: served.metric("step_tokens_total") >= 24)
    with served.http() as http:
        text = http.get("/metrics").text
    for series in (
        'rank_memory_bytes{engine="0",kind="weights",model_name="tiny",rank="1"}',
        'steps_total{engine="0",kind="decode graph",model_name="tiny"} 0.0',  # on CPU all are eager
        'steps_total{engine="0",kind="prompt graph",model_name="tiny"} 0.0',
        'step_padding_tokens_total{engine="0",kind="eager",model_name="tiny"} 0.0',
        "startup_phase_seconds{",
        "build_info{",
    ):
        assert f"phalanx:{series}" in text
    assert not re.search(r'phalanx:steps_total\{[^}]*kind="eager"[^}]*\} 0\.0', text)


def test_streamed_text_is_the_whole_text(client):
    """Random weights write broken characters, special tokens and all: whatever it is, in pieces it is the same."""
    for seed in range(3):
        fields = {"temperature": 1.0, "seed": seed, "max_tokens": 40, "logprobs": 2}
        response = complete(client, **fields).choices[0]
        chunks = list(complete(client, stream=True, **fields))
        assert "".join(c.choices[0].text for c in chunks) == response.text
        assert [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens] == response.logprobs.tokens
        assert chunks[-1].choices[0].finish_reason == response.finish_reason


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(begin=st.integers(0, 24), length=st.integers(1, 12))
def test_any_part_of_the_text_stops_it(client, begin, length):
    """A stop string that crosses tokens, and characters of several bytes, wherever it lies."""
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 30}
    text = complete(client, **fields).choices[0].text
    stop = text[begin : begin + length]
    if not stop:
        return
    response = complete(client, **fields, stop=stop).choices[0]
    assert response.text == text[: text.index(stop)]
    assert (response.finish_reason, response.stop_reason) == ("stop", stop)
    assert "".join(c.choices[0].text for c in complete(client, **fields, stop=stop, stream=True)) == response.text


def test_seeds_and_n(client):
    fields = {"temperature": 1.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    three = [choice.text for choice in complete(client, n=3, seed=5, **fields).choices]
    assert len(set(three)) == 3
    assert [complete(client, seed=5 + i, **fields).choices[0].text for i in range(3)] == three


def test_scores_of_a_prompt_are_those_of_its_completion(client):
    completion = complete(client, max_tokens=8, logprobs=0, extra_body={"ignore_eos": True}, prompt=[5, 6, 7])
    with_tokens = complete(client, max_tokens=8, extra_body={"ignore_eos": True}, prompt=[5, 6, 7], logprobs=1, echo=True)
    scores = with_tokens.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert scores[3:] == pytest.approx(completion.choices[0].logprobs.token_logprobs, abs=1e-4)
    assert all(score < 0 for score in scores[1:])


def test_sampling_fields_do_what_they_say(client):
    free = complete(client, max_tokens=1, logprobs=5).choices[0]
    ids = client.post("/../tokenize", body={"prompt": "a", "add_special_tokens": False}, cast_to=object)["tokens"]
    forced = complete(client, max_tokens=5, logit_bias={str(ids[0]): 100}).choices[0]
    assert forced.text == "aaaaa"
    assert free.text != "a"
    stopped = complete(client, max_tokens=5, logit_bias={str(ids[0]): 100}, extra_body={"stop_token_ids": ids}).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", ids[0])
    least = complete(client, max_tokens=5, logit_bias={str(ids[0]): 100}, extra_body={"stop_token_ids": ids, "min_tokens": 3})
    assert least.usage.completion_tokens == 4  # three others, then the stop


def test_structured_output(client):
    messages = [{"role": "user", "content": "Measure it."}]
    how = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=200, response_format=how)
    thing = json.loads(answer.choices[0].message.content)
    assert set(thing) == {"name", "size"}
    assert 0 <= thing["size"] <= 99
    regex = complete(client, max_tokens=50, extra_body={"guided_regex": "(yes|no)! [0-9]{3}"}).choices[0].text
    assert regex[:4] in ("yes!", "no! ")
    assert regex[-3:].isdigit()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "measure"}}], ids=["required", "named"])
def test_forced_tool_calls(client, choice):
    fields = {
        "model": MODEL, "messages": [{"role": "user", "content": "Measure it."}], "tools": TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False, "temperature": 0, "max_tokens": 300,
    }  # fmt: skip
    message = client.chat.completions.create(**fields).choices[0]
    assert message.finish_reason == "tool_calls"
    [call] = message.message.tool_calls
    assert call.function.name == "measure"
    assert set(json.loads(call.function.arguments)) == {"name", "size"}
    pieces = [p for c in client.chat.completions.create(stream=True, **fields) for p in c.choices[0].delta.tool_calls or []]
    assert "".join(p.function.arguments or "" for p in pieces) == call.function.arguments


def test_many_async_streams(served):
    async def ask() -> None:
        async with served.async_openai() as client:

            async def one(number: int) -> tuple[int, str]:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": f"number {number % 4}"}], stream=True, temperature=0,
                    max_tokens=16, extra_body={"ignore_eos": True},
                )  # fmt: skip
                return number % 4, "".join([c.choices[0].delta.content or "" async for c in stream])

            texts = await asyncio.gather(*(one(number) for number in range(24)))
            assert len(set(texts)) == len({number for number, _ in texts}), "the same question had two answers"

    asyncio.run(ask())
    until(lambda: served.metric("num_requests_running") == 0)
    assert served.metric("kv_cache_usage_perc") == 0


def test_every_line_of_the_log_has_a_time(served, client):
    """Of all processes: server, engine, ranks, and those that compile grammars and read large bodies."""
    complete(client, extra_body={"guided_regex": "[ab]{2}"})
    complete(client, prompt="a" * 2000, max_tokens=1, logit_bias={"5": 0.5}, user="x" * 70_000)
    lines = served.log.splitlines()
    assert [line for line in lines if not LOG_LINE.match(line)] == []
    titles = {line.split()[3] for line in lines}
    assert {"phalanx", "engine:", "rank"} <= titles, titles


def broken(served, send: int, seconds: float) -> tuple[str, str, float]:
    """Send a signal to rank 1 under a stream and a whole request: what each heard, and after how long all was over."""
    heard: list[str] = []

    def response() -> None:
        with served.openai() as client:
            with pytest.raises(openai.InternalServerError) as error:
                client.completions.create(**LONG)
            heard.append(str(error.value.body))

    waiting = threading.Thread(target=response)
    with served.openai() as client:
        stream = client.completions.create(stream=True, **LONG)
        waiting.start()
        next(iter(stream))
        until(lambda: served.metric("num_requests_running") == 2)
        victim = served.child("phalanx rank 1")
        began = time.monotonic()
        victim.send_signal(send)
        with pytest.raises(openai.APIError) as error:
            for _ in stream:
                pass
        named = time.monotonic() - began
    waiting.join(seconds)
    assert served.process.wait(seconds) == 1
    served.gone(seconds)
    return str(error.value), heard[0], named


def require_what_an_endpoint_picker_reads(served) -> None:
    """The five series that the endpoint picker of the Gateway API reads, by their exact names, of blocks of 8 tokens."""
    with served.http() as http:
        text = http.get("/metrics").text
    series = {
        name: (dict(re.findall(r'(\w+)="([^"]*)"', labels)), value)
        for name, labels, value in re.findall(r"^(vllm:\w+){(.*)} (.*)$", text, re.M)
    }
    assert series["vllm:num_requests_waiting"][1] == series["vllm:num_requests_running"][1] == "0.0"
    assert series["vllm:kv_cache_usage_perc"][1] == "0.0"
    assert series["vllm:lora_requests_info"][0].keys() >= {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    cache, _ = series["vllm:cache_config_info"]
    (tokens,) = re.findall(r"the KV cache holds ([\d,]+) tokens", served.log)
    assert cache["block_size"] == "8"
    assert int(cache["num_gpu_blocks"]) * 8 == int(tokens.replace(",", "")), "as the engine says it"


def test_an_endpoint_picker_reads_its_metrics_and_a_rank_is_killed(tmp_path, model):
    with rank_server(tmp_path, model, "--tp_size", "2", "--metrics_prefix", "vllm", "--kv_block_size", "8") as served:
        served.wait_ready()
        require_what_an_endpoint_picker_reads(served)
        began = time.monotonic()
        streamed, response, _ = broken(served, signal.SIGKILL, 10.0)
        assert "rank 1" in streamed
        assert "rank 1" in response
        assert time.monotonic() - began < 15


def test_a_rank_is_killed_that_exchanges_tokens_for_experts(tmp_path):
    """Rank 1 is a data-parallel index of its own, and may have no request: it computes its experts for rank 0."""
    folder = write_checkpoint(tmp_path / "mixtral", "mixtral", max_position_embeddings=8192)
    with rank_server(tmp_path, folder, "--ep_size", "2") as served:
        served.wait_ready()
        streamed, response, named = broken(served, signal.SIGKILL, 10.0)
        assert "rank 1" in streamed
        assert "rank 1" in response
        assert named < 10


def test_a_rank_is_stopped(tmp_path, model):
    with rank_server(tmp_path, model, "--tp_size", "2", "--stall_timeout", "4") as served:
        served.wait_ready()
        streamed, response, named = broken(served, signal.SIGSTOP, 15.0)
        assert "rank 1" in streamed
        assert "rank 1" in response
        assert named < 15
