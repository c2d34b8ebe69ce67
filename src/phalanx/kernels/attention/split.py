# SPDX-License-Identifier: Apache-2.0
"""How decode attention is cut into programs: how many may share a row, how much one reads at a time; and where they leave their
parts. Decided from shapes alone, so that a captured launch serves all lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_PIECES = 32
"""Of one row: the last program to arrive reads what all others left."""

PROGRAMS_PER_PROCESSOR = 8
"""That run at once; a row is cut no further than into what the GPU can run at once."""


class Split(NamedTuple):
    """pieces: the most programs that share a row's tokens for one KV head. chunk: tokens of a row for each program that shares it,
    at least, unless the row is shorter. tile: tokens that a program computes at a time, divided among its warps, 16 or more each.
    stages: as Triton's num_stages: tiles that are computed or under way. registers: of a thread, at most: so many programs fit on a
    processor."""

    pieces: int
    chunk: int
    tile: int
    warps: int
    stages: int
    registers: int


def chosen(rows: int, kv_heads: int, group: int, head_dim: int, itemsize: int, processors: int) -> Split:
    """For `rows` rows of any length; group: query heads per KV head; itemsize: bytes of a cached element; processors: the
    GPU's."""
    programs = rows * kv_heads * -(-group // 16)
    pieces = max(1, min(PROGRAMS_PER_PROCESSOR * processors // (2 * programs), MOST_PIECES))
    chunk = 128 if programs <= processors else 256
    if head_dim * itemsize > 256:  # also in fp32, whose products are not a tensor core's
        return Split(pieces, chunk, tile=32, warps=2, stages=2, registers=255)
    return Split(pieces, chunk, tile=16, warps=1, stages=4, registers=168)


class Workspace:
    """Where programs that share a row leave their parts, and count themselves; on one device, for one stream.

    It grows, and what was given out stays: captured launches hold it. Counts are 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._given: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def take(self, groups: int, pieces: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For so many groups of programs: (maxima, sums, each groups * pieces * 16 fp32; outputs, those times width; counts,
        groups int32), or larger. Nothing is shared where pieces is 1."""
        if pieces == 1:
            groups = 1
        heads = groups * pieces * 16
        for held in self._given:
            if held[0].numel() >= heads and held[2].numel() >= heads * width and held[3].numel() >= groups:
                return held
        with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
            sizes = heads, heads, heads * width
            top, total, out = (torch.zeros(size, dtype=torch.float32, device=self._device) for size in sizes)
            held = top, total, out, torch.zeros(groups, dtype=torch.int32, device=self._device)
        self._given.append(held)
        return held
