# SPDX-License-Identifier: Apache-2.0
"""A real rank on CPU that goes wrong at one call of a collective: `FaultyLauncher` starts such ranks.

A fault has "rank", "kind", and where: the call of this number (from 0) in "step" that the rank is about to make.

stop, kill: the process gets SIGSTOP or SIGKILL. spin: it computes for ever instead of coming. skip: it goes on without the call.
link: it comes, and nothing that it sends arrives.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.comm.marked_group import MarkedGroup
from phalanx.executor.launcher import HostRanks, LocalLauncher, LocalRank
from phalanx.layout.rank_progress import CallMarker

KINDS = ("stop", "kill", "spin", "skip", "link")


class FaultyLauncher(LocalLauncher):
    """Of ranks of this module. fault: see there."""

    module = "tests.support.faulty_rank"
    fault: dict[str, Any] | None = None

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, LocalRank]:
        return super().start(ranks, {**config, "fault": self.fault})


class _Skipped(Exception):
    pass


def _break(fault: dict[str, Any]) -> None:
    """Have this process go wrong as `fault` says."""
    enter = CallMarker.enter

    def entered(marker: CallMarker, operation: int) -> None:
        progress = marker._progress
        here = progress.step == fault["step"] and len(progress.calls) == fault["call"] and not progress.inside
        if not here:
            enter(marker, operation)
            return
        match fault["kind"]:
            case "stop" | "kill":
                os.kill(os.getpid(), signal.SIGSTOP if fault["kind"] == "stop" else signal.SIGKILL)
                enter(marker, operation)
            case "spin":
                while True:
                    pass
            case "skip":
                fault["step"] = -1
                raise _Skipped
            case "link":
                enter(marker, operation)
                threading.Event().wait()

    CallMarker.enter = entered  # type: ignore[method-assign]
    plain = {name: getattr(MarkedGroup, name) for name in ("all_reduce", "all_gather")}

    def all_reduce(self: MarkedGroup, x: torch.Tensor, fusion: ResidualRmsNorm | None = None) -> Any:
        try:
            return plain["all_reduce"](self, x, fusion)
        except _Skipped:
            return x if fusion is None else finish(x, fusion)

    def all_gather(self: MarkedGroup, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        try:
            return plain["all_gather"](self, x, dim)
        except _Skipped:
            return torch.cat([x] * self.size, dim)

    MarkedGroup.all_reduce, MarkedGroup.all_gather = all_reduce, all_gather  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    from phalanx import launch
    from phalanx.worker import worker

    read_config = launch.read_config

    def read() -> dict[str, Any]:
        config = read_config()
        fault = config.pop("fault")
        if fault is not None and config["rank"] == fault["rank"]:
            _break(fault)
        return config

    launch.read_config = read
    worker.main()
