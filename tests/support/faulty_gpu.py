# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""How `faulty_rank` has a rank on a GPU go wrong, in steps of its own kernels and in those that graphs replay.

spin: a kernel before the call ends only in steps before "step". skip: the call is left out, in that step, and with graphs in all
that are captured. stop, kill: the process, when that step begins.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import triton
import triton.language as tl

from phalanx.comm import device_marks
from phalanx.layout.rank_progress import CallMarker, RankProgress


class Skipped(Exception):
    pass


@triton.jit
def spin_while(flag):
    """Until the flag is zero."""
    while tl.load(flag, volatile=True) != 0:
        pass


def break_gpu(fault: dict[str, Any], *, graphs: bool) -> None:
    """Have this process go wrong as `fault` says."""
    flags: list[torch.Tensor] = []
    enter, begin, form = CallMarker.enter, RankProgress.begin, device_marks.DeviceMarks.__init__

    def formed(marks: device_marks.DeviceMarks, progress: RankProgress, device: torch.device) -> None:
        form(marks, progress, device)
        flags.append(torch.zeros(1, dtype=torch.int32, device=device))
        spin_while[(1,)](flags[0])  # compiled before any graph is captured

    def begun(progress: RankProgress, step: int) -> None:
        begin(progress, step)
        if step != fault["step"]:
            return
        match fault["kind"]:
            case "stop" | "kill":
                os.kill(os.getpid(), signal.SIGSTOP if fault["kind"] == "stop" else signal.SIGKILL)
            case "spin":
                flags[0].fill_(1)

    def entered(marker: CallMarker, operation: int) -> None:
        progress = marker._progress
        here = progress.step and len(progress.calls) == fault["call"] and not progress.inside
        if here and fault["kind"] == "spin":
            spin_while[(1,)](flags[0])
        if here and fault["kind"] == "skip" and (progress.step < 0 if graphs else progress.step == fault["step"]):
            if not graphs:
                fault["step"] = -1
            raise Skipped
        enter(marker, operation)

    device_marks.DeviceMarks.__init__ = formed  # type: ignore[method-assign]
    RankProgress.begin, CallMarker.enter = begun, entered  # type: ignore[method-assign]
