# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled by copies of the process before anything is launched; what goes wrong there is left to the first launch."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from phalanx.kernels.compiling import ahead as module
from phalanx.kernels.compiling.ahead import ahead, can_compile_ahead, launches_left_out

triton = pytest.importorskip("triton")

from tests.support.comm_compiled import only  # noqa: E402 (needs triton)
from tests.support.kernels_doubling import double  # noqa: E402 (needs triton)

pytestmark = pytest.mark.usefixtures("forked_python")

if not can_compile_ahead():
    pytest.skip("this Triton cannot be asked to compile later", allow_module_level=True)

BLOCKS = (16, 32, 64, 128, 256)


class Listener:
    """Triton's listener: what was compiled and what was found, by Triton's own account."""

    def __init__(self) -> None:
        self.hits: list[bool] = []
        self.microseconds = 0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        self.hits.append(cache_hit)
        self.microseconds += 0 if cache_hit else times.total


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Triton as in a new process with an empty cache, without a GPU."""
    heard = Listener()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", heard)
    double.device_caches.clear()
    with only(90):
        yield heard
    double.device_caches.clear()


def call(block: int, *, of: int = 0) -> torch.Tensor:
    x = torch.ones(64)
    out = torch.empty_like(x)
    double[(1,)](x, out, 64, BLOCK=block, FAILS=of)
    return out


def test_copies_compile_what_was_asked_for_and_the_next_process_finds_it(heard: Listener) -> None:
    progress: list[tuple[int, int]] = []
    with ahead() as kernels:
        for block in (*BLOCKS, *BLOCKS):
            assert call(block).eq(0).all()
        assert not heard.hits  # nothing yet
        kernels.compile(3, lambda *each: progress.append(each))
        assert kernels.compiled == 5
    assert progress == [(done, 5) for done in range(6)]
    assert heard.hits.count(False) == 5  # by the copies
    assert heard.hits.count(True) == 5  # and here, where they were found
    assert heard.microseconds > 0
    assert triton.knobs.compilation.listener is heard
    for block in BLOCKS:
        call(block)
    assert len(heard.hits) == 10  # they are there
    double.device_caches.clear()
    with ahead() as kernels:
        call(16)
        assert kernels.all_cached()
    assert kernels.compiled == 0


def test_copies_build_what_launches_a_kernel(heard: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher(source: Any, metadata: Any) -> None:
        (tmp_path / f"{source.constants[3,]}.{os.getpid()}").write_text(metadata.name)
        if source.constants[3,] == 16:
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", launcher, raising=False)
    with ahead() as kernels:
        for block in BLOCKS:
            call(block)
        kernels.compile(3, lambda *_: None)
    assert kernels.compiled == 5  # one without its function is there, too: the first launch says what is wrong
    built = [path for path in tmp_path.iterdir() if path.is_file()]
    assert sorted(int(path.stem) for path in built) == sorted(BLOCKS)
    assert {path.read_text() for path in built} == {"double"}
    assert str(os.getpid()) not in {path.suffix[1:] for path in built}


def test_no_copy_waits_for_another_with_long_works(heard: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped at its first work leaves the others to the other copy."""
    fork, copies = os.fork, list[int]()

    def forked() -> int:
        copy = fork()
        if copy and not copies:
            os.kill(copy, signal.SIGSTOP)
        copies.append(copy)
        return copy

    done: list[int] = []

    def tell(number: int, total: int) -> None:
        done.append(number)
        if number >= total - 1:  # all but at most the one that the stopped copy has taken
            os.kill(copies[0], signal.SIGCONT)

    monkeypatch.setattr(os, "fork", forked)
    with ahead() as kernels:
        for block in BLOCKS:
            call(block)
        kernels.compile(2, tell)
    assert done == list(range(6))
    assert kernels.compiled == 5


def test_no_work_is_taken_by_two_copies() -> None:
    count, (reading, writing), (start, starting) = 20000, os.pipe(), os.pipe()
    queue, copies = module._queue(count), list[int]()
    for _ in range(2):
        copies.append(os.fork())
        if not copies[-1]:
            with suppress(BaseException):
                os.close(starting)
                os.read(start, 1)  # until both are there
                taken = list(iter(partial(os.read, queue, module._NUMBER), b""))
                os.write(writing, b"".join(taken))
            os._exit(0)
    for each in (queue, writing, start, starting):
        os.close(each)
    with open(reading, "rb") as pipe:
        received = pipe.read()
    for copy in copies:
        assert os.waitpid(copy, 0)[1] == 0
    numbers = [int.from_bytes(received[at : at + module._NUMBER], "little") for at in range(0, len(received), module._NUMBER)]
    assert len(numbers) == count
    assert len(set(numbers)) == count


def test_without_a_queue_this_process_compiles(
    heard: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    with ahead() as kernels:
        call(16)
        kernels.compile(2, lambda *_: None)
    assert kernels.compiled == 1
    assert "by this process alone" in caplog.text


def test_processes_that_call_the_same_kernels_share_them(heard: Listener) -> None:
    progress: list[tuple[int, int]] = []

    def other() -> None:
        """Another process with the same cache, which compiles the other part."""
        assert heard.hits == [False] * 3
        child = os.fork()
        if not child:
            with suppress(BaseException):
                for work, _ in kernels.pending.works[1::2]:
                    work()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    with ahead() as kernels:
        for block in BLOCKS:
            call(block)
        assert len(set(kernels.keys())) == 5
        kernels.compile(2, lambda *each: progress.append(each), [True, False] * 2 + [True], other)
    assert progress == [(done, 3) for done in range(4)]
    assert kernels.compiled == 3
    assert heard.hits == [False] * 3 + [True] * 5  # all are found, those of the other, too


def test_a_part_that_no_other_process_leaves_here_is_compiled_here(heard: Listener) -> None:
    """As where ranks of one host do not share a folder."""
    progress: list[tuple[int, int]] = []
    with ahead() as kernels:
        for block in BLOCKS:
            call(block)
        kernels.compile(2, lambda *each: progress.append(each), [False, True] * 2 + [False])
    assert kernels.compiled == 5
    assert progress[:3] == [(0, 2), (1, 2), (2, 2)]
    assert progress[3:]  # in copies, too, but for the kernel that showed that there were none


def test_a_kernel_has_the_same_key_wherever_it_is_called(heard: Listener) -> None:
    keys = []
    for blocks in ((16, 32), (32, 64)):
        double.device_caches.clear()
        with ahead() as kernels:
            for block in blocks:
                call(block)
            keys.append(kernels.keys())
    assert keys[0][1] == keys[1][0]
    assert len({*keys[0], *keys[1]}) == 3


def test_a_benchmark_compiles_the_calls_that_it_times(heard: Listener) -> None:
    def fail() -> None:
        raise ValueError("no such variant")

    calls = [partial(call, 16), fail, partial(call, 64), partial(call, 16)]
    assert harness.compile_ahead(calls, 2) == 2
    double.device_caches.clear()
    assert harness.compile_ahead(calls, 2) == 0  # they are in the cache on disk
    assert heard.hits.count(False) == 2


def test_to_look_for_kernels_compiles_none_and_to_load_them_compiles_those_that_are_missing(heard: Listener) -> None:
    call(BLOCKS[0])
    double.device_caches.clear()
    with ahead() as kernels:
        call(BLOCKS[0])
        assert kernels.all_cached()
        call(BLOCKS[1])
        assert not kernels.all_cached()
        assert heard.hits == [False]
        kernels.load()
        assert heard.hits == [False, True, False]
        assert kernels.compiled == 1
    for block in BLOCKS[:2]:
        call(block)
    assert len(heard.hits) == 3  # they are loaded


def test_a_kernel_has_a_folder_of_its_own(heard: Listener, tmp_path: Path) -> None:
    """The one in which Triton writes it, last of all the file that tells it that the kernel is there."""
    with ahead() as kernels:
        for block in BLOCKS[:2]:
            call(block)
        folders = kernels.folders()
        kernels.load()
    assert folders is not None
    assert sorted(folders) == sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    (tmp_path / folders[0] / "__grp__double.json").unlink()
    double.device_caches.clear()
    with ahead() as kernels:
        call(BLOCKS[1])
        assert kernels.all_cached()
        call(BLOCKS[0])
        assert not kernels.all_cached()


def test_without_keys_nothing_passes_for_cached(heard: Listener) -> None:
    call(16)
    double.device_caches.clear()
    with ahead() as kernels:
        call(16)
        assert kernels.all_cached()
        future: Any = kernels.pending.works[0][1]
        key = future.__dict__.pop("_key")
        assert kernels.folders() is None
        assert not kernels.all_cached()
        kernels.compile(2, lambda *_: None)  # found by a copy, and here
        future._key = key  # Triton itself needs it at the end
    assert kernels.compiled == 0


def test_what_fails_says_why_at_its_first_launch(heard: Listener) -> None:
    with ahead() as kernels:
        call(16, of=1)
        call(32)
        kernels.compile(2, lambda *_: None)
    assert heard.hits == [False, True]
    with pytest.raises(triton.CompilationError, match="fails when asked to"):
        call(16, of=1)


def test_copies_that_die_or_say_nothing_are_made_up_for(
    heard: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fork, copies = os.fork, list[int]()

    def forked() -> int:
        copies.append(fork())
        return copies[-1]

    monkeypatch.setattr(os, "fork", forked)
    for patience, work in ((60.0, lambda *_: os._exit(3)), (0.2, lambda *_: os.read(os.pipe()[0], 1))):
        double.device_caches.clear()
        monkeypatch.setattr(module, "_PATIENCE", patience)
        monkeypatch.setattr(module, "_work", work)
        with ahead() as kernels:
            call(16 if patience > 1 else 32)
            kernels.compile(2, lambda *_: None)
        assert kernels.compiled == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "processes that compile kernels ended with [3]: this process compiles what they left",
        "processes that compile kernels have reported nothing for 0 s: this process compiles them",
    ]
    assert len(copies) == 2
    for copy in copies:
        with pytest.raises(ChildProcessError):
            os.waitpid(copy, os.WNOHANG)  # it is gone, and was waited for


def test_children_that_nobody_may_wait_for_and_descriptors_beyond_a_thousand(
    heard: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a service whose parent ignores SIGCHLD, and in a rank of many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1100:
        pytest.skip("no process may have so many descriptors here")
    pipe = os.pipe

    def high() -> tuple[int, ...]:
        ends = pipe()
        moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1024) for end in ends)
        for end in ends:
            os.close(end)
        return moved

    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ahead() as kernels:
            call(16)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pipe", high)
                patch.setattr(module, "_copy", partial(_copied_with, pipe))
                kernels.compile(2, lambda *_: None)
    finally:
        signal.signal(signal.SIGCHLD, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert heard.hits == [False, True]
    assert not caplog.records


def _copied_with(pipe: Any, works: Any, queue: int, writing: int) -> int:
    """A copy whose compiler has the pipes that it asks for."""
    assert writing >= 1024
    os.pipe = pipe
    return plain_copy(works, queue, writing)


plain_copy = module._copy


def test_what_interrupts_a_compilation_goes_on_its_way(heard: Listener) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def inside() -> None:
        with ahead() as kernels:
            call(16)
            kernels.pending.works[0] = interrupted, kernels.pending.works[0][1]
            kernels.compile(1, lambda *_: None)

    with pytest.raises(KeyboardInterrupt):
        inside()
    call(16)
    assert heard.hits == [False]


def test_kernels_that_take_long_are_compiled_first(heard: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []

    def some(works: Any, count: int) -> Iterator[int]:
        received.extend(works)
        return iter(())

    monkeypatch.setattr(module, "_by_copies", some)
    with ahead() as kernels:
        for number, block in enumerate(BLOCKS):
            monkeypatch.setattr(double, "is_gluon", lambda number=number: number in (1, 3))
            call(block)
        calls = [work for work, _ in kernels.pending.works]
        kernels.compile(2, lambda *_: None)
    assert received == [calls[number] for number in (1, 3, 0, 2, 4)]


def test_a_process_that_cannot_be_copied_compiles_by_itself(heard: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", refused)
    with ahead() as kernels:
        call(16)
        kernels.compile(4, lambda *_: None)
    assert heard.hits == [False]
    assert kernels.compiled == 1


def test_new_memory_is_zeros_and_an_error_inside_leaves_nothing_behind(heard: Listener) -> None:
    def inside() -> None:
        with ahead():
            call(16)
            for tensor in (torch.empty(999), torch.empty_like(torch.ones(999)), torch.ones(2).new_empty(999, dtype=torch.int64)):
                assert tensor.eq(0).all()
            assert torch.empty(3, dtype=torch.float8_e4m3fn).view(torch.uint8).eq(0).all()
            assert torch.ones(3).eq(1).all()
            raise ZeroDivisionError

    run = type(double).run
    with pytest.raises(ZeroDivisionError):
        inside()
    assert type(double).run is run
    assert triton.knobs.compilation.listener is heard
    assert not heard.hits


def test_launches_are_left_out() -> None:
    calls = []

    def run(_: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> None:
        calls.append((args, grid, warmup, fixed))

    kind = triton.runtime.jit.JITFunction
    plain, kind.run = kind.run, run
    try:
        with launches_left_out():
            double[(2,)](1, BLOCK=3)
        double[(2,)](1, BLOCK=3)
    finally:
        kind.run = plain
    assert calls == [((1,), (2,), True, {"BLOCK": 3}), ((1,), (2,), False, {"BLOCK": 3})]
