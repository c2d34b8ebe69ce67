# SPDX-License-Identifier: Apache-2.0
"""The processes of large bodies end with their server, whatever they are doing. What they answer: test_app_worst_bodies.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import psutil
import pytest

from phalanx.errors import EngineClosed, EngineError
from phalanx.serve.fake_client import fake_facts
from phalanx.serve.openai.large_bodies import messages, processes
from phalanx.serve.openai.large_bodies.messages import Stored
from phalanx.serve.openai.large_bodies.processes import LargeBodies, setup_of
from phalanx.serve.openai.prompt_context import PromptContextCopy
from phalanx.serve.output_parsing import OutputFormat
from tests.support.serve_http_app import MODEL, tokenizer_of
from tests.support.serve_processes import session_nice


def large_bodies() -> LargeBodies:
    tokenizer = tokenizer_of()
    engine = PromptContextCopy(fake_facts(vocab_size=tokenizer.vocab_size), tokenizer, OutputFormat.detect(tokenizer), False)
    return LargeBodies(lambda: setup_of(engine, [MODEL]), refused=lambda _: None, accepted=lambda _: None)


def children() -> list[psutil.Process]:
    """By the module, until they have a title."""
    readers = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            line = " ".join(each.cmdline())
            if "large_bodies" in line or "large bodies" in line:
                readers.append(each)
    return readers


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("large bodies") and thread.is_alive()]


def test_a_close_ends_a_process_that_reads() -> None:
    """Stopped, as if its body took long. The thread that waits for it ends, too: the interpreter's exit waits for threads."""

    async def run() -> None:
        bodies = large_bodies()
        await bodies.warm_up(1)
        [child] = children()
        nice = os.getpriority(os.PRIO_PROCESS, 0) + processes.NICE
        assert child.nice() == nice
        assert session_nice(child.pid) in (None, nice), "it has its full weight beside the server"
        os.kill(child.pid, signal.SIGSTOP)
        body = json.dumps({"model": MODEL, "prompt": "a rank"}).encode()
        reading = asyncio.create_task(bodies.completion([body]))
        while not bodies._busy:
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        bodies.close()
        with pytest.raises(EngineError, match="the process that reads large requests failed on this one"):
            await reading
        assert time.monotonic() - begin < 10
        assert children() == []
        while waiting_threads():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_thread_that_asks_a_loop_that_has_ended_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a loop runs nothing that it is given."""

    def never(coroutine: Any, loop: object) -> Future[Stored]:
        coroutine.close()
        return Future()

    def read(process: object, route: str, body: bytes, ask: processes.StoredLookup) -> Stored:
        return ask(messages.WantedItem("msg_1"))

    async def run() -> None:
        bodies = large_bodies()
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", never)
        monkeypatch.setattr(processes._ReaderProcess, "read", read)
        reading = asyncio.create_task(bodies.response([b"{}"], lambda _: Stored([])))
        while not bodies._busy:
            await asyncio.sleep(0.01)
        bodies.close()
        with pytest.raises(EngineClosed):
            await reading
        assert children() == []

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_process_that_ends_before_it_is_told_its_engine_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unclosed socket is a ResourceWarning, and an error in these tests."""

    def broken(connection: object, data: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(messages, "send", broken)
    with pytest.raises(BrokenPipeError):
        processes._ReaderProcess(b"")
    assert children() == []
