# SPDX-License-Identifier: Apache-2.0
"""A rank of a benchmark as a process: started by `tune.runner`, with its config on standard input.

It meets the other ranks, reports what it runs on, waits for the list of tasks, and measures them in order. It writes events to
`events.{rank}`, one line of JSON each, and ends by itself after the last task. An error ends the process: its parent restarts the
group without the task at fault.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import file_named

POLL_S = 0.02


class Events:
    """What a rank reports to its parent."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"events.{rank}").open("w", encoding="utf-8")

    def send(self, **event: Any) -> None:
        with file_named(self._file.name):
            self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def main() -> None:
    from phalanx.launch import read_config

    config = read_config()
    events = Events(Path(config["folder"]), config["rank"])
    try:
        _run(config, events)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        from phalanx.comm.torch_group import lost_peer

        events.send(error=f"{type(error).__name__}: {error}", lost_peer=lost_peer(error))
        os._exit(1)  # without waiting for peers that will never answer
    os._exit(0)


def _run(config: dict[str, Any], events: Events) -> None:
    from phalanx.tune.ranks.setup import join_group

    folder, rank, world = Path(config["folder"]), config["rank"], config["world"]
    store = _meet(folder, rank, world, config["timeout"])
    group, device = join_group(rank, world, config["device"], rank, store, config["timeout"])
    measure(group, device, config, folder, events)


def measure(group: Any, device: Any, config: dict[str, Any], folder: Path, events: Events) -> None:
    """Report machine and versions, take the tasks, and measure them."""
    from phalanx.tune.ranks import candidates, setup, warmup
    from phalanx.tune.ranks.measure import Method, Rank
    from phalanx.tune.sweep import Task

    available = candidates.open_group(group, device, config["max_bytes"])
    events.send(hello=str(available.fingerprint), facts=setup.machine_facts(device))
    tasks = [Task.parse(text) for text in json.loads(_await(folder / "work"))]
    if device.type == "cuda" and len(tasks) >= warmup.MIN_TASKS:
        processes = warmup.compile_processes(group.size)
        warmup.warm_up(tasks, available, group, device, processes, lambda done, total: events.send(compiling=[done, total]))
        group.barrier()
    rank = Rank(group, device, available, Method(**config["method"]))
    rank.measure_all(
        tasks, lambda task: events.send(begin=str(task)),
        lambda task, result: events.send(task=str(task), **{"skip" if isinstance(result, str) else "samples": result}),
    )  # fmt: skip
    group.barrier()
    events.send(end=True)


def _meet(folder: Path, rank: int, world: int, timeout: float) -> Any:
    """Rank 0 listens at a free port and writes the address to the run's private folder; the others read it."""
    from phalanx.comm.torch_group import listen

    path = folder / "address"
    if rank > 0:
        return _await(path)
    store, address = listen("127.0.0.1", 0, world, timeout=timeout)
    _put(path, address)
    return store


def _put(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with file_named(part):
        part.write_text(text, encoding="utf-8")
    part.replace(path)


def _await(path: Path, sleep: Callable[[float], None] = time.sleep) -> str:
    """The text of a file that another process writes. The parent's deadline ends a wait for a file that never comes."""
    while not path.exists():
        sleep(POLL_S)
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
