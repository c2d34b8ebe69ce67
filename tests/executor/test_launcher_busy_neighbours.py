# SPDX-License-Identifier: Apache-2.0
"""A rank of two threads on a CPU that other programs use: its threads sleep while they wait for each other.

Time by the clock says little where others compute. What the threads of the rank do is counted by the kernel for each of them: one
that spins takes as long as the thread it waits for, on an idle machine, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.executor.rank_executor import RankExecutor
from phalanx.hardware.probe import cores
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import Drive, options, prompts

THREADS, TOKENS = 2, 16
SPINNING = 0.4
"""Of the time of the main thread. The other one takes 0.02 to 0.08 of it where it sleeps, and 0.4 to 1 where it spins."""
SCHEDSTAT = Path("/proc/self/task")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are large enough for two threads."""
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", hidden_size=256, intermediate_size=512, num_attention_heads=8,
        num_key_value_heads=8, std=0.05,
    )  # fmt: skip


@pytest.fixture
def neighbours() -> Iterator[None]:
    """A program on each of two cores that never waits."""
    busy = [sys.executable, "-c", "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: pass"]
    programs = [subprocess.Popen(busy) for _ in range(THREADS)]
    yield
    for program in programs:
        program.kill()
        program.wait()


def seconds_of(pid: int) -> dict[int, float]:
    """The time on a core of each thread of a process."""
    return {
        int(task.name): int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


@pytest.mark.parametrize("spins", [False, True], ids=["by default", "as the user says"])
@pytest.mark.usefixtures("neighbours")
def test_threads_of_a_rank_sleep_while_they_wait(folder: Path, monkeypatch: pytest.MonkeyPatch, spins: bool) -> None:
    """Spinning, 16 tokens took 15 s instead of 0.9 beside two other programs. The second case shows that the measure tells."""
    if not (SCHEDSTAT / str(os.getpid()) / "schedstat").exists() or cores() < THREADS:
        pytest.skip("not run: needs two cores, and Linux's times of threads")
    monkeypatch.setattr("phalanx.executor.launcher.free_cores", lambda: THREADS)  # the neighbours came later
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if spins:
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    executor = RankExecutor(options(folder, kv_cache_bytes=1 << 26))
    try:
        executor.start()
        [handle] = executor._handles.values()
        pid = handle.pid  # type: ignore[attr-defined]
        drive = Drive(executor.submit, executor.collect)
        drive.generate(prompts(1, seed=1), TOKENS)
        before = seconds_of(pid)
        for seed in range(2, 5):
            drive.generate(prompts(1, seed=seed), TOKENS)
        spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in seconds_of(pid).items()}
    finally:
        executor.shutdown()
    main = spent.pop(pid)
    assert (max(spent.values()) > SPINNING * main) == spins, (main, spent)
