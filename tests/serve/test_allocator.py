# SPDX-License-Identifier: Apache-2.0
"""After bodies at the size limit the server is about as large as before, and so are the processes that read them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil

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
            """Of the processes that read large bodies."""
            children = server.children(recursive=True)
            return [child.memory_info().rss for child in children if child.cmdline()[0].strip() == "phalanx large bodies"]

        with post(served, "/v1/completions", plain()) as connection:
            connection.recv(65536)
        with post(served, "/v1/completions", plain(prompt="x" * 2 * LARGE_BYTES)) as connection:
            connection.recv(65536)  # the first body for a process of its own
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
