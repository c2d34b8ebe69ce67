# SPDX-License-Identifier: Apache-2.0
"""The worst bodies of each route, at the size limit: none delays the tokens of a stream beside it by more than 100 ms.

The delay of a body is the least of several tries, because a busy machine delays the stream now and then by itself. Beside all
bodies at once, what the loops of server and engine wait for a core is not theirs (`tests.support.loop_delays`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from phalanx.serve.openai.body import MAX_BODY_BYTES
from tests.serve.conftest import LENGTH
from tests.support.loop_delays import SCHEDSTAT, delays_between
from tests.support.serve_processes import MODEL, Served, fake_server

CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
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


def response(**fields) -> str:
    return json.dumps({"model": MODEL, "input": "x", "max_output_tokens": 16, **fields})


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
    "text of a response": lambda: (RESPONSES, response(input="This is a rank. " * (SIZE // 16))),
    "text of a response that fits": lambda: (RESPONSES, response(input="This is a rank. " * 1000, metadata={"a": "x" * 512})),
    "items of a response": lambda: (RESPONSES, response(input=[{"role": "user", "content": "x"}] * 1000, tools=[
        {"type": "function", "name": f"f{i}", "parameters": {"enum": ["b"] * 4000}} for i in range(120)
    ])),
    "references to items": lambda: (RESPONSES, response(input=[{"type": "item_reference", "id": "msg_0"}] * 100_000)),
    "calls of a response": lambda: (RESPONSES, response(input=[
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a": [' + "[]," * 20_000 + "1]}"}
    ] * 120)),
    "several completions of token ids that fit": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10), n=8)),
    "scores of an echoed prompt": lambda: (PLAIN, plain(prompt=[5] * (LENGTH - 10), echo=True, logprobs=5)),
    "scores of an echoed prompt, in a stream": lambda: (
        PLAIN, plain(prompt=[5] * (LENGTH - 10), echo=True, logprobs=5, stream=True),
    ),
    "scores of a prompt": lambda: (PLAIN, plain(prompt=[7] * (LENGTH - 10), prompt_logprobs=20)),
    "scores of a conversation": lambda: (
        CHAT, chat(messages=[{"role": "user", "content": "This is a rank. " * 1500}], prompt_logprobs=20),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def delays(tmp_path_factory):
    return tmp_path_factory.mktemp("delays")


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model, delays):
    folder = tmp_path_factory.mktemp("bodies")
    # The fake ranks compute in Python, inside the engine's process: what one step makes them do must be short.
    engine = {"max_batch_size": 64, "max_num_tokens": 1024}
    with fake_server(
        folder,
        tiny_model,
        fake={"latency": 0.005, "num_blocks": 40_000},
        engine=engine,
        chat_template=TEMPLATE,
        delays=delays if SCHEDSTAT.exists() else None,
    ) as served:
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
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def gap_beside(served: Served, path: str, body: str) -> tuple[float, int]:
    """The longest gap of a stream beside this request, in seconds, and the status of the answer."""
    stream = Stream(served)
    try:
        with _post(served, path, body) as connection:
            status = int(connection.recv(65536).split()[1])
            while connection.recv(1 << 20):
                pass
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


STREAMS, STREAMED = 16, 12_000
ROUNDS, ALONE_SECONDS = 4, 8.0
MAX_OTHERS = 0.2
"""Cores that others may use where long gaps count: beyond that, they make long gaps at any time."""
MANY_CORES = 8
MAX_SHARED_GAP_SECONDS = MAX_GAP_SECONDS if (os.cpu_count() or 1) >= MANY_CORES else 0.5
"""Of a stream, where the processes of this test share a machine among them alone: with fewer cores they wait for one another."""
SENDER = """
import pathlib, socket, sys, threading
def send(path):
    route, _, body = path.read_bytes().partition(b"\\n")
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=300) as connection:
        head = b"POST %b HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Type: application/json\\r\\n"
        head += b"Content-Length: %d\\r\\n\\r\\n"
        connection.sendall(head % (route, len(body)) + body)
        status = connection.recv(65536).split()[1]
        while connection.recv(1 << 20):
            pass
    sys.stdout.write(path.name + " " + status.decode() + "\\n")  # one write: another thread's must not come between
threads = [threading.Thread(target=send, args=(path,)) for path in sorted(pathlib.Path(sys.argv[2]).iterdir())]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def streamed_gaps(served: Served, beside: Callable[[], bool]) -> list[float]:
    """The gaps of sixteen streams, in seconds, while `beside` is true."""
    body = plain(stream=True, max_tokens=STREAMED, ignore_eos=True)
    gaps, latest = [], {}
    with selectors.DefaultSelector() as ready, contextlib.ExitStack() as stack:
        for _ in range(STREAMS):
            connection = stack.enter_context(_post(served, PLAIN, body))
            assert connection.recv(65536).split()[1] == b"200"
            ready.register(connection, selectors.EVENT_READ)
            latest[connection] = time.monotonic()
        time.sleep(0.3)
        for connection in latest:
            connection.recv(1 << 20)
            latest[connection] = time.monotonic()
        while beside():
            for key, _ in ready.select(0.05):
                assert isinstance(key.fileobj, socket.socket)
                data, now = key.fileobj.recv(65536), time.monotonic()
                assert data, "a stream ended"
                assert b"[DONE]" not in data, "a stream is too short"
                gaps.append(now - latest[key.fileobj])
                latest[key.fileobj] = now
        gaps += [time.monotonic() - moment for moment in latest.values()]
    return gaps


def others_share(processes: list[psutil.Process], before: float, seconds: float) -> float:
    """Cores that others than these processes have used since `before`, of which `processor_seconds` is the total."""
    return (processor_seconds(processes) - before) / seconds


def processor_seconds(processes: list[psutil.Process]) -> float:
    """Seconds that this machine's cores have worked, without those of these processes."""
    times = psutil.cpu_times()
    own = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            own += sum(process.cpu_times()[:2])
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - own


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="not run: needs Linux's count of the time that a thread waits for a core")
def test_all_bodies_at_once_beside_sixteen_streams(served, delays, tmp_path: Path):
    """A program of its own sends them: what this one measures are gaps of the server.

    Neither loop holds up the streams for longer than 100 ms by itself. What a client sees is longer on two cores, which the server,
    the engine, the readers of bodies and the sender share: 0.08 to 0.27 s, 0.05 without the bodies. So where nobody else uses such
    a machine, gaps are bounded only; with MANY_CORES, none may be longer than 100 ms.
    """
    for number, make in enumerate(BODIES.values()):
        path, body = make()
        (tmp_path / f"{number:02}").write_text(f"{path}\n{body}", encoding="utf-8")
    command = ["nice", "-n", "19", sys.executable, "-c", SENDER, str(served.port), str(tmp_path)]
    measured = []
    for _ in range(ROUNDS):
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
            beside = streamed_gaps(served, lambda sender=sender: sender.poll() is None)
            assert sender.stdout is not None
            answers = [line.split()[1] for line in sender.stdout]
        end = time.monotonic()
        assert len(answers) == len(BODIES)
        assert set(answers) <= {"200", "400"}, answers
        own = [max(delays_between(delays / name, begin, end), default=0.0) for name in ("loop", "turns")]
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before = processor_seconds(tree)
        alone = streamed_gaps(served, lambda until=end + ALONE_SECONDS: time.monotonic() < until)
        busy = others_share(tree, before, time.monotonic() - end)
        long, anyway = (sum(gap > MAX_GAP_SECONDS for gap in gaps) for gaps in (beside, alone))
        measured.append(Round(*own, long, anyway, max(beside), max(alone), busy))
        print(measured[-1])
        if measured[-1].well:
            break
    assert measured[-1].well, measured


class Round(NamedTuple):
    """Delays and gaps are in seconds. others: the cores that other programs of this machine used."""

    loop_delay: float
    turn: float
    long_gaps: int
    long_gaps_alone: int
    gap: float
    gap_alone: float
    others: float

    @property
    def well(self) -> bool:
        fair = self.gap <= MAX_SHARED_GAP_SECONDS or self.others > MAX_OTHERS
        return fair and max(self.loop_delay, self.turn) <= MAX_GAP_SECONDS
