# SPDX-License-Identifier: Apache-2.0
"""A benchmark whose ranks were started by torchrun or mpirun: each process is a rank, and rank 0 keeps the journal.

Nobody can restart the group from within. A candidate that hangs is recorded as a skip and ends all ranks with status 3; the same
command goes on behind it (`torchrun --max-restarts` runs it again by itself).
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
from phalanx.tune.records import Benchmark
from phalanx.tune.runner import Progress, Run, State
from phalanx.tune.sweep import Task

_log = get_logger(__name__)
HUNG = 3
"""The exit status after a hang."""


@dataclass(frozen=True)
class Place:
    """Where this process stands. address: "host:port" where rank 0 is to listen; None: torchrun's own store is there."""

    rank: int
    world: int
    local_rank: int
    address: str | None


def bench(run: Run, place: Place, progress: Progress | None = None) -> Benchmark:
    """This rank's part of the benchmark; rank 0 writes CSV and sidecar and returns what they hold, the others end here."""
    import torch
    from torch.distributed.rendezvous import rendezvous

    from phalanx.comm.torch_group import connect, form, listen
    from phalanx.plan.layout import Layout
    from phalanx.tune.ranks import candidates, machine
    from phalanx.tune.ranks.measure import Method, Rank

    if run.device == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    if place.address is None:
        store = next(rendezvous("env://", place.rank, place.world))[0]
    elif place.rank == 0:
        host, _, port = place.address.rpartition(":")
        store = listen(host, int(port), place.world, timeout=run.start_timeout)[0]
    else:
        store = connect(place.address, place.world, timeout=run.start_timeout)
    group = form(place.rank, place.world, Layout(tp=place.world), store, device, timeout=run.start_timeout).tp
    found = candidates.open_group(group, device, run.max_bytes)
    state = State(run, found.fingerprint, machine.facts(device), progress) if place.rank == 0 else None
    if state is not None:
        store.set("phalanx/work", json.dumps([str(task) for task in state.left()]))
    work = [Task.parse(text) for text in json.loads(store.get("phalanx/work"))]
    one = Rank(group, device, found, Method(**run.method))
    watch = _Watch(run.deadline, state)
    for task in work:
        watch.begin(task)
        result = one.measure(task)
        if state is not None:
            state.result({"task": str(task)} | ({"skip": result} if isinstance(result, str) else {"samples": result}))
    watch.end()
    group.barrier()
    torch.distributed.destroy_process_group()
    if state is None:
        # This rank is done. An interpreter that winds down under torch's threads now and then aborts, and fails the launcher.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return state.write(complete=True)


class _Watch:
    """Ends this process when a task takes longer than the deadline; rank 0 records it first."""

    def __init__(self, deadline: float, state: State | None) -> None:
        self._deadline, self._state = deadline, state
        self._task: Task | None = None
        self._since = time.monotonic()
        threading.Thread(target=self._look, name="deadline", daemon=True).start()

    def begin(self, task: Task) -> None:
        self._task, self._since = task, time.monotonic()

    def end(self) -> None:
        self._task = None

    def _look(self) -> None:
        while True:
            time.sleep(min(self._deadline / 4, 1.0))
            task = self._task
            if task is not None and time.monotonic() - self._since > self._deadline:
                self._give_up(task)

    def _give_up(self, task: Task) -> NoReturn:
        if self._state is not None:
            self._state.fault(task, f"no answer within the deadline of {self._deadline:g} s")
            _log.error("%s hangs and is recorded as a skip; run the same command again to go on behind it", task)
        os._exit(HUNG)
