# SPDX-License-Identifier: Apache-2.0
"""`ForkServer`: work that may take seconds or gigabytes, or overflow a stack, runs in forks of a process (`worker`).

The process imports what the work needs, once. A few forks of it wait ahead for tasks. The kernel limits the time of a task and the
memory of a fork, which another one replaces once tasks have left memory behind: a hostile task costs itself only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from phalanx import launch
from phalanx.errors import EngineClosed, EngineError
from phalanx.log import get_logger

logger = get_logger(__name__)

_SILENT_SECONDS = 120
"""A start, or a fork between two messages, may take so long on a busy machine."""


class ForkServer:
    """The process, which starts when it is first needed. Several threads may use it at once.

    title: its name in process lists. make_task: "module:function"; the function gets `setup()` in the process, and returns what
    each fork calls with its end of a connection. at_once: forks. nice: how much lower their priority is than this process's.
    seconds, memory: limits of one fork, in seconds of CPU time and bytes. closed: by `close`.
    """

    def __init__(
        self, title: str, make_task: str, *, at_once: int, nice: int, seconds: int, memory: int,
        setup: Callable[[], bytes] = bytes,
    ) -> None:  # fmt: skip
        self._title = title
        self._config = {"title": title, "make_task": make_task, "at_once": at_once, "seconds": seconds, "memory": memory}
        self._nice, self._setup = nice, setup
        self._lock = threading.Lock()
        self._child: launch.Child | None = None
        self._control: socket.socket | None = None
        self.closed = False

    def start(self) -> None:
        """Start the process, unless it runs. Raises EngineError if it does not start, EngineClosed after `close`."""
        with self._lock:
            if self._child is None or not self._child.alive:
                self._start()

    @contextlib.contextmanager
    def task(self) -> Iterator[Connection]:
        """A connection to a fork that waits for a task. It raises OSError or EOFError once the fork has ended, or is silent."""
        self.start()
        with self._connection() as connection:
            yield connection

    def close(self) -> None:
        """End the process and its forks, at once: threads that wait for one get an error."""
        self.closed = True
        if self._child is not None and self._control is not None:
            _end(self._child, self._control)

    def _connection(self) -> Connection:
        own, other = socket.socketpair()
        with own, other:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                own.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _SILENT_SECONDS, 0))
            assert self._control is not None
            socket.send_fds(self._control, [b"."], [other.fileno()])
            return Connection(own.detach())

    def _start(self) -> None:
        if self.closed:
            raise EngineClosed("the server was shut down")
        if self._control is not None:
            self._control.close()
        began, setup = time.monotonic(), self._setup()
        self._control, other = socket.socketpair()
        with other:
            end = other.fileno()
            child = launch.start(
                "phalanx.serve.forks.worker", {**self._config, "control": end}, f"phalanx {self._title}", pass_fds=[end],
                defaults={"TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
        self._child = child
        weakref.finalize(self, _end, child, self._control)
        try:
            with self._connection() as connection:
                connection.send_bytes(setup)
                connection.recv_bytes()
                # Not before: on a busy machine, what takes a second of a core would take minutes at this priority.
                launch.set_nice(child.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + self._nice))
                connection.send_bytes(b"")
        except BaseException as error:
            launch.stop([child], 0.0)
            if self.closed:
                raise EngineClosed("the server was shut down") from None
            if isinstance(error, (OSError, EOFError)):
                raise EngineError(f"the process for {self._title} does not start", next="see its log above") from None
            raise
        logger.info("the process for %s is ready, %.1f s after its start", self._title, time.monotonic() - began)


def _end(child: launch.Child, control: socket.socket) -> None:
    launch.stop([child], 0.0)
    control.close()
