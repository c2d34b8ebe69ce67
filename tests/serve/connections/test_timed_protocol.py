# SPDX-License-Identifier: Apache-2.0
"""Slow connections are closed in time, and cost the others nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from tests.support.serve_http_app import MODEL, Scripted, live

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
