# SPDX-License-Identifier: Apache-2.0
"""A real rank that goes wrong at one call of a collective: `FaultyLauncher` starts such ranks. Here on CPU; `faulty_gpu` on GPUs.

A fault has "rank", "kind", and where: the call of this number (from 0) in "step" that the rank is about to make.

stop, kill: the process gets SIGSTOP or SIGKILL. spin: it computes for ever instead of coming. skip: it goes on without the call.
link: it comes, and nothing that it sends arrives.

Or the rank computes something wrong from its start on (WRONG): the sum of the all-reduce ONESHOT, the last columns of an int4 GEMM
of more than 16 rows, the static scale of FP8 activations, or the last head of attention. "everywhere": what all ranks have first:
fp8,
activations in FP8 as on a GPU; unmarked, GPUs that do not say where they are.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import torch

from phalanx.comm.group import ResidualRmsNorm, finish, with_scales
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


def _fp8() -> None:
    from phalanx.models import slices

    slices.has_fp8_gemm = lambda device: True


def _oneshot() -> None:
    from phalanx.comm.shared_memory import SharedMemory

    right = SharedMemory._oneshot_chunk

    def wrong(self: SharedMemory, flat: torch.Tensor) -> torch.Tensor:
        total = right(self, flat)
        total[-len(flat) // 4 :] *= 1.5
        return total

    SharedMemory._oneshot_chunk = wrong  # type: ignore[method-assign]


def _int4() -> None:
    from phalanx.models.layers.linear_methods import int4

    right = int4.int4_mm

    def wrong(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        out = right(x, *arguments, **options)
        out[16:, -16:] = 0
        return out

    int4.int4_mm = wrong


def _scale() -> None:
    from phalanx.models.layers.linear_methods.fp8 import TokenQuantizer

    right = TokenQuantizer._static_rows
    TokenQuantizer._static_rows = lambda self, tokens: right(self, tokens) * 2  # type: ignore[method-assign]


def _attention() -> None:
    from phalanx.models.layers.attention.sdpa import SdpaPlan

    right = SdpaPlan.forward

    def wrong(self: SdpaPlan, query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        output = right(self, query, *arguments, **options)
        output[:, -1] = 0
        return output

    SdpaPlan.forward = wrong  # type: ignore[method-assign]


def _unmarked() -> None:
    from phalanx.worker.worker import Worker

    Worker._marks = lambda self, device: None  # type: ignore[method-assign]


WRONG = {"unmarked": _unmarked, "fp8": _fp8, "oneshot": _oneshot, "int4": _int4, "scale": _scale, "attention": _attention}


class _Skipped(Exception):
    pass


def _break_rank(fault: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Have this process go wrong as `fault` says."""
    if options["device"] == "cuda":
        from tests.support.faulty_gpu import Skipped, break_gpu

        break_gpu(fault, graphs=options["cuda_graphs"])
        _skip_by(Skipped)
    else:
        _break(fault)
        _skip_by(_Skipped)


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


def _skip_by(error: type[Exception]) -> None:
    """A call of a collective that raises this error is left out."""
    plain = {name: getattr(MarkedGroup, name) for name in ("all_reduce", "all_gather")}

    def all_reduce(self: MarkedGroup, x: torch.Tensor, fusion: ResidualRmsNorm | None = None) -> Any:
        try:
            return plain["all_reduce"](self, x, fusion)
        except error:
            return with_scales(x) if fusion is None else finish(with_scales(x), fusion)

    def all_gather(self: MarkedGroup, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        try:
            return plain["all_gather"](self, x, dim)
        except error:
            return torch.cat([x] * self.size, dim)

    MarkedGroup.all_reduce, MarkedGroup.all_gather = all_reduce, all_gather  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    from phalanx import launch
    from phalanx.worker import worker

    read_config = launch.read_config

    def read() -> dict[str, Any]:
        config = read_config()
        fault = config.pop("fault")
        if fault is not None and "everywhere" in fault:
            WRONG[fault["everywhere"]]()
        if fault is not None and config["rank"] == fault["rank"]:
            WRONG.get(fault["kind"], lambda: _break_rank(fault, config["options"]))()
        return config

    launch.read_config = read
    worker.main()
