# SPDX-License-Identifier: Apache-2.0
"""Slow connections are closed in time, and cost the others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import httpx
import openai
import pytest

from phalanx.serve.connections import timed_protocol
from phalanx.serve.connections.timed_protocol import LINGER_SECONDS, MAX_HEAD_BYTES, MAX_PIPELINED
from tests.support.serve_http_app import MODEL, Scripted, live
from tests.support.serve_processes import until

HEAD_SECONDS, BODY_SECONDS = 0.5, 0.7
CLOSED_SECONDS = 20.0
BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture(scope="module")
def served():
    with live(Scripted("x" * 50, delay=0.03), header_timeout=HEAD_SECONDS, body_timeout=BODY_SECONDS) as server:
        yield server


def connect(served) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def answer_of(connection: socket.socket, *, sends: bytes = b"", every: float = 0.05) -> tuple[bytes, float]:
    """What comes until the server closes the connection, and after how long, while bytes are sent one by one. Raises AssertionError
    if it does not close it within CLOSED_SECONDS."""
    began, parts = time.monotonic(), []
    connection.settimeout(every)
    while time.monotonic() - began < CLOSED_SECONDS:
        try:
            part = connection.recv(65536)
        except TimeoutError:
            with contextlib.suppress(ConnectionError):  # it is closed: the next read says so
                connection.sendall(sends[:1])
            sends = sends[1:]
            continue
        except ConnectionError:  # closed while bytes were on their way
            part = b""
        if not part:
            return b"".join(parts), time.monotonic() - began
        parts.append(part)
    raise AssertionError(f"open after {CLOSED_SECONDS:g} s; it answered {b''.join(parts)!r}")


@pytest.mark.parametrize(
    ("first", "trickles", "seconds", "answer"),
    [
        (b"", b"", HEAD_SECONDS, None),
        (b"", b"\r\n" * 100, HEAD_SECONDS, None),
        (b"GET /live HTTP/1.1\r\n", b"X-Slow: " + b"a" * 200, HEAD_SECONDS, "the head of the request did not arrive within 0.5 s"),
        (HEAD, b"", BODY_SECONDS, "the body of the request did not arrive within 0.7 s"),
        (HEAD, BODY[:10] + b" " * 30, BODY_SECONDS, "the body of the request did not arrive within 0.7 s"),
    ],
    ids=["nothing", "blank lines", "head", "no body", "body"],
)
def test_slow(served, first, trickles, seconds, answer):
    with connect(served) as connection:
        connection.sendall(first)
        text, after = answer_of(connection, sends=trickles)
        assert seconds - 0.2 < after < seconds + 2
        if answer is None:
            assert text == b""
        else:
            assert text.startswith(b"HTTP/1.1 408 ")
            assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["message"] == answer


def test_answers_take_as_long_as_they_take(served):
    """No time runs while an answer is computed, or between requests that the keep-alive time allows."""
    with served.client() as http:
        began = time.monotonic()
        for _ in range(2):
            answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 30})
            assert answer.json()["usage"]["completion_tokens"] == 30
            time.sleep(HEAD_SECONDS + 0.2)
        assert time.monotonic() - began > 2 * BODY_SECONDS
        slow = served.openai().completions.create(model=MODEL, prompt="x", max_tokens=40, stream=True)
        assert sum(1 for _ in slow) >= 30


def test_a_request_in_two_parts(served):
    with connect(served) as connection:
        for _ in range(2):
            for part in (HEAD[:20], HEAD[20:], BODY[:5], BODY[5:]):
                connection.sendall(part)
                time.sleep(0.1)
            connection.settimeout(10)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_hundred_slow_connections_cost_nothing(served):
    slow = [connect(served) for _ in range(100)]
    starts = (b"", b"GET /live HTTP/1.1\r\nX: ", HEAD, HEAD + BODY[:9])
    for number, connection in enumerate(slow):
        connection.sendall(starts[number % 4])
    with served.client() as http:
        times = []
        for _ in range(20):
            began = time.monotonic()
            assert http.get("/live").status_code == 200
            times.append(time.monotonic() - began)
    assert sorted(times)[10] < 0.1
    for number, connection in enumerate(slow):
        with connection:
            text, _ = answer_of(connection)
            assert text == b"" if number % 4 == 0 else text.startswith(b"HTTP/1.1 408 "), (starts[number % 4], text)
    with served.client() as http:
        assert http.get("/live").status_code == 200
    assert served.service.admission.open == 0


LINE = b"x-a: " + b"b" * 993 + b"\r\n"
START = b"GET /live HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
OVERSIZED = {
    "a path": (b"GET /", b"a" * 1000),
    "headers": (START, LINE),
    "one header": (START + b"x-a: ", b"a" * 1000),
    "an extension of a chunk": (CHUNKED + b"1;", b"a" * 1000),
    "trailers": (CHUNKED + b"0\r\n", LINE),
    "trailers of a body": (CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY), LINE),
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_a_head_has_a_limit(served, name):
    """The connection is closed long before all of it has arrived, and the client is told."""
    first, unit = OVERSIZED[name]
    with connect(served) as connection:
        connection.sendall(first)
        sent, answer = 0, b""
        connection.settimeout(0.002)
        try:
            while sent < 8 * MAX_HEAD_BYTES:
                connection.sendall(unit)
                sent += len(unit)
                with contextlib.suppress(TimeoutError):
                    answer += connection.recv(65536)
                    break
        except ConnectionError:
            pass
        assert sent < 2 * MAX_HEAD_BYTES
        if answer:  # the rest of what was sent may have reset the connection before
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            assert b"request_header_too_large" in answer + connection.recv(65536)


def test_a_head_that_comes_at_once_has_the_same_limit(served):
    for lines, status in ((60, b"200"), (70, b"431")):
        with connect(served) as connection:
            connection.sendall(START + LINE * lines + b"Connection: close\r\n\r\n")
            assert answer_of(connection)[0].startswith(b"HTTP/1.1 " + status)


def test_requests_of_one_connection_count_by_themselves(served):
    with connect(served) as connection:
        for _ in range(3):
            connection.sendall(START + LINE * 40 + b"\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")


def test_a_body_in_short_chunks_has_no_head_that_is_too_large(served):
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, "user": "x" * 20_000}).encode()
    with connect(served) as connection:
        connection.sendall(CHUNKED.replace(b"Host", b"Connection: close\r\nHost"))
        connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert answer_of(connection)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("encoding", ["gzip", "identity", ""])
def test_an_encoded_body_is_refused_as_what_it_is(served, encoding):
    with served.client() as http:
        answer = http.post(
            "/v1/completions", content=BODY, headers={"content-type": "application/json", "content-encoding": encoding}
        )
    assert (answer.status_code == 400) == (encoding == "gzip"), answer.text
    assert ("Content-Encoding 'gzip' is not supported" in answer.text) == (encoding == "gzip")


CLOSE = b"\r\nConnection: close\r\n\r\n"
PIPELINED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("count", [3, MAX_PIPELINED + 1])
def test_pipelined_requests_are_answered_in_order(served, count):
    with connect(served) as connection:
        connection.sendall(PIPELINED * (count - 1) + PIPELINED.replace(b"/version", b"/live").replace(b"\r\n\r\n", CLOSE))
        text, _ = answer_of(connection)
    assert (text.count(b"HTTP/1.1 200 OK"), text.count(b'"version"'), text.count(b'"live"')) == (count, count - 1, 1)
    assert text.endswith(b'"reason":null}')


def test_too_many_pipelined_requests_close_the_connection(served):
    """Those that were queued are answered; the last says that nothing follows."""
    with connect(served) as connection:
        connection.sendall(PIPELINED * 20 * MAX_PIPELINED)
        text, _ = answer_of(connection)
    assert text.count(b"HTTP/1.1") == text.count(b"HTTP/1.1 200 OK")
    assert MAX_PIPELINED <= text.count(b"HTTP/1.1 200 OK") <= 2 * MAX_PIPELINED
    assert text.rpartition(b"HTTP/1.1 200 OK")[2].lower().count(b"connection: close") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_with_more_requests_queued_aborts(served, stream):
    """Only the latest request was told: the one in progress went on to its end."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream}).encode()
    head = HEAD.replace(b"Length: %d" % len(BODY), b"Length: %d" % len(body))
    aborted, added = len(served.engine.aborted), len(served.engine.added)
    with connect(served) as connection:
        connection.sendall((head + body) * 3)
        until(lambda: len(served.engine.added) == added + 1)
    until(lambda: len(served.engine.aborted) == aborted + 1, 5.0)
    until(lambda: served.service.admission.open == 0, 5.0)
    assert len(served.engine.added) == added + 1


async def async_answers(served, path: str, size: int, **headers: str) -> list[httpx.Response]:
    answers = []
    for _ in range(8):
        async with httpx.AsyncClient(base_url=served.url, timeout=30, trust_env=False) as http:
            answers.append(
                await http.post(path, content=b"[" * size, headers={"content-type": "application/json", **headers})
            )  # fmt: skip
    return answers


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [("/v1/completions", {}, 413, "request_too_large"), ("/nope", {"connection": "close"}, 404, "not_found")],
)
def test_an_answer_to_a_request_that_is_still_being_sent_arrives(served, path, headers, status, code):
    """The connection was reset: asynchronous clients lost every such answer."""
    for answer in asyncio.run(async_answers(served, path, 9 * 2**20, **headers)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_the_openai_client_gets_the_413(served):
    async def create() -> None:
        async with served.async_openai() as client:
            for _ in range(4):
                with pytest.raises(openai.APIStatusError, match="larger than the limit") as error:
                    await client.completions.create(model=MODEL, prompt="x" * 9 * 2**20)
                assert error.value.status_code == 413

    asyncio.run(create())


TOO_LARGE = HEAD.replace(b"Length: %d" % len(BODY), b"Length: %d" % 2**40)


def closed_after(connection: socket.socket, *, every: float, size: int) -> tuple[float, int]:
    """After how long, and how many bytes, the server has closed the connection for good while these parts are sent."""
    began, sent = time.monotonic(), 0
    while time.monotonic() - began < CLOSED_SECONDS:
        try:
            connection.sendall(b"x" * size)
        except ConnectionError:
            return time.monotonic() - began, sent
        sent += size
        time.sleep(every)
    raise AssertionError(f"open after {CLOSED_SECONDS:g} s")


def test_a_slow_sender_does_not_hold_an_answered_connection(served):
    with connect(served) as connection:
        connection.sendall(TOO_LARGE)
        answer, after = answer_of(connection)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert after < 1
        after, _ = closed_after(connection, every=0.05, size=1)
        assert LINGER_SECONDS - 1 < after < LINGER_SECONDS + 2


def test_what_is_read_after_an_answer_has_a_limit(served, monkeypatch):
    monkeypatch.setattr(timed_protocol, "LINGER_BYTES", 2**22)
    with connect(served) as connection:
        connection.sendall(TOO_LARGE)
        after, sent = closed_after(connection, every=0, size=2**16)
        assert sent < 2**25
        assert after < LINGER_SECONDS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_of_http_1_0_gets_no_chunks(served, version, stream):
    """It would read their lengths as text. The end of the connection ends the stream."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": stream}).encode()
    head = HEAD.replace(b"Length: %d" % len(BODY), b"Length: %d" % len(body)).replace(b"1.1", version)
    with connect(served) as connection:
        connection.sendall(head.replace(b"Host", b"Connection: close\r\nHost") + body)
        text, _ = answer_of(connection)
    head, _, content = text.partition(b"\r\n\r\n")
    head = head.lower()
    assert head.startswith(b"http/1.1 200 ")
    assert b"\r\nconnection: close" in head
    assert (b"\r\ntransfer-encoding: chunked" in head) == (stream and version == b"1.1")
    assert (b"\r\ncontent-length: " in head) == (not stream)
    if stream and version == b"1.0":
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
    if not stream:
        assert json.loads(content)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "request_",
    [b"nonsense\r\n\r\n", b"GET /live\x01 HTTP/1.1\r\n\r\n", b"GET /live HTTP/1.1\r\nno colon\r\n\r\n", CHUNKED + b"x\r\n"],
)
def test_what_is_not_http_gets_the_error_of_the_api(served, request_):
    with connect(served) as connection:
        connection.sendall(request_)
        text, _ = answer_of(connection)
    head, _, content = text.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/json" in head
    error = json.loads(content)["error"]
    assert (error["code"], error["type"]) == ("invalid_http", "invalid_request_error")


def test_what_is_not_http_leaves_the_response_before_it_whole(served):
    """The error was written into the stream."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 10, "ignore_eos": True, "stream": True}).encode()
    head = HEAD.replace(b"Length: %d" % len(BODY), b"Length: %d" % len(body))
    with connect(served) as connection:
        connection.sendall(head + body)
        time.sleep(0.1)
        connection.sendall(b"nonsense\r\n\r\n")
        text, _ = answer_of(connection)
    assert text.count(b"HTTP/1.1") == 1
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
