# SPDX-License-Identifier: Apache-2.0
"""Readers that go, readers that are slow, and engines that fail while they write."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from phalanx.errors import RankDied
from phalanx.serve.openai import stream
from phalanx.serve.openai.api_errors import ApiError
from phalanx.serve.openai.long_answers import PART
from phalanx.serve.openai.schema.responses import ErrorResponse
from phalanx.serve.openai.stream import DONE, SEND_BYTES, SHORT_SEND, Chunks, EventStream, JsonBody, _until_disconnect, event
from tests.support.serve_http_app import MODEL, Live, Scripted, live

LONG = "What is a rank? " * 200
ASK = {"model": MODEL, "prompt": "x", "max_tokens": 600, "ignore_eos": True}


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come about in time"
        time.sleep(0.01)


def test_a_chunk_is_its_head_with_one_choice():
    head = {"id": 'a"b', "created": 1, "usage": None}
    choice = {"index": 0, "text": 'x"\n\u2028\x85\u2029\U0001f642\x00', "logprobs": None}
    chunk = Chunks(head).of(choice)
    assert (chunk[:6], chunk[-2:]) == (b"data: ", b"\n\n")
    assert json.loads(chunk[6:]) == {**head, "choices": [choice]} == json.loads(event({**head, "choices": [choice]})[6:])
    assert chunk.count(b"\n") == 2  # an event ends with an empty line, and must hold no other
    assert chunk.decode().splitlines() == [chunk[:-2].decode(), ""]  # for clients that end lines elsewhere, too

    with_usage = Chunks(head).of(choice, {"total_tokens": 3})
    assert json.loads(with_usage[6:]) == {**head, "choices": [choice], "usage": {"total_tokens": 3}}
    assert asyncio.run(Chunks(head).of_any(choice)) == chunk
    long = {**choice, "logprobs": {"text_offset": list(range(3 * PART))}}
    parts = asyncio.run(Chunks(head).of_any({**choice, "logprobs": {"text_offset": list(range(3 * PART))}}))
    assert isinstance(parts, list)
    assert b"".join(parts) == Chunks(head).of(long)


def written_by(response) -> list[dict]:
    """The messages of a response."""
    messages = []

    async def run() -> None:
        async def send(message):
            messages.append(message)

        await response({"type": "http"}, None, send)

    asyncio.run(run())
    return messages


@pytest.mark.parametrize("sizes", [[0], [5], [SEND_BYTES], [3, SEND_BYTES + 1, 2 * SEND_BYTES], [7 * SEND_BYTES + 9]])
def test_a_long_body_is_written_in_short_parts(sizes):
    """A connection takes megabytes at once, and the event loop would copy them in one go."""
    parts = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    start, *bodies = written_by(JsonBody(parts))
    assert dict(start["headers"])[b"content-length"] == b"%d" % sum(sizes)
    assert b"".join(one["body"] for one in bodies) == b"".join(parts)
    assert max(len(one["body"]) for one in bodies) <= SEND_BYTES
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]
    _, short = sent_by(texts(b"data: 1\n\n", [b"data: ", *parts, b"\n\n"], b"data: " + parts[-1] + b"\n\n" + DONE))
    assert b"".join(one["body"] for one in short) == b"data: 1\n\ndata: %b\n\ndata: %b\n\n%b" % (b"".join(parts), parts[-1], DONE)
    assert max(len(one["body"]) for one in short) <= SEND_BYTES
    assert [one["more_body"] for one in short] == [True] * (len(short) - 1) + [False]


def test_other_tasks_run_between_the_parts_of_a_body():
    """A connection that takes everything at once never pauses: 70 MB of scores in parts of 80 KB went out in one go."""
    turns, sent = 0, []

    async def run() -> None:
        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def send(message):
            sent.append((turns, len(message.get("body", b""))))

        task = asyncio.create_task(others())
        await JsonBody([bytes(SEND_BYTES // 3)] * 90)({"type": "http"}, None, send)
        task.cancel()

    asyncio.run(run())
    assert sum(size for _, size in sent) == SEND_BYTES // 3 * 90
    for turn in range(turns + 1):
        assert sum(size for when, size in sent if when == turn) <= SEND_BYTES


async def texts(*parts: bytes | list[bytes], error: Exception | None = None):
    for part in parts:
        yield part
    if error is not None:
        raise error


def sent_by(events) -> tuple[list[dict], list[dict]]:
    """What a stream of these events gives to its own `send`, and to the short one."""
    layered, short = [], []

    async def run() -> None:
        async def send(message):
            layered.append(message)

        async def send_short(message):
            short.append(message)

        async def receive():
            await asyncio.sleep(60)

        scope = {"type": "http", "extensions": {SHORT_SEND: {"send": send_short}}}
        await EventStream(events, lambda error: ApiError(500, str(error)))(scope, receive, send)

    asyncio.run(asyncio.wait_for(run(), 30))
    return layered, short


def test_the_last_event_and_the_end_of_the_body_are_sent_at_once():
    layered, short = sent_by(texts(b"data: 1\n\n", b"data: 2\n\n" + DONE))
    assert [(one["body"], one["more_body"]) for one in short] == [(b"data: 1\n\n", True), (b"data: 2\n\n" + DONE, False)]
    assert [one["type"] for one in layered] == ["http.response.start"]  # only the beginning is for the layers
    _, short = sent_by(texts(b"data: 1\n\n", error=RankDied("rank 0 died")))
    assert [one["more_body"] for one in short] == [True, False]
    _, short = sent_by(texts(b"data: 1\n\n"))  # events of another form do not end with DONE
    assert [(one["body"], one["more_body"]) for one in short] == [(b"data: 1\n\n", True), (b"", False)]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_ends_with_one_write(path, n, monkeypatch):
    """Its last choice, the usage and [DONE] come together."""
    bodies: list[bytes] = []
    send = RequestResponseCycle.send

    async def recorded(self, message):
        bodies.append(message.get("body", b""))
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", recorded)
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    with live(Scripted(LONG)) as server, server.client() as http:
        fields = {"max_tokens": 5, "n": n, "stream": True, "stream_options": {"include_usage": True}}
        text = http.post(f"/v1/{path}", json={"model": MODEL, **prompt, **fields}).text
    last = bodies[-1].decode().split("\n\n")
    assert last[2:] == ["data: [DONE]", ""]
    assert json.loads(last[0][6:])["choices"][0]["finish_reason"] == "length"
    assert json.loads(last[1][6:])["usage"]["completion_tokens"] == 5 * n
    assert text.count('"finish_reason":"length"') == n


def test_a_disconnect_ends_the_work_and_only_that():
    """The task in which the work runs goes on, and a cancellation from outside is still one."""

    async def gone():
        return {"type": "http.disconnect"}

    async def stays():
        await asyncio.sleep(60)

    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # it ends in its own time
            ended.append("work")

    async def run() -> None:
        await _until_disconnect(gone, work())
        assert ended == ["work"]
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # raises where a cancellation is left over
        await _until_disconnect(gone, asyncio.sleep(0))  # at its end already
        await asyncio.sleep(0.01)
        outer = asyncio.create_task(_until_disconnect(stays, work()))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert ended == ["work", "work"]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_request_leaves_nothing_to_the_garbage_collector():
    """Cycles would stay until a full collection, which the server makes only when it is idle. asyncio's own transport is one."""
    with live(Scripted(LONG)) as server:

        def one() -> None:
            with raw(server, {**ASK, "max_tokens": 3, "stream": True}) as connection:
                received = b""
                while b"[DONE]" not in received:
                    received += connection.recv(4096)
            until(lambda: not server.service.admission.open)

        one()
        time.sleep(0.2)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            one()
            time.sleep(0.2)
            gc.collect()
            packages = {type(each).__module__.partition(".")[0] for each in gc.garbage}
            assert not packages & {"phalanx", "uvicorn", "starlette", "fastapi"}, gc.garbage
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


def raw(server: Live, body: dict) -> socket.socket:
    """A connection that has asked and reads nothing."""
    where = urlsplit(server.url)
    connection = socket.create_connection((where.hostname, where.port))
    data = json.dumps(body).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        + data
    )
    return connection


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {}, {"n": 3}, {"stream": True, "n": 3}, {"prompt": ["a", "b"], "stream": True}]
)
def test_a_client_that_goes_aborts(fields):
    with live(Scripted(LONG, delay=0.01)) as server:
        count = fields.get("n", 1) * len(fields.get("prompt", "x"))
        gone = raw(server, {**ASK, **fields})
        until(lambda: len(server.engine.added) == count)
        if fields.get("stream"):
            assert gone.recv(100).startswith(b"HTTP/1.1 200")
        gone.close()
        until(lambda: len(server.engine.aborted) == count)
        until(lambda: server.service.admission.open == 0)
        with server.client() as http:
            text = http.get("/metrics").text
            assert f'finished_reason="abort",model_name="tiny"}} {count}.0' in text
            assert 'phalanx:num_requests_running{engine="0",model_name="tiny"} 0.0' in text


def test_a_client_that_goes_while_it_waits_for_a_thread():
    """Disconnected before the engine knew of it: it never hears of it."""
    with live(Scripted(LONG)) as server:
        hold = threading.Event()
        for _ in range(8):
            server.service._texts._pool.submit(hold.wait, 30)
        gone = raw(server, {**ASK, "stream": True, "prompt": LONG})
        until(lambda: server.service.admission.open == 1)
        gone.close()
        until(lambda: server.service.admission.open == 0)
        hold.set()
        assert server.engine.added == []


def test_many_that_go_at_random_moments():
    with live(Scripted(LONG, delay=0.002), max_num_queued_reqs=1000) as server:

        async def one(client: httpx.AsyncClient, chance: random.Random) -> None:
            fields = {**ASK, "stream": chance.random() < 0.7, "n": chance.choice([1, 1, 2])}
            try:
                async with asyncio.timeout(chance.uniform(0.0, 0.3)):
                    async with client.stream("POST", "/v1/completions", json=fields) as answer:
                        async for _ in answer.aiter_lines():
                            pass
            except TimeoutError:
                pass

        async def all_of_them() -> None:
            chance = random.Random(7)
            limits = httpx.Limits(max_connections=40)
            async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30, trust_env=False) as client:
                for _ in range(4):
                    await asyncio.gather(*(one(client, chance) for _ in range(40)))

        asyncio.run(all_of_them())
        until(lambda: server.service.admission.open == 0)
        assert server.service.admission.queued == server.service.admission.queued_tokens == 0
        assert not server.engine._running
        assert len(server.engine.aborted) > 50


def test_a_slow_reader_holds_up_nobody():
    with live(Scripted(LONG)) as server, server.openai() as client:
        slow = raw(server, {**ASK, "stream": True, "max_tokens": 1000, "n": 2})
        until(lambda: len(server.engine.added) == 2)
        for _ in range(5):
            began = time.monotonic()
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=20).usage.completion_tokens == 20
            assert time.monotonic() - began < 5
        received = b""
        slow.settimeout(10)
        while b"[DONE]" not in received:
            piece = slow.recv(4096)
            assert piece
            received += piece
        slow.close()
        assert received.count(b'"finish_reason":"length"') == 2


def test_an_engine_that_fails_in_mid_stream():
    with live(Scripted(LONG, delay=0.01)) as server, server.client() as http, server.openai() as client:
        responses: list[httpx.Response] = []
        waits = threading.Thread(target=lambda: responses.append(http.post("/v1/completions", json=ASK)))
        waits.start()
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=600, stream=True, extra_body={"ignore_eos": True})
        received = [next(iter(stream))]
        until(lambda: len(server.engine.added) == 2)
        server.on_loop(server.engine.fail, RankDied("rank 1 was ended by SIGKILL", next="restart"))
        with pytest.raises(openai.APIError, match="rank 1 was ended by SIGKILL"):
            received.extend(stream)
        waits.join(10)
        assert responses[0].status_code == 500
        error = ErrorResponse.model_validate(responses[0].json()).error
        assert "rank 1 was ended by SIGKILL" in error.message
        assert error.code == "rank_died"


def test_an_aborted_request_is_told_so():
    with live(Scripted(LONG, delay=0.01)) as server, server.client() as http:
        answers: list[httpx.Response] = []
        waits = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=ASK)))
        waits.start()
        until(lambda: len(server.engine.added) == 1)
        server.on_loop(server.engine.abort, [server.engine.added[0].request_id])
        waits.join(10)
        assert answers[0].status_code == 503
        assert "the server stopped the completion" in answers[0].json()["error"]["message"]


async def slowly(*parts: bytes, seconds: float, error: Exception | None = None):
    for part in parts:
        await asyncio.sleep(seconds)
        yield part
    await asyncio.sleep(seconds)
    if error is not None:
        raise error


@pytest.mark.parametrize("error", [None, RankDied("rank 1 died")])
def test_a_stream_that_waits_gets_comments(monkeypatch, error):
    """Also before its first event, which then no longer decides the status."""
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.05)
    messages, sent = sent_by(slowly(b"data: 1\n\n", b"data: 2\n\n", seconds=0.3, error=error))
    assert (messages[0]["type"], messages[0]["status"]) == ("http.response.start", 200)
    text = b"".join(one["body"] for one in sent)
    pings = [part.count(stream.KEEP_ALIVE) for part in re.split(rb"data: \d\n\n", text)]
    assert len(pings) == 3
    assert all(2 <= count <= 6 for count in pings)
    rest = text.replace(stream.KEEP_ALIVE, b"")
    assert rest.startswith(b"data: 1\n\ndata: 2\n\n")
    assert (b'"error"' in rest) == (error is not None)
    assert [one["more_body"] for one in sent] == [True] * (len(sent) - 1) + [False]


def test_a_stream_with_events_gets_no_comments(monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.5)
    _, sent = sent_by(slowly(*[b"data: 1\n\n"] * 60, seconds=0.02))
    assert b"".join(one["body"] for one in sent) == b"data: 1\n\n" * 60


def test_official_clients_ignore_the_comments(monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.05)
    with live(Scripted("hello world", delay=0.2)) as server:
        with (
            server.client() as http,
            http.stream("POST", "/v1/completions", json={**ASK, "max_tokens": 3, "stream": True}) as answer,
        ):
            assert b": ping\n\n" in answer.read()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            ask = {"model": MODEL, "max_tokens": 3, "stream": True}
            chunks = list(client.completions.create(prompt="x", **ask))
            events = list(client.responses.create(input="x", model=MODEL, max_output_tokens=16, stream=True))
    assert all(chunk.choices[0].text is not None for chunk in chunks)
    assert events[-1].type in ("response.completed", "response.incomplete")
