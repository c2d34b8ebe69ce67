# SPDX-License-Identifier: Apache-2.0
"""Compile a benchmark's kernels before it, on many cores at once: a rank alone would spend most of its time compiling.

A rank first looks which tasks ask for a kernel that none before them asks for: a tenth of a grid's, or fewer. Each helper process
calls the candidates of its part of those with launches left out, which leaves the kernels in Triton's cache on disk, where the rank
finds them. Helpers only save time: what they do not get done, the rank compiles itself.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.comm import launch
from phalanx.comm.group import ResidualRmsNorm, with_scales
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.compiling.ahead import launches_left_out
from phalanx.kernels.dtypes import TORCH_DTYPES
from phalanx.log import get_logger
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Strategy
from phalanx.comm.strategies import AllReduce, Strategies, symmetric_strategies
from phalanx.tune.ranks.candidates import StrategyCandidates
from phalanx.tune.sweep import Task

_log = get_logger(__name__)
WORTH_IT = 100
"""Tasks from which on starting helpers pays."""
_MODULE = "phalanx.tune.ranks.precompile"


def helpers(world: int) -> int:
    """How many processes each rank of this host may start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // world - 1, 0)


def run(tasks: list[Task], built: StrategyCandidates, device: torch.device, count: int, alive: Callable[[], None], limit: float = 150.0) -> None:
    """Have up to `count` helpers compile what `tasks` need; returns when they are done, or after `limit` seconds. alive: called
    often."""
    config = {"workspace": _plain(built.workspace), "machine": str(built.fingerprint), "device": device.index}
    firsts = distinct(tasks, _stand_in(built.fingerprint, built.workspace), device)
    parts = [part for first in range(count) if (part := [str(task) for task in firsts[first::count]])]
    children = [launch.start(_MODULE, config | {"tasks": part}, f"phalanx compile {number}") for number, part in enumerate(parts)]
    begin = time.monotonic()
    while any(child.alive for child in children) and time.monotonic() - begin < limit:
        alive()
        time.sleep(0.2)
    failed = [child for child in children if child.process.poll() != 0]
    launch.stop(children, grace=0)
    _log.info("%d kernels' tasks compiled by %d helpers in %.0f s", len(firsts), len(children), time.monotonic() - begin)
    if failed:
        _log.warning("%d of %d helpers have not compiled their part; the ranks do it as they go", len(failed), count)


def distinct(tasks: list[Task], built: StrategyCandidates, device: torch.device) -> list[Task]:
    """Those of `tasks` that ask for a kernel, compiled in some way, that none before them asks for. Nothing is compiled or run."""
    kind, asked, found = _kernel_type(), set[Any](), []
    plain = kind.run

    def note(self: Any, *args: Any, **fixed: Any) -> None:
        constants = {name: repr(value) for name, value in fixed.items() if name not in ("grid", "warmup")}
        asked.add((self.fn.__qualname__, tuple(map(_sort, args)), tuple(sorted(constants.items()))))

    kind.run = note
    try:
        for task in tasks:
            before = len(asked)
            built.get(task.choice)(*_tensors(task, device))
            if len(asked) > before:
                found.append(task)
    finally:
        kind.run = plain
    return found


def _sort(value: Any) -> Any:
    """What Triton compiles by, of an argument that is no constant."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_sort, value))
    return (value == 1, value % 16 == 0, value.bit_length() > 31) if isinstance(value, int) else type(value)


def _plain(workspace: Any) -> dict[str, Any]:
    """A workspace's fields as JSON: numbers as they are, tensors by dtype and shape (a kernel's binary depends on no more)."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(workspace):
        value = getattr(workspace, field.name)
        if isinstance(value, torch.Tensor):
            plain[field.name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        elif isinstance(value, int) or (isinstance(value, tuple) and all(isinstance(item, int) for item in value)):
            plain[field.name] = value
    return plain


def _likeness(plain: dict[str, Any], device: torch.device) -> Any:
    """A workspace that compiles like the one that `plain` describes; nothing may be launched on it."""
    from phalanx.comm.symmetric import SymmetricWorkspace

    fields: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            fields[name] = torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=device)
        else:
            fields[name] = tuple(value) if isinstance(value, list) else value
    return SymmetricWorkspace(**fields)


def main() -> None:
    config = launch.read_config()
    device = torch.device("cuda", config["device"])
    torch.cuda.set_device(device)
    built = _stand_in(Fingerprint.parse(config["machine"]), _likeness(config["workspace"], device))
    with launches_left_out():
        for text in config["tasks"]:
            task = Task.parse(text)
            built.get(task.choice)(*_tensors(task, device))


def _stand_in(fingerprint: Fingerprint, workspace: Any) -> StrategyCandidates:
    """The candidates of a rank that has no group."""
    runs = {Strategy.NCCL: AllReduce(with_scales)} | symmetric_strategies(workspace)
    return StrategyCandidates(Strategies(fingerprint, runs))


def _tensors(task: Task, device: torch.device) -> tuple[torch.Tensor, ResidualRmsNorm | None]:
    """The task's arguments, of any content."""
    shape, dtype = (task.tokens, task.hidden), TORCH_DTYPES[task.dtype]
    x = torch.empty(shape, dtype=dtype, device=device)
    if task.fusion is Fusion.NONE:
        return x, None
    given = task.fusion.quant != "none" and not task.fusion.token_scale
    scale = torch.empty((), dtype=torch.float32, device=device) if given else None
    weight = torch.empty(task.hidden, dtype=dtype, device=device)
    quant: Any = task.fusion.quant
    return x, ResidualRmsNorm(torch.empty_like(x), weight, 1e-5, quant, scale, task.fusion.keeps_norm)


def _kernel_type() -> Any:
    """The class whose `run` every launch goes through."""
    from phalanx.kernels.allreduce import oneshot

    return type(oneshot.oneshot)


if __name__ == "__main__":
    main()
