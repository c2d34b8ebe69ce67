# SPDX-License-Identifier: Apache-2.0
"""One streamed answer, from servers that send it in every way and break it in every way."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from phalanx.bench.streaming_client import ApiEndpoint, body_of, send
from phalanx.errors import OptionError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a \\"error\\": b", "index": 0}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


def answered(pieces, *, expected=2, timeout=10.0, gap=0.001):
    """The sample of a request to a server that sends these pieces, and what it was sent."""
    heard = []

    async def run():
        read, ended = asyncio.Event(), asyncio.Event()

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            heard.append(head + await reader.readexactly(length))
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(read.wait(), gap)
                writer.close()
                await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            endpoint = ApiEndpoint.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "secret")
            body = body_of("m", [5, 6, 7], expected)
            sample = await send(endpoint, body, due=time.perf_counter(), expected=expected, timeout=timeout)
            read.set()
            await ended.wait()
            return sample

    return asyncio.run(run()), heard[0]


def test_a_whole_answer():
    sample, heard = answered([HEAD, chunked(TOKEN, TOKEN, USAGE, DONE)])
    assert (sample.error, sample.completion_tokens, len(sample.arrivals)) == (None, 2, 2)
    assert sample.begin < sample.arrivals[0] <= sample.arrivals[1] <= sample.end
    assert heard.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret\r\n" in heard
    assert b'"prompt": [5, 6, 7]' in heard


def test_times_are_those_of_arrival():
    pieces = [HEAD + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN), chunked(TOKEN, USAGE, DONE)]
    sample, _ = answered(pieces, gap=0.2)
    assert sample.arrivals[1] - sample.arrivals[0] > 0.15


@pytest.mark.parametrize("size", [1, 7])
def test_an_answer_in_crumbs(size):
    data = HEAD + chunked(b": keep-alive\r\n\r\n", TOKEN.replace(b"\n", b"\r\n"), TOKEN + USAGE, DONE)
    sample, _ = answered([data[i : i + size] for i in range(0, len(data), size)])
    assert (sample.error, sample.completion_tokens, len(sample.arrivals)) == (None, 2, 2)


def test_without_usage_events_are_counted():
    sample, _ = answered([HEAD, chunked(TOKEN, TOKEN, TOKEN, DONE)], expected=3)
    assert (sample.error, sample.completion_tokens) == (None, 3)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([HEAD, chunked(TOKEN, USAGE, DONE)], None),
        ([HEAD, chunked(TOKEN, DONE)], "1 of 2 tokens"),
        (
            [HEAD, chunked(TOKEN, b'data: {"error":{"message":"rank 1 died","type":"rank_died"}}\n\n', DONE)],
            "error event: rank_died",
        ),
        ([HEAD, chunked(TOKEN, TOKEN)], "the stream broke off"),
        ([HEAD + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN)], "connection lost"),
        ([b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"], "status 429"),
        ([b"not HTTP at all\r\n\r\n"], "the answer is not an event stream (HttpParserInvalidMethodError)"),
        ([HEAD, chunked(b"data: {\n\n")], "the answer is not an event stream"),
        ([], "connection lost"),
    ],
)
def test_what_may_go_wrong(pieces, error):
    sample, _ = answered(pieces)
    assert (sample.error or "").startswith((error or "").partition("(")[0])
    assert sample.ok is (error is None)
    assert sample.end >= sample.begin


REFUSED = b'{"error": {"message": "3000 tokens are\\ntoo many", "type": "invalid_request_error", "code": null}}'


@pytest.mark.parametrize(
    ("pieces", "error", "message"),
    [
        ([b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSED), REFUSED)], "status 400", "3000 tokens are too many"),
        ([b"HTTP/1.1 502 Bad Gateway\r\n\r\n", b"<b>no", b"body</b>"], "status 502", "<b>nobody</b>"),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000], "status 500", "x" * 500 + "..."),
        ([b"HTTP/1.1 429 No\r\nContent-Length: 2\r\n\r\n{}"], "status 429", "{}"),
        (
            [HEAD, chunked(b'data: {"error":{"message":"rank 1 died","type":"server_error","code":"rank_died"}}\n\n', DONE)],
            "error event: rank_died", "rank 1 died",
        ),
        (
            [HEAD, chunked(b'data: {"error":{"message":"rank 1 died","type":"server_error"}}\n\n', DONE)],
            "error event: server_error", "rank 1 died",
        ),
        ([HEAD, chunked(b'data: {"error":"rank 1 died"}\n\n', DONE)], "error event", "rank 1 died"),
    ],
)  # fmt: skip
def test_the_servers_own_message(pieces, error, message):
    sample, _ = answered(pieces)
    assert (sample.error, sample.message) == (error, message)


def test_a_server_that_does_not_answer():
    sample, _ = answered([HEAD], gap=2.0, timeout=0.3)
    assert sample.error == "timed out"


def test_nobody_there():
    sample = asyncio.run(send(ApiEndpoint.of("http://127.0.0.1:9"), {}, due=0.0, expected=1, timeout=5))
    assert sample.error is not None
    assert sample.error.startswith("ConnectionRefusedError")


def test_urls():
    endpoint = ApiEndpoint.of("https://host.example/api/v1/")
    assert (endpoint.base, endpoint.port, endpoint.tls) == ("https://host.example:443/api", 443, True)
    assert ApiEndpoint.of("http://[::1]:80").base == "http://[::1]:80"
    for url in ("localhost:8000", "ftp://x", "http://", "http://x:port"):
        with pytest.raises(OptionError, match="is not an http or https URL"):
            ApiEndpoint.of(url)
