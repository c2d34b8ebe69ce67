# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled many at a time, before they are launched: `ahead`.

Triton compiles a kernel when it is first called, and the caller waits. Here a program goes through its calls once, where none of
Triton's kernels is launched and what they ask for is noted. Then copies of this process (fork) each compile a part of it, and leave
it in Triton's cache on disk. Threads would not do: half of a compilation holds Python's lock.

A copy has no other thread and may not touch the GPU: it compiles, says so, and ends. It only saves time: what it does not get done,
this process does.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.kernels.capabilities import has_triton
from phalanx.log import get_logger

_log = get_logger(__name__)
_UNWRITTEN = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_PATIENCE = 60.0
"""Seconds without a kernel after which the copies are given up: one takes a second or two."""

Work = Callable[[], Any]
Listener = Callable[..., None]


@contextmanager
def launches_left_out() -> Iterator[None]:
    """Inside, every kernel stops after it is compiled (Triton's own warm-up mode)."""
    from triton.runtime.jit import JITFunction

    kind: Any = JITFunction
    plain = kind.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **(kwargs | {"warmup": True}))

    kind.run = compile_only
    try:
        yield
    finally:
        kind.run = plain


def can_compile_ahead() -> bool:
    """Whether this Triton can be asked to compile later (from 3.5 on), and this system copies processes."""
    if not has_triton() or sys.platform != "linux":
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


@contextmanager
def ahead() -> Iterator[Ahead]:
    """Inside, kernels that this thread calls are noted, and neither compiled nor launched: what they would write is zeros, where it
    is memory made inside. For where `can_compile_ahead`. What is not compiled inside, as it failed or nobody saw to it, is left to
    its first launch."""
    import triton
    from triton import knobs

    kernels = Ahead(knobs.compilation.listener)
    knobs.compilation.listener = kernels.hear
    try:
        with triton.AsyncCompileMode(kernels.noted, ignore_errors=True), launches_left_out(), _Zeros():
            try:
                yield kernels
            finally:
                kernels.noted.forget()
    finally:
        knobs.compilation.listener = kernels.plain


class Ahead:
    """Kernels that were asked for. noted: those that nobody has seen to. compiled: how many had to be. plain: is told of each, as
    Triton's listener."""

    def __init__(self, plain: Listener | None) -> None:
        self.noted, self.compiled, self.plain = _Noted(), 0, plain

    def hear(self, *, cache_hit: bool, **facts: Any) -> None:
        self.compiled += not cache_hit
        if self.plain is not None:
            self.plain(cache_hit=cache_hit, **facts)

    def all_kept(self) -> bool:
        """Whether what was asked for until now lies in Triton's cache; up to the first that does not, which is compiled."""
        before = self.compiled
        while self.noted.works and self.compiled == before:
            self.noted.do_next()
        return self.compiled == before

    def compile(self, processes: int, tell: Callable[[int, int], None]) -> None:
        """All that was asked for until now, in so many copies of this process at most. tell: is told (done, total) kernels."""
        # The first last: where `all_kept` finds those, no start was killed in the midst of this.
        works = [work for work, _ in reversed(self.noted.works)]
        if works:
            tell(0, len(works))
            for done, microseconds in enumerate(_by_copies(works, min(processes, len(works))), start=1):
                tell(done, len(works))
                if microseconds:
                    self.hear(cache_hit=False, times=SimpleNamespace(total=microseconds))
        while self.noted.works:
            self.noted.do_next()


class _Noted(Executor):
    """Work that waits until somebody does it, or says that nobody will."""

    def __init__(self) -> None:
        self.works: list[tuple[Work, Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.works.append((partial(fn, *args, **kwargs), future))
        return future

    def do_next(self) -> None:
        work, future = self.works[0]  # until it is done: what interrupts it leaves it to `forget`
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        del self.works[0]

    def forget(self) -> None:
        for _, future in self.works:
            future.set_exception(CancelledError())
        self.works.clear()


def _by_copies(works: Sequence[Work], count: int) -> Iterator[int]:
    """For each work that a copy of this process has done: the microseconds of a compilation, 0 for a kernel found in the cache.
    Ends when all copies have ended, or say nothing for long."""
    gc.collect()  # rather here than in a copy, where what is collected might want the GPU
    reading, writing = os.pipe()
    copies = []
    try:
        for first in range(count):
            try:
                copies.append(_copy(works[first::count], writing))
            except OSError as error:  # no room for another
                _log.warning("kernels are compiled by %d processes, not %d: %s", len(copies), count, error)
                break
        os.close(writing)
        writing, left = -1, b""
        news = select.poll()  # not select.select, which takes no descriptor from 1024 on
        news.register(reading, select.POLLIN)
        while news.poll(_PATIENCE * 1000):
            received = os.read(reading, 4096)
            if not received:
                codes, copies = [_end_of(copy) for copy in copies], []
                if any(codes):
                    _log.warning("processes that compile kernels ended with %s: this one does what they left", codes)
                return
            *lines, left = (left + received).split(b"\n")
            yield from map(int, lines)
        _log.warning("processes that compile kernels have said nothing for %.0f s: this one does it", _PATIENCE)
    finally:
        for each in (reading, writing):
            if each >= 0:
                os.close(each)
        for copy in copies:
            with suppress(ProcessLookupError):
                os.kill(copy, signal.SIGKILL)
            _end_of(copy)


def _end_of(copy: int) -> int:
    """Wait for it: its exit status, or minus the signal that ended it. Where SIGCHLD is ignored, as a parent of this process may
    have asked, it is waited for all the same, but nobody knows."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    except ChildProcessError:
        return 0


def _copy(works: Sequence[Work], writing: int) -> int:
    """Start a copy of this process that does these works, and writes a line for each; its process id."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork beside other threads: see `_work`
        copy = os.fork()
    if not copy:
        _work(works, writing, parent)
    return copy


def _work(works: Sequence[Work], writing: int, parent: int) -> None:
    """In a copy, which ends here. Other threads are gone, with whatever they held: nothing may be called that waits for them, such
    as the GPU's driver, a message queue, or what Python does at its end."""
    try:
        gc.disable()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the one that waits
        if os.getppid() != parent:
            return  # which has ended before that was asked
        from triton import knobs

        def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
            os.write(writing, b"%d\n" % (0 if cache_hit else max(times.total, 1)))

        knobs.compilation.listener = heard
        for work in works:
            with suppress(Exception):  # whose kernel is then compiled by the one that waits, where the error counts
                work()
    finally:
        os._exit(0)


class _Zeros(TorchFunctionMode):
    """New memory holds zeros: what reads it may take it for an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNWRITTEN:
            result.zero_()
        return result
