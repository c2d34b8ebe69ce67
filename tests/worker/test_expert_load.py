# SPDX-License-Identifier: Apache-2.0
"""The counters of experts on a rank: what reaches the heartbeat, and what survives a move of experts."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from phalanx.worker.expert_load import READ_SECONDS, ExpertLoad

CPU = torch.device("cpu")


@dataclass
class Layer:
    local_experts: tuple[int, ...]
    load: Tensor = field(default_factory=lambda: torch.zeros(0))


def counts_of(load: ExpertLoad) -> list[list[int]]:
    values: list[list[int]] = np.frombuffer(zlib.decompress(load.latest), dtype="<i8").reshape(2, 4).tolist()
    return values


def test_what_layers_count_is_read_by_expert_at_most_every_few_seconds() -> None:
    now = 0.0
    layers = [Layer((2, 3)), Layer((2, 3))]
    load = ExpertLoad(layers, 4, CPU, lambda: now)
    assert load.seconds_left is None
    load.read()
    assert load.latest == b""  # nothing was counted: nothing is sent
    layers[0].load += torch.tensor([5, 1])
    load.reset()
    layers[0].load += torch.tensor([3, 1])
    layers[1].load[1] += 7
    load.step_queued()
    now = READ_SECONDS / 2
    load.step_queued()
    load.read()
    assert (load.latest, load.seconds_left) == (b"", READ_SECONDS / 2)
    now = READ_SECONDS
    load.read()
    assert counts_of(load) == [[0, 0, 3, 1], [0, 0, 0, 7]]
    assert load.seconds_left is None


def test_experts_that_move_take_their_counts_along() -> None:
    now = 0.0
    layers = [Layer((0, 1)), Layer((0, 1))]
    load = ExpertLoad(layers, 4, CPU, lambda: now)
    layers[1].load += torch.tensor([10, 20])
    load.experts_moved(1, (3, 1))
    layers[1].load += torch.tensor([4, 5])
    layers[0].load += torch.tensor([1, 2])
    now = READ_SECONDS
    load.read()
    assert counts_of(load) == [[1, 2, 0, 0], [10, 25, 0, 4]]
