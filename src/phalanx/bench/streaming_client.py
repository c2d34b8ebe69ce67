# SPDX-License-Identifier: Apache-2.0
"""A client that sends one streamed completion over HTTP and notes when each event arrived.

With 64 streams a server sends about ten thousand events a second. A general client takes 100 microseconds for each and would
measure itself. This one parses with httptools on the event loop's own thread, in a few microseconds an event.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from phalanx.errors import OptionError

_MAX_MESSAGE = 500
"""Characters that are kept of a server's message."""


@dataclass
class Sample:
    """One request. Times are of time.perf_counter, in seconds.

    begin: when it was due. arrivals: when each event with at least one token arrived. error: None, or the kind of failure, with
    equal text for equal failures. message: the server's own message about it. completion_tokens: as the server counts them; the
    number of events where it does not say; prompt_tokens, cached_tokens: of the prompt and of what was found of it, 0 and None
    where it does not say. texts: of the events, if they were to be kept.
    """

    begin: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    completion_tokens: int = 0
    error: str | None = None
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.error is None


class _PromptTokens(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptTokens | None = None


class _Chunk(msgspec.Struct):
    choices: list[dict[str, Any]] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class ApiEndpoint:
    """A server, by the URL of its API's root (with or without /v1)."""

    host: str
    port: int
    tls: bool
    path: str
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> ApiEndpoint:
        """Raises OptionError for text that is not an http or https URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"url {url!r} is not an http or https URL", next="write it like http://localhost:8000")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"), key)

    @property
    def base(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def request(self, body: dict[str, Any]) -> bytes:
        """POST /v1/completions with this body, as bytes to send."""
        data = json.dumps(body).encode()
        headers = {
            "Host": self.base.partition("://")[2].partition("/")[0], "Content-Type": "application/json",
            "Accept": "text/event-stream", "Content-Length": str(len(data)), "Connection": "close", **self.headers,
        }  # fmt: skip
        lines = [f"POST {self.path}/v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode() + data


def body_of(model: str, token_ids: Sequence[int], output_len: int) -> dict[str, Any]:
    return {
        "model": model, "prompt": list(token_ids), "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


async def send(
    endpoint: ApiEndpoint, body: dict[str, Any], *, due: float, expected: int, timeout: float, keep_text: bool = False
) -> Sample:  # fmt: skip
    """Send a request and read its answer to the end. Never raises for failures of the server or the network: they are in
    `Sample.error`.

    expected: the number of new tokens; another number is an error. keep_text: in `Sample.texts`.
    """
    loop = asyncio.get_running_loop()
    answer = _Answer(Sample(due), endpoint.request(body), loop.create_future(), keep_text=keep_text)
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(
                lambda: answer, endpoint.host, endpoint.port, ssl=ssl.create_default_context() if endpoint.tls else None
            )
            await answer.done
    except TimeoutError:
        answer.fail("timed out")
    except OSError as error:
        answer.fail(f"{type(error).__name__}: {error.strerror or error}")
    finally:
        answer.close()
    sample = answer.sample
    sample.end = sample.end or time.perf_counter()
    sample.completion_tokens = sample.completion_tokens or len(sample.arrivals)
    if sample.ok and sample.completion_tokens != expected:
        sample.error = f"{sample.completion_tokens} of {expected} tokens"
    return sample


class _Answer(asyncio.Protocol):
    def __init__(self, sample: Sample, request: bytes, done: asyncio.Future[None], *, keep_text: bool) -> None:
        self.sample, self.done, self._keep_text = sample, done, keep_text
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._text = b""
        self._ended = False
        self._transport: asyncio.Transport | None = None

    def fail(self, why: str) -> None:
        self.sample.error = self.sample.error or why
        self._finish()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        if not self.done.done():
            self.sample.end = time.perf_counter()
            self.done.set_result(None)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.fail(f"the answer is not an event stream ({type(error).__name__})")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if self._parser.get_status_code() in (0, 200):
            self.fail("connection lost")
        else:  # an answer that ends with the connection
            self._refused()

    # ---- httptools

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._text += body
            return
        now = time.perf_counter()
        *events, self._text = (self._text + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        chunk = _decode(data)
        if chunk.error is not None:
            kind, self.sample.message = error_kind_and_message(chunk.error)
            self.sample.error = f"error event: {kind}" if kind else "error event"
        if chunk.choices:
            self.sample.arrivals.append(now)
            if self._keep_text:
                self.sample.texts.append(str(chunk.choices[0].get("text") or ""))
        if chunk.usage is not None:
            usage, details = chunk.usage, chunk.usage.prompt_tokens_details
            self.sample.completion_tokens, self.sample.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
            self.sample.cached_tokens = None if details is None else details.cached_tokens or 0

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._refused()
        elif not self._ended:
            self.fail("the stream broke off")
        self._finish()

    def _refused(self) -> None:
        self.sample.message = refusal(self._text)
        self.fail(f"status {self._parser.get_status_code()}")


def refusal(body: bytes) -> str:
    """The message in the body of a refusal: of OpenAI's error object, or else the text as it is."""
    text = body.decode(errors="replace")
    try:
        return error_kind_and_message(json.loads(text)["error"])[1]
    except (ValueError, LookupError, TypeError):
        return _short(text)


def error_kind_and_message(error: Any) -> tuple[str, str]:
    """(kind in one word or "", message) of an error in OpenAI's shape, or of any other."""
    if not isinstance(error, dict):
        return "", _short(str(error))
    return _short(str(error.get("code") or error.get("type") or "")), _short(str(error.get("message") or ""))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
