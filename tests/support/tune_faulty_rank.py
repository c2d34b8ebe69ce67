# SPDX-License-Identifier: Apache-2.0
"""A real rank of a benchmark whose ONESHOT and TWOSHOT are gloo's sum, with faults on the last rank.

PHALANX_TEST_FAULTS names a file with {task: "raise" | "wrong" | "unwritten" | "refuse"}.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.strategies import AllReduce, Strategies
from phalanx.tables.strategy import Strategy
from phalanx.tune.ranks import candidates, measure, rank_process
from phalanx.tune.sweep import Task

FAULTS = {Task.parse(text): fault for text, fault in json.loads(Path(os.environ["PHALANX_TEST_FAULTS"]).read_text()).items()}
running: list[str | None] = [None]


def open_group(group, device, max_bytes):
    strategies = Strategies(detect_fingerprint(device, group.size), {Strategy.NCCL: AllReduce(group.all_reduce)})

    def total(x):
        if running[0] == "raise":
            raise ArithmeticError("a kernel said no")
        out = group.all_reduce(x)
        if running[0] == "wrong":
            out[-1, -1] += 1
        return torch.empty_like(out) if running[0] == "unwritten" else out

    for strategy in (Strategy.ONESHOT, Strategy.TWOSHOT):
        strategies.runs[strategy] = AllReduce(total)
    built = candidates.StrategyCandidates(strategies)
    plain_get = built.get

    def get(choice, layer=None):
        if running[0] == "refuse":
            raise KeyError("not on a Saturday")
        return plain_get(choice, layer)

    built.get = get
    return built


class FaultyRank(measure.Rank):
    def measure(self, task):
        running[0] = FAULTS.get(task) if self.group.rank == self.group.size - 1 else None
        return super().measure(task)


if __name__ == "__main__":
    candidates.open_group = open_group
    measure.Rank = FaultyRank
    rank_process.main()
