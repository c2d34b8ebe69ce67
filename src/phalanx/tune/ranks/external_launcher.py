# SPDX-License-Identifier: Apache-2.0
"""A benchmark whose ranks were started by torchrun or mpirun: each process is a rank, and rank 0 keeps the journal.

The group cannot be restarted from within. A candidate that hangs is recorded as a skip and ends all ranks with status 3; the same
command then continues behind it (`torchrun --max-restarts` runs it again by itself).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from phalanx.log import get_logger
from phalanx.progress import OnProgress
from phalanx.tune.records import Benchmark
from phalanx.tune.runner import BenchmarkRun, RunState
from phalanx.tune.sweep import Task

_log = get_logger(__name__)
HUNG = 3
"""The exit status after a hang."""


@dataclass(frozen=True)
class LaunchedRank:
    """This process as the launcher numbers it. address: "host:port" where rank 0 listens; None: torchrun's own store is used."""

    rank: int
    world: int
    local_rank: int
    address: str | None


def run_benchmark(run: BenchmarkRun, launched: LaunchedRank, on_progress: OnProgress | None = None) -> Benchmark:
    """This rank's part of the benchmark. Rank 0 writes CSV and sidecar and returns what they hold; the other ranks end here."""
    import torch
    from torch.distributed.rendezvous import rendezvous

    from phalanx.comm.torch_group import connect, listen
    from phalanx.tune.ranks import candidates, setup
    from phalanx.tune.ranks.measure import Method, Rank

    timeout = run.options.start_timeout
    if launched.address is None:
        store = next(rendezvous("env://", launched.rank, launched.world))[0]
    elif launched.rank == 0:
        host, _, port = launched.address.rpartition(":")
        store = listen(host, int(port), launched.world, timeout=timeout)[0]
    else:
        store = connect(launched.address, launched.world, timeout=timeout)
    group, device = setup.join_group(launched.rank, launched.world, run.device, launched.local_rank, store, timeout)
    available = candidates.open_group(group, device, run.max_bytes)
    state = None
    if launched.rank == 0:
        state = RunState(run, available.fingerprint, setup.machine_facts(device), on_progress)
        store.set("phalanx/work", json.dumps([str(task) for task in state.remaining()]))
    tasks = [Task.parse(text) for text in json.loads(store.get("phalanx/work"))]
    rank = Rank(group, device, available, Method(**run.method))
    watchdog = _Watchdog(run.options.deadline, state)
    rank.measure_all(tasks, watchdog.begin, state.record if state is not None else lambda *_: None)
    watchdog.end()
    group.barrier()
    torch.distributed.destroy_process_group()
    if state is None:
        # An interpreter that shuts down while torch's threads run aborts now and then, and the launcher then reports a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return state.write(complete=True)


class _Watchdog:
    """Ends this process when a task takes longer than the deadline; rank 0 records the task first."""

    def __init__(self, deadline: float, state: RunState | None) -> None:
        self._deadline, self._state = deadline, state
        self._task: Task | None = None
        self._since = time.monotonic()
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def begin(self, task: Task) -> None:
        self._task, self._since = task, time.monotonic()

    def end(self) -> None:
        self._task = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._deadline / 4, 1.0))
            task = self._task
            if task is not None and time.monotonic() - self._since > self._deadline:
                self._give_up(task)

    def _give_up(self, task: Task) -> NoReturn:
        if self._state is not None:
            self._state.record_fault(task, f"no answer within the deadline of {self._deadline:g} s")
            _log.error("%s hangs and is recorded as a skip; run the same command again to continue behind it", task)
        os._exit(HUNG)
