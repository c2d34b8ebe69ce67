# SPDX-License-Identifier: Apache-2.0
"""After bodies at the size limit the server is about as large as before, and so is the process whose forks read them."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest

from phalanx.serve import allocator
from phalanx.serve.openai.body import LARGE_BYTES
from tests.support.serve_processes import Served, fake_server, until
from tests.support.serve_worst_bodies import BODIES, TEMPLATE, plain, post

HOSTILE = (
    "token ids", "lists of token ids", "texts of prompts", "one text", "one escaped text",
    "one text of a message", "tools", "stops", "parts of messages", "template texts", "schema of objects", "unknown fields",
    "arguments of lists", "wrong tokens", "lists",
)  # fmt: skip
MAX_GROWTH = 24 << 20
"""Bytes. One body at the size limit takes more while it is parsed."""
GOES_BACK_SECONDS = 60.0
"""Beside other programs it took 1 to 15 s."""


def send(served: Served, name: str) -> None:
    path, body = BODIES[name]()
    with post(served, path, body) as connection:
        connection.recv(65536)


def test_memory_goes_back_after_hostile_bodies(tmp_path, tiny_model):
    with fake_server(tmp_path, tiny_model, chat_template=TEMPLATE) as served:
        server = psutil.Process(served.wait_ready().process.pid)

        def memory() -> int:
            return int(server.memory_info().rss)

        def readers() -> list[int]:
            """Of the process whose forks read large bodies."""
            children = server.children()
            return [child.memory_info().rss for child in children if child.cmdline()[0].strip() == "phalanx large bodies"]

        with post(served, "/v1/completions", plain()) as connection:
            connection.recv(65536)
        with post(served, "/v1/completions", plain(prompt="x" * 2 * LARGE_BYTES)) as connection:
            connection.recv(65536)  # the first body starts the process of the others
        level, most = memory(), 0
        (reader_level,) = readers()
        for _ in range(2):
            with ThreadPoolExecutor(5) as pool:
                for _ in pool.map(lambda name: send(served, name), HOSTILE):
                    most = max(most, memory())
        until(lambda: memory() < level + MAX_GROWTH, GOES_BACK_SECONDS, every=0.2)
        until(lambda: max(readers()) < reader_level + MAX_GROWTH, GOES_BACK_SECONDS, every=0.2)
        print(f"MEMORY before {level >> 20} MiB, most {most >> 20} MiB, after {memory() >> 20} MiB")
        print(f"READERS before {reader_level >> 20} MiB, after {[size >> 20 for size in readers()]} MiB")


def test_what_is_freed_late_goes_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is trimmed while it still frees shrinks in steps, of which the last ones are small, and then lets go of the
    rest: no growth says that another time is worth it."""
    used = {3: 200, 4: 155, 9: 105}  # MiB from these checks on
    checks, trims, rss = [0], [], [100]

    def trim(_: int) -> int:
        trims.append(checks[0])
        rss[0] = next(mib for check, mib in reversed(used.items()) if check <= checks[0])
        return 1

    async def one_check(_: float) -> None:
        checks[0] += 1
        if checks[0] == 3:
            rss[0] = 300
        if checks[0] > 100:
            raise asyncio.CancelledError

    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=rss[0] << 20))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trim))
    monkeypatch.setattr(allocator.psutil, "Process", lambda: process)
    # Not in asyncio itself, where a loop of another thread would find it.
    monkeypatch.setattr(allocator, "asyncio", SimpleNamespace(sleep=one_check, to_thread=asyncio.to_thread))
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(allocator.trim_when_idle(lambda: True))
    assert rss[0] == 105
    assert trims[:2] == [3, 4]
    assert len(trims) <= 1 + allocator._TIMES  # an idle server is left alone
