# SPDX-License-Identifier: Apache-2.0
"""The process of a rank, of which torch's profiler records some steps: see `step_kernels`, which starts it.

It records the steps number `first` to `first + count - 1` of those with at least `tokens[0]` tokens behind the start, then the same
of those with at least `tokens[1]`, and so on. Each trace is in Chrome's form: `folder`/rank<pid>.<number>.json.gz.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.engine.messages import StepBatch, StepExtent
from phalanx.worker import worker
from phalanx.worker.model_runner import ModelRunner, StepOutput
from phalanx.worker.worker import Worker

VARIABLE = "PHALANX_STEP_KERNELS"
"""Environment: JSON with folder, tokens (a list), first and count."""


def install(folder: Path, tokens: list[int], first: int, count: int) -> None:
    """Record such steps of every ModelRunner of this process."""
    run, capture, started, long_steps, traces, recorded = ModelRunner.run, Worker._capture, False, 0, 0, None

    def last_of_start(self: Worker, runner: ModelRunner, device: torch.device) -> None:
        nonlocal started
        capture(self, runner, device)
        started = True

    def recording(self: ModelRunner, step: StepBatch, extent: StepExtent | None = None) -> StepOutput:
        nonlocal long_steps, traces, recorded
        if not started or traces == len(tokens) or sum(row.count for row in step.rows) < tokens[traces]:
            return run(self, step, extent)
        long_steps += 1
        if long_steps == first:
            activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
            recorded = profile(activities=[activity])
            recorded.__enter__()
        output = run(self, step, extent)
        if recorded is not None and long_steps == first + count - 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            recorded.__exit__(None, None, None)
            recorded.export_chrome_trace(str(folder / f"rank{os.getpid()}.{traces}.json.gz"))
            long_steps, traces, recorded = 0, traces + 1, None
        return output

    ModelRunner.run = recording  # type: ignore[method-assign]
    Worker._capture = last_of_start  # type: ignore[method-assign]


def main() -> None:
    options: dict[str, Any] = json.loads(os.environ[VARIABLE])
    install(Path(options["folder"]), options["tokens"], options["first"], options["count"])
    worker.main()


if __name__ == "__main__":
    main()
