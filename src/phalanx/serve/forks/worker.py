# SPDX-License-Identifier: Apache-2.0
"""The process of a `server.ForkServer`: `python -m phalanx.serve.forks.worker`.

It gets one end of a socket pair for each task, which a fork takes; the first one brings the setup, gets an empty answer once that
is done, and brings an empty message once the process has the priority that its forks inherit.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import resource
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from phalanx import log
from phalanx.launch import read_config
from phalanx.serve import allocator

STACK_BYTES = 4 << 20
"""Of a task: half of that of the engine's threads, which read the same grammar again."""
MAX_LEFT_BYTES = 32 << 20
"""What tasks may leave in memory: a new fork costs 10 ms of a core, which most tasks would spend on nothing."""
_SERVER_HAS_ENDED = 3


def main() -> None:
    config = read_config()
    log.configure(config["title"])
    allocator.configure()
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # the death pipe's thread is idle
    with socket.socket(fileno=config["control"]) as control:
        first = _take(control)
        if first is None:
            return
        with first:
            module, _, function = config["make_task"].partition(":")
            task = getattr(importlib.import_module(module), function)(first.recv_bytes())
            gc.collect()
            gc.freeze()  # a fork writes to no object that it only looks at
            first.send_bytes(b"")
            first.recv_bytes()
        running = 0
        while True:
            while running < config["at_once"]:  # they wait for a task each, so that none waits for a fork
                if os.fork() == 0:
                    _run(control, task, config["seconds"], config["memory"])
                running += 1
            _, status = os.wait()
            running -= 1
            if os.waitstatus_to_exitcode(status) == _SERVER_HAS_ENDED:
                return


def _take(control: socket.socket) -> Connection | None:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return Connection(descriptors[0]) if message else None


def _run(control: socket.socket, task: Callable[[Connection], None], seconds: int, memory: int) -> None:
    """Do tasks until one leaves memory behind; then end this process."""
    code = 0
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        threading.stack_size(STACK_BYTES)
        begin = _data_bytes()
        _limit(resource.RLIMIT_DATA, begin + memory)
        while _data_bytes() <= begin + MAX_LEFT_BYTES:
            connection = _take(control)
            if connection is None:
                os._exit(_SERVER_HAS_ENDED)
            _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
            with connection:
                thread = threading.Thread(target=task, args=(connection,))
                thread.start()
                thread.join()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _data_bytes() -> int:
    """Memory of this process that it may write to."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()


def _limit(what: int, amount: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


if __name__ == "__main__":
    main()
