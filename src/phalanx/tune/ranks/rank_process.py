# SPDX-License-Identifier: Apache-2.0
"""A rank of a benchmark, as a process: started by `tune.bench`, with its config on standard input.

It meets the other ranks, says what it runs on, waits for the list of tasks, and measures them in order. It tells what happens in
`events.{rank}`, one line of JSON each, and ends by itself after the last task. An error of one rank ends it: its parent restarts
the group without the task at fault.
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

POLL_S = 0.02


class Events:
    """What a rank tells its parent."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"events.{rank}").open("w", encoding="utf-8")

    def tell(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


def main() -> None:
    from phalanx.comm.launch import read_config

    config = read_config()
    events = Events(Path(config["folder"]), config["rank"])
    try:
        _run(config, events)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        from phalanx.comm.torch_group import lost_peer

        events.tell(error=f"{type(error).__name__}: {error}", lost_peer=lost_peer(error))
        os._exit(1)  # without waiting for peers that will never answer
    os._exit(0)


def _run(config: dict[str, Any], events: Events) -> None:
    import torch

    from phalanx.comm.torch_group import form
    from phalanx.plan.layout import Layout

    folder, rank, world = Path(config["folder"]), config["rank"], config["world"]
    if config["device"] == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    store = _meet(folder, rank, world, config["timeout"])
    group = form(rank, world, Layout(tp=world), store, device, timeout=config["timeout"]).tp
    measure(group, device, config, folder, events)


def measure(group: Any, device: Any, config: dict[str, Any], folder: Path, events: Events) -> None:
    """Tell who this is, take the tasks, and measure them."""
    from phalanx.tune.ranks import candidates, machine, precompile
    from phalanx.tune.ranks.measure import Method, Rank
    from phalanx.tune.sweep import Task

    found = candidates.open_group(group, device, config["max_bytes"])
    events.tell(hello=str(found.fingerprint), facts=machine.facts(device))
    work = [Task.parse(text) for text in json.loads(_await(folder / "work"))]
    if found.workspace is not None and len(work) >= precompile.WORTH_IT and (count := precompile.helpers(group.size)):
        precompile.run(work, found, device, count, lambda: events.tell(compiling=True))
        group.barrier()
    one = Rank(group, device, found, Method(**config["method"]))
    for task in work:
        events.tell(begin=str(task))
        result = one.measure(task)
        if isinstance(result, str):
            events.tell(task=str(task), skip=result)
        else:
            events.tell(task=str(task), samples=result)
    group.barrier()
    events.tell(end=True)


def _meet(folder: Path, rank: int, world: int, timeout: float) -> Any:
    """Rank 0 listens at a free port and says where, in the run's private folder; the others get the address."""
    from phalanx.comm.torch_group import listen

    place = folder / "address"
    if rank > 0:
        return _await(place)
    store, address = listen("127.0.0.1", 0, world, timeout=timeout)
    _put(place, address)
    return store


def _put(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _await(path: Path, sleep: Callable[[float], None] = time.sleep) -> str:
    """The text of a file that another process puts there; the parent's deadline ends a wait in vain."""
    while not path.exists():
        sleep(POLL_S)
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
