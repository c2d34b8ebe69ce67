# SPDX-License-Identifier: Apache-2.0
"""The worst bodies of each route, at the size limit: none delays the tokens of a stream beside it by more than 100 ms.

The delay of a body is the least of several tries, because a busy machine delays the stream now and then by itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from phalanx.serve.openai.body import MAX_BODY_BYTES
from tests.serve.conftest import LENGTH
from tests.support.serve_processes import MODEL, Served, fake_server

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MAX_GAP_SECONDS = 0.1
TRIES = 6
SIZE = MAX_BODY_BYTES - 2048
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)
USER = {"role": "user", "content": "x"}


def plain(**fields) -> str:
    return json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1, **fields})


def chat(**fields) -> str:
    return json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 1, **fields})


def raw(head: str, unit: str, tail: str, *, last: str) -> str:
    """`head`, as many units as fit, `last` in place of another unit, and `tail`."""
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + last + tail


def calls(arguments: str, count: int = 1) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call] * count}])


def prompt(unit: str, last: str) -> str:
    return raw(f'{{"model": "{MODEL}", "max_tokens": 1, "prompt": [', unit, "]}", last=last)


def field(name: str, open_: str, unit: str, last: str, close: str) -> str:
    return raw(chat()[:-1] + f', "{name}": {open_}', unit, f"{close}}}", last=last)


BODIES: dict[str, Callable[[], tuple[str, str]]] = {
    "arguments of lists": lambda: (CHAT, calls('{"a": [' + "[]," * 2_500_000 + "1]}")),
    "arguments of numbers": lambda: (CHAT, calls('{"a": [' + "1," * 3_800_000 + "1]}")),
    "arguments of one text": lambda: (CHAT, calls('{"a": "' + "x" * 7_800_000 + '"}')),
    "arguments of many calls": lambda: (CHAT, calls('{"a": [' + "[]," * 20_000 + "1]}", 120)),
    "logit_bias": lambda: (PLAIN, plain(logit_bias={str(i): 1 for i in range(500_000)})),
    "logit_bias out of range": lambda: (PLAIN, plain(logit_bias={str(i): 1000 for i in range(500_000)})),
    "token ids": lambda: (PLAIN, prompt("1,", "1")),
    "lists of token ids": lambda: (PLAIN, prompt("[1],", "[1]")),
    "wrong token ids": lambda: (PLAIN, prompt("-1,", "-1")),
    "texts of prompts": lambda: (PLAIN, prompt('"",', '""')),
    "mixed prompts": lambda: (PLAIN, prompt('1,"",', "1")),
    "one text": lambda: (PLAIN, plain(prompt="This is a rank. " * (SIZE // 16))),
    "one escaped text": lambda: (PLAIN, raw(f'{{"model": "{MODEL}", "prompt": "', "\\u00e9", '"}', last="")),
    "one text of a message": lambda: (CHAT, chat(messages=[{"role": "user", "content": "x" * SIZE}])),
    "parts of messages": lambda: (
        CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 250),
    ),
    "unknown members of messages": lambda: (CHAT, chat(messages=[{"role": "user", "content": "x", "bad": 1}] * 150_000)),
    "unknown fields": lambda: (PLAIN, plain(**{f"x{i}": 1 for i in range(500_000)})),
    "template variables": lambda: (CHAT, field("chat_template_kwargs", '{"a": [', "{},", "{}", "]}")),
    "template texts": lambda: (CHAT, field("chat_template_kwargs", '{"a": [', '"b",', '"b"', "]}")),
    "schema": lambda: (CHAT, field("guided_json", '{"enum": [', '"b",', '"b"', "]}")),
    "schema of objects": lambda: (CHAT, field("guided_json", '{"enum": [', "{},", "{}", "]}")),
    "schema as text": lambda: (CHAT, chat(guided_json='{"enum": [' + "[]," * 2_500_000 + "1]}")),
    "schema of one text": lambda: (CHAT, chat(guided_json={"enum": ["x" * (SIZE - 200)]})),
    "regular expression": lambda: (CHAT, chat(guided_regex="a" * (SIZE - 200))),
    "tools": lambda: (
        CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"enum": ["b"] * 10_000}}}] * 120),
    ),
    "stops": lambda: (PLAIN, plain(stop=["a"] * 1_500_000)),
    "stop ids": lambda: (PLAIN, plain(stop_token_ids=[1] * 2_500_000)),
    "text that fits": lambda: (PLAIN, plain(prompt="This is a rank. " * 3500)),
    "token ids that fit": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10))),
    "user": lambda: (PLAIN, plain(user="x" * (SIZE - 100))),
    "no JSON": lambda: (PLAIN, "[" * SIZE),
    "lists": lambda: (PLAIN, raw("[", "[],", "]", last="[]")),
    "quotes": lambda: (PLAIN, '"' * SIZE),
    "backslashes": lambda: (PLAIN, '"' + "\\\\" * (SIZE // 2) + '"'),
    "text to tokenize": lambda: ("/tokenize", json.dumps({"prompt": "This is a rank. " * 2**16})),
    "fewer tokens": lambda: ("/detokenize", json.dumps({"tokens": [5] * 500_000})),
    "tokens": lambda: ("/detokenize", raw('{"tokens": [', "1,", "]}", last="1")),
    "wrong tokens": lambda: ("/detokenize", raw('{"tokens": [', '"",', "]}", last="1")),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("bodies")
    with fake_server(folder, tiny_model, fake={"latency": 0.005}, chat_template=TEMPLATE) as served:
        yield served.wait_ready()


class Stream:
    """A stream of tokens on a raw connection, whose longest gap is measured on a thread."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.gap, self.ended = 0.0, False
        self._connection = _post(served, PLAIN, plain(stream=True, max_tokens=LENGTH - 100, ignore_eos=True))
        self._connection.recv(65536)
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self) -> None:
        latest = time.monotonic()
        with contextlib.suppress(OSError):  # the connection is closed
            while data := self._connection.recv(65536):
                now = time.monotonic()
                self.gap, latest = max(self.gap, now - latest), now
                if b"[DONE]" in data:
                    break
        self.ended = True

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _post(served: Served, path: str, body: str) -> socket.socket:
    content = body.encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def gap_beside(served: Served, path: str, body: str) -> tuple[float, int]:
    """The longest gap of a stream beside this request, in seconds, and the status of the answer."""
    stream = Stream(served)
    try:
        with _post(served, path, body) as connection:
            status = int(connection.recv(65536).split()[1])
        time.sleep(0.05)
        assert not stream.ended
    finally:
        stream.close()
    return stream.gap, status


@pytest.mark.parametrize("name", BODIES)
def test_tokens_beside(served, name):
    path, body = BODIES[name]()
    assert len(body) <= MAX_BODY_BYTES
    gaps = []
    while len(gaps) < TRIES and (not gaps or min(gaps) > MAX_GAP_SECONDS):
        gap, status = gap_beside(served, path, body)
        gaps.append(gap)
        assert status in (200, 400), status
    print(f"GAP {name}: {status} {min(gaps) * 1000:.0f} ms {[round(1000 * g) for g in gaps]}")
    assert min(gaps) <= MAX_GAP_SECONDS, f"gaps of {[round(1000 * gap) for gap in gaps]} ms"
