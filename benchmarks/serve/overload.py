# SPDX-License-Identifier: Apache-2.0
"""Overload: ten times the capacity for a minute. Expected: only 200 and 429, constant memory, and the throughput of the capacity.

Serves the demo model on CPU. A closed loop with as many clients as the batch has places measures the capacity. Then an open loop
sends ten times as many requests per second. A second one has a SIGTERM in the middle: every accepted request gets its complete
response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks import harness
from benchmarks.serve import started

TIMES = 10
MARGIN = 0.10
FLAT_BYTES = 32 * 2**20
GONE = 0
"""Stands for the status of a request when there is no server any more."""


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes


class Client:
    """A minimal HTTP/1.1 client with keep-alive. Client and server share the few cores of the machine, so the cost of a complete
    client would reduce the throughput. The number of connections has no limit: a queue here would hide the overload."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @classmethod
    def of(cls, url: str) -> Client:
        parts = urlsplit(url)
        return cls(parts.hostname or "localhost", parts.port or 80)

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Raises OSError or EOFError if there is no server, or it closes the connection."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._place[0]}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._place)
        try:
            writer.write(head.encode() + data)
            top = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in top.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            answer = Answer(int(top[9:12]), top, await reader.readexactly(length))
        except BaseException:
            writer.close()
            raise
        if b"connection: close" in top.lower():
            writer.close()
        else:
            self._idle.append((reader, writer))
        return answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


@dataclass
class Load:
    """The results of a load. statuses: number of responses by status. rate: complete responses per second during the load."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    completed_in_time: int = 0
    broken: list[str] = field(default_factory=list)  # accepted, but without a complete response
    without_retry_after: int = 0

    @property
    def rate(self) -> float:
        return self.completed_in_time / self.seconds

    def take(self, answer: Answer, tokens: int, *, in_time: bool) -> None:
        self.statuses[answer.status] += 1
        if answer.status == 200:
            tokens_received = json.loads(answer.body)["usage"]["completion_tokens"]
            if tokens_received == tokens:
                self.completed_in_time += in_time
            else:
                self.broken.append(f"{tokens_received} tokens of {tokens}")
        elif answer.status in (429, 503) and b"retry-after:" not in answer.head.lower():
            self.without_retry_after += 1


async def closed_loop(client: Client, body: dict[str, Any], *, clients: int, seconds: float) -> Load:
    """A number of clients; each sends its next request as soon as it has its response."""
    load = Load()
    begin = time.monotonic()

    async def one() -> None:
        while time.monotonic() - begin < seconds:
            answer = await client.post("/v1/completions", body)
            load.take(answer, body["max_tokens"], in_time=time.monotonic() - begin <= seconds)

    await asyncio.gather(*(one() for _ in range(clients)))
    load.seconds = seconds
    return load


async def open_loop(
    client: Client,
    body: dict[str, Any],
    *,
    rate: float,
    seconds: float,
    halfway: Callable[[], None] | None = None,
) -> Load:
    """`rate` requests per second, whatever the responses. halfway: called in the middle; later requests may find no server."""
    load = Load()
    begin = time.monotonic()
    called = False

    async def one() -> None:
        late = called
        try:
            answer = await client.post("/v1/completions", body)
        except (OSError, EOFError) as error:
            if late:
                load.statuses[GONE] += 1
            else:
                load.broken.append(repr(error))
            return
        load.take(answer, body["max_tokens"], in_time=time.monotonic() - begin <= seconds)

    tasks: list[asyncio.Task[None]] = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
        if halfway is not None and not called and time.monotonic() - begin >= seconds / 2:
            halfway()
            await asyncio.sleep(0.2)  # by then, the server has everything that was sent before
            called = True
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    load.seconds = seconds
    return load


def resident(process: psutil.Process) -> int:
    """Resident bytes of the server and its children together."""
    return sum(int(one.memory_info().rss) for one in (process, *process.children(recursive=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per rank; rejections need a core that no rank computes on")
    arguments = parser.parse_args()
    command = [
        sys.executable, "-m", "phalanx", "serve", "demo", "--tp_size", str(arguments.tp_size), "--device", "cpu",
        "--max_batch_size", str(arguments.batch), "--max_num_queued_reqs", str(arguments.batch),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    with started.server(lambda port: [*command, "--port", str(port)], env=env) as (server, url):
        return asyncio.run(_run(arguments, int(url.rpartition(":")[2]), server))


async def _run(arguments: argparse.Namespace, port: int, server: subprocess.Popen[bytes]) -> int:
    body = {"model": "demo", "prompt": "What is a rank?", "max_tokens": arguments.new_tokens, "ignore_eos": True, "temperature": 0}
    process = psutil.Process(server.pid)
    client = Client("localhost", port)
    await closed_loop(client, body, clients=2, seconds=2.0)
    capacity = await closed_loop(client, body, clients=arguments.batch, seconds=arguments.seconds / 3)
    await open_loop(client, body, rate=TIMES * capacity.rate, seconds=3.0)
    before = resident(process)
    rush = await open_loop(client, body, rate=TIMES * capacity.rate, seconds=arguments.seconds)
    grown = resident(process) - before
    last = await open_loop(
        client, body, rate=TIMES * capacity.rate, seconds=10.0, halfway=lambda: server.send_signal(signal.SIGTERM)
    )
    client.close()
    status = server.wait(60)
    kept = rush.rate / capacity.rate
    print(f"capacity:   {capacity.rate:6.2f} answers/s with {arguments.batch} clients")
    print(
        f"rush:       {rush.rate:6.2f} answers/s at {TIMES * capacity.rate:.0f} requests/s for {arguments.seconds:g} s ({kept:.2f})"
    )
    print(f"statuses:   {dict(rush.statuses)}, without Retry-After {rush.without_retry_after}, broken {len(rush.broken)}")
    print(f"memory:     {grown / 2**20:+.1f} MiB over the rush")
    print(f"SIGTERM:    {dict(last.statuses)}, broken {len(last.broken)}, exit status {status}")
    good = (
        set(rush.statuses) <= {200, 429} and not rush.broken and not rush.without_retry_after and grown < FLAT_BYTES
        and kept >= 1 - MARGIN and set(last.statuses) <= {200, 429, 503, GONE} and not last.broken and status == 0
    )  # fmt: skip
    figures = {
        "asked": vars(arguments), "capacity_per_s": capacity.rate, "rush_per_s": rush.rate, "kept": kept,
        "statuses": dict(rush.statuses), "grown_bytes": grown, "sigterm": dict(last.statuses), "lost": len(last.broken),
    }  # fmt: skip
    print(f"written: {harness.write('serve_overload_cpu', figures).relative_to(harness.ROOT)}")
    print("passed" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
