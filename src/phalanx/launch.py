# SPDX-License-Identifier: Apache-2.0
"""Start the processes of one engine, watch them, and end them. No child outlives its parent, however the parent ends.

A child executes a module (`python -m`), so it works from a script that has no `__main__` guard. Its standard input is the death
pipe: the parent writes one line of config and keeps the pipe open for as long as it lives. Three things end an orphan:

- the kernel: the child asks for SIGKILL on its end of the pipe, which arrives when the last writer is gone, even while the
  child's main thread sits in C code with the interpreter lock held. PR_SET_PDEATHSIG would do the same for the parent *thread*: an
  engine started from a worker thread would die with that thread;
- the watcher thread, where the kernel has no such signal (anything but Linux): it reads the pipe to its end and exits at once;
- its own children follow, because their pipes end with it.

Children are leaders of their own sessions: Ctrl-C reaches the first process only, which then ends them in order.
This module does not import torch: the front and the engine start processes without waiting for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from phalanx import log
from phalanx.errors import EngineError

_STDERR = 2
_MAX_CONFIG_BYTES = 16 << 20
_DEFAULTS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Of every child, unless the user sets the variable: GPUs have the numbers of NVML and `nvidia-smi`."""
_AUTOGROUP_SECONDS = 0.5
"""The kernel takes one such value in 0.1 s of a user who is not root."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Options of malloc, as malloc.h numbers them."""


def set_allocator(options: Mapping[int, int]) -> None:
    """Set options of this process's malloc. Does nothing where the allocator is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For the imports of a process. What is imported lives as long as the process: no collection of garbage looks at it, neither
    now, where that would take a sixth of the time, nor later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@dataclass(eq=False)
class Child:
    """A process that this one started. `title` is its name in process lists and in errors."""

    title: str
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group, which includes the compilers that it runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


@dataclass(frozen=True)
class Exit:
    """How a child ended: `code` >= 0 is an exit status, < 0 minus a signal."""

    child: Child
    code: int

    @property
    def words(self) -> str:
        return exit_words(self.code)


def exit_words(code: int) -> str:
    """`code` (as in Popen.returncode) in words: "was killed by SIGKILL", "exited with status 3"."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def start(
    module: str,
    config: dict[str, Any],
    title: str,
    *,
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Execute `module` in a new process that ends with this one, and pass it `config` (JSON).

    Its standard output goes to this process's standard error, where logs are. Its environment is that of this process with the
    variables of `environment`, and with those of `defaults` that it has not. It inherits the descriptors `pass_fds`. Raises
    EngineError when the process ends before it reads its config.
    """
    line = json.dumps({"title": title, "config": config, "log": log.settings()}).encode() + b"\n"
    # A service may have been started without a standard error: its number then belongs to another file.
    output = subprocess.DEVNULL if sys.__stderr__ is None else _STDERR
    # -P: a file torch.py in the user's folder must not be imported as torch.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        bufsize=0, pass_fds=pass_fds, env={**_DEFAULTS, **(defaults or {}), **os.environ, **(environment or {})},
    )  # fmt: skip
    child = Child(title, process)
    assert process.stdin is not None
    try:
        view = memoryview(line)
        while view:
            view = view[process.stdin.write(view) or 0 :]
    except BrokenPipeError:
        code = process.wait()
        process.stdin.close()
        raise EngineError(f"process {title!r} {exit_words(code)} before it read its config") from None
    return child


def set_nice(pid: int, nice: int) -> None:
    """Give a process a nice value that also counts against processes of other sessions. Does nothing for one that has ended.

    Where Linux groups processes by session (`kernel.sched_autogroup_enabled`), a nice value counts within the session only, and the
    session has another one, which is set here if this process leads it. Its core then counts as an idle one for threads that wake
    up (SCHED_IDLE): otherwise two of them would share a core, and a process of any priority have the other. May take
    _AUTOGROUP_SECONDS.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        if os.getsid(pid) == pid:
            _set_session_nice(Path(f"/proc/{pid}/autogroup"), nice)
            if sessions_are_groups(pid):
                os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def sessions_are_groups(pid: int) -> bool:
    """Whether this process's core time is divided by session first. Where a cgroup divides it, SCHED_IDLE alone would leave the
    process 0.3 percent of a busy core."""
    try:
        enabled = Path("/proc/sys/kernel/sched_autogroup_enabled").read_text(encoding="ascii").strip() == "1"
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    of_cores = [path for _, names, path in lines if "cpu" in names.split(",") or not names]
    return enabled and set(of_cores) == {"/"} and not Path("/sys/fs/cgroup/cpu.max").exists()


def _set_session_nice(file: Path, nice: int) -> None:
    """Raises OSError where the kernel does not group processes, or takes no value in time."""
    deadline = time.monotonic() + _AUTOGROUP_SECONDS
    while True:
        try:
            descriptor = os.open(file, os.O_WRONLY)
            try:
                os.write(descriptor, b"%d" % nice)
            finally:
                os.close(descriptor)
            return
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def read_config() -> dict[str, Any]:
    """The first call of a child: read the config, set the title, and arrange to end with the parent.

    Ends the process at once (status 1) where no parent writes a config.
    """
    line = _read_line(0)
    pipe = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _kill_me_at_end_of(pipe)
    threading.Thread(target=_exit_at_end_of, args=(pipe,), name="death pipe", daemon=True).start()
    envelope = json.loads(line)
    setproctitle.setproctitle(envelope["title"])
    log.inherit(envelope["log"])
    config: dict[str, Any] = envelope["config"]
    return config


def _read_line(descriptor: int) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(descriptor, 65536)
        if not more or len(data) > _MAX_CONFIG_BYTES:
            print("phalanx: only an engine starts this module, with its config on standard input", file=sys.stderr)
            os._exit(1)
        data += more
    return data


def _kill_me_at_end_of(pipe: int) -> None:
    """Ask the kernel for SIGKILL when the pipe's last writer is gone. (The parent writes no more, so nothing else raises it.)"""
    set_signal = getattr(fcntl, "F_SETSIG", None)
    if set_signal is None or not hasattr(os, "O_ASYNC"):
        return
    with contextlib.suppress(OSError):  # a kernel without it: the watcher thread remains
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, set_signal, int(signal.SIGKILL))
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _exit_at_end_of(pipe: int) -> NoReturn:
    # Covers a parent that died before the kernel was asked: then the first read returns the end.
    while os.read(pipe, 4096):
        pass
    os._exit(1)


class Watch:
    """Reports the end of children. `fileno()` becomes readable when one has ended; `ended()` returns which.

    A thread per child waits for it: no polling, and pidfd is not needed.
    """

    def __init__(self, children: Iterable[Child] = ()) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._ended: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        for child in children:
            self.add(child)

    def add(self, child: Child) -> None:
        threading.Thread(target=self._wait, args=(child,), name=f"watch {child.title}", daemon=True).start()

    def _wait(self, child: Child) -> None:
        code = child.process.wait()
        self._ended.put(Exit(child, code))
        with contextlib.suppress(OSError):  # closed
            os.write(self._write, b".")

    def fileno(self) -> int:
        return self._read

    def ended(self) -> list[Exit]:
        """Those that ended since the last call, in order. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        exits = []
        with contextlib.suppress(queue.Empty):
            while True:
                exits.append(self._ended.get_nowait())
        return exits

    def close(self) -> None:
        """Stop watching. The children keep running."""
        if self._read >= 0:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1


def stop(children: Iterable[Child], grace: float) -> None:
    """End the children and return when they have ended: SIGTERM, `grace` seconds, SIGKILL (at once with grace <= 0).

    A stopped process (SIGSTOP) does not handle SIGTERM; SIGKILL ends it.
    """
    children = list(children)
    if grace > 0:
        for child in children:
            child.signal(signal.SIGTERM)
        wait(children, grace)
    for child in children:
        child.signal(signal.SIGKILL)
    wait(children, 10.0)
    for child in children:
        if child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()


def wait(children: Iterable[Child], seconds: float) -> bool:
    """Wait for the end of the children, at most `seconds` in all. True when all have ended."""
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(timeout=max(deadline - time.monotonic(), 0.0))
    return not any(child.alive for child in children)
