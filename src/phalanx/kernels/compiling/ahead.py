# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled many at a time, before they are launched: `ahead`.

Triton compiles a kernel at its first call, and the caller waits. Here a program runs its calls once without launching a kernel, and
the variants that they need are recorded. Then copies of this process (fork) each compile some of them into Triton's cache on disk,
and have the C compiler build the functions that launch them: Triton does that at a kernel's first launch, 0.3 s for each signature.
Threads would not help: half of a compilation holds Python's interpreter lock.

A copy has no other thread and may not touch the GPU: it compiles, reports each kernel, and ends. Copies only save time: this
process compiles what they leave undone."""

from __future__ import annotations

import ctypes
import gc
import hashlib
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
from phalanx.kernels.compiling.record import all_in_cache, cache_folder
from phalanx.log import get_logger

_log = get_logger(__name__)
_UNWRITTEN = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
_PATIENCE = 60.0
"""Seconds without a compiled kernel after which the copies are killed: one takes a second or two."""

Work = Callable[[], Any]
Listener = Callable[..., None]


@contextmanager
def launches_left_out(called: Callable[[Any], None] = lambda _: None) -> Iterator[None]:
    """Inside, kernels are compiled at their calls and not launched (Triton's own warm-up mode). called: gets each before."""
    from triton.runtime.jit import JITFunction

    kind: Any = JITFunction
    plain = kind.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        called(self)
        return plain(self, *args, **(kwargs | {"warmup": True}))

    kind.run = compile_only
    try:
        yield
    finally:
        kind.run = plain


def can_compile_ahead() -> bool:
    """Whether this Triton can defer compilation (from 3.5 on), and this system can fork processes."""
    if not has_triton() or sys.platform != "linux":
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


@contextmanager
def ahead() -> Iterator[Ahead]:
    """Inside, kernels that this thread calls are recorded, and neither compiled nor launched: tensors created inside hold zeros
    where a kernel would have written. Requires `can_compile_ahead`. A kernel that is not compiled inside, since it failed or was
    not reached, is compiled at its first launch."""
    import triton
    from triton import knobs

    kernels = Ahead(knobs.compilation.listener)
    knobs.compilation.listener = kernels.hear
    try:
        with triton.AsyncCompileMode(kernels.pending, ignore_errors=True), launches_left_out(kernels.pending.call), _Zeros():
            try:
                yield kernels
            finally:
                kernels.pending.forget()
    finally:
        knobs.compilation.listener = kernels.plain


class Ahead:
    """Kernels that were called. pending: those not compiled yet. compiled: how many were not in the cache. plain: Triton's listener
    before, which is told of each."""

    def __init__(self, plain: Listener | None) -> None:
        self.pending, self.compiled, self.plain = _Pending(), 0, plain

    def hear(self, *, cache_hit: bool, **facts: Any) -> None:
        self.compiled += not cache_hit
        if self.plain is not None:
            self.plain(cache_hit=cache_hit, **facts)

    def folders(self) -> list[str] | None:
        """For each kernel called until now, the folder in Triton's cache directory where it belongs; None where this Triton does
        not say under which keys it caches kernels."""
        keys = [getattr(future, "_key", None) for _, future in self.pending.works]
        return None if None in keys else [cache_folder(str(key)) for key in keys]

    def all_cached(self) -> bool:
        """Whether all kernels called until now are in Triton's cache, as far as this Triton says where. Compiles nothing."""
        folders = self.folders()
        return folders is not None and all_in_cache(folders)

    def load(self) -> None:
        """Load all kernels called until now from Triton's cache. What is not there is compiled by this process."""
        while self.pending.works:
            self.pending.do_next()

    def keys(self) -> list[int]:
        """A number below 2**56 for each kernel called until now: the same in every process that calls it, where this Triton says
        under which key it caches a kernel; else a number of this process alone."""
        named = [getattr(future, "_key", f"{os.getpid()} {id(future)}") for _, future in self.pending.works]
        return [int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little") for key in named]

    def compile(
        self, processes: int, tell: Callable[[int, int], None], own: Sequence[bool] | None = None,
        others: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        """Compile all kernels called until now, in at most so many copies of this process. tell: is called with (done, total)
        kernels.

        own: which of them this process compiles, where others that share Triton's cache compile the rest; all of them if None.
        others: returns once those have done so. What cannot be found then is compiled here, too."""
        pairs = list(zip(self.pending.works, [True] * len(self.pending.works) if own is None else own, strict=True))
        these, of_others = [work for work, is_own in pairs if is_own], [work for work, is_own in pairs if not is_own]
        self._by_copies(these, processes, tell)
        others()
        self.pending.works = [*of_others, *these]
        if of_others and not self.all_cached():
            self._by_copies(self.pending.works, processes, tell)
        self.load()

    def _by_copies(self, pending: Sequence[tuple[Work, Future[Any]]], processes: int, tell: Callable[[int, int], None]) -> None:
        long_first = sorted(pending, key=lambda each: not getattr(each[1], "long", False))
        works = [work for work, _ in long_first]
        if not works:
            return
        tell(0, len(works))
        for done, microseconds in enumerate(_by_copies(works, min(processes, len(works))), start=1):
            tell(done, len(works))
            if microseconds:
                self.hear(cache_hit=False, times=SimpleNamespace(total=microseconds))


class _Compiled(Future[Any]):
    """long: it takes several times as long as most kernels."""

    long = False


class _Pending(Executor):
    """Work that is deferred until `do_next` or `forget`."""

    def __init__(self) -> None:
        self.works: list[tuple[Work, Future[Any]]] = []
        self._long = False

    def call(self, kernel: Any) -> None:
        """A kernel is called, which may submit its compilation."""
        self._long = kernel.is_gluon()  # written out down to registers: much code

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Compiled()
        future.long = self._long
        self.works.append((partial(fn, *args, **kwargs), future))
        return future

    def do_next(self) -> None:
        work, future = self.works[0]  # stays first until it is done: an interrupt leaves it to `forget`
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
    Ends when all copies have ended, or have reported nothing for _PATIENCE seconds."""
    gc.collect()  # here and not in a copy, where a destructor might use the GPU
    reading, writing = os.pipe()
    queue, copies = -1, list[int]()
    try:
        try:
            queue = _queue(len(works))
        except OSError as error:
            _log.warning("kernels are compiled by this process alone: %s", error)
            return
        for _ in range(count):
            try:
                copies.append(_copy(works, queue, writing))
            except OSError as error:  # no resources for another process
                _log.warning("kernels are compiled by %d processes, not %d: %s", len(copies), count, error)
                break
        os.close(writing)
        writing, left = -1, b""
        news = select.poll()  # select.select takes no descriptor from 1024 on
        news.register(reading, select.POLLIN)
        while news.poll(_PATIENCE * 1000):
            received = os.read(reading, 4096)
            if not received:
                codes, copies = [_end_of(copy) for copy in copies], []
                if any(codes):
                    _log.warning("processes that compile kernels ended with %s: this process compiles what they left", codes)
                return
            *lines, left = (left + received).split(b"\n")
            yield from map(int, lines)
        _log.warning("processes that compile kernels have reported nothing for %.0f s: this process compiles them", _PATIENCE)
    finally:
        for each in (queue, reading, writing):
            if each >= 0:
                os.close(each)
        for copy in copies:
            with suppress(ProcessLookupError):
                os.kill(copy, signal.SIGKILL)
            _end_of(copy)


def _end_of(copy: int) -> int:
    """Wait for it and return its exit status, or minus the signal that ended it; 0 where SIGCHLD is ignored, as a parent of this
    process may have set it, since the status is lost then."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    except ChildProcessError:
        return 0


def _queue(works: int) -> int:
    """A file descriptor from which each read of `_NUMBER` bytes takes the number of the next work, whichever copy reads; nothing at
    the end. Works take 0.1 to 5 s, and none may wait behind a long one while another copy has nothing to do."""
    file = os.memfd_create("kernels")
    try:
        os.write(file, b"".join(number.to_bytes(_NUMBER, "little") for number in range(works)))
        # Copies share the position of this file, which Linux moves on with the read; in one step where it was opened by its path.
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    finally:
        os.close(file)


_NUMBER = 4
"""Bytes."""


def _copy(works: Sequence[Work], queue: int, writing: int) -> int:
    """Start a copy of this process that does the works that it takes from the queue and writes a line for each. Returns its process
    id."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about a fork beside other threads: see `_work`
        copy = os.fork()
    if not copy:
        _work(works, queue, writing, parent)
    return copy


def _work(works: Sequence[Work], queue: int, writing: int, parent: int) -> None:
    """The copy's work; the copy ends here. Other threads are gone, with the locks that they held: nothing may be called that waits
    for them, such as the GPU's driver, a message queue, or Python's shutdown."""
    try:
        gc.disable()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the parent
        if os.getppid() != parent:
            return  # the parent has ended before
        from triton import knobs

        def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
            os.write(writing, b"%d\n" % (0 if cache_hit else max(times.total, 1)))

        knobs.compilation.listener = listen
        while number := os.read(queue, _NUMBER):
            with suppress(Exception):  # the parent then compiles the kernel and reports the error
                _build_launcher(works[int.from_bytes(number, "little")]())
    finally:
        os._exit(0)


def _build_launcher(kernel: Any) -> None:
    """As the kernel's first launch will, which then finds the function in Triton's cache. Uses no GPU."""
    from triton.runtime import driver

    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None:
        launcher(kernel.src, kernel.metadata)


class _Zeros(TorchFunctionMode):
    """New memory holds zeros, as it may be read as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNWRITTEN:
            result.zero_()
        return result
