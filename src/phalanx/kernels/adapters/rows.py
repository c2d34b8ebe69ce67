# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a batch have an adapter (`AdapterRows`, `AdapterBatch`), and the factors of one layer's adapters
(`AdapterFactors`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FEW_ROWS, FEW, MANY = 512, 16, 64
"""Tiles have FEW tokens, or MANY where more than FEW_ROWS have an adapter: a tile reads all factors of its adapter."""


Ints = np.ndarray[Any, Any]


@dataclass(frozen=True)
class AdapterRows:
    """The tokens of a batch of `total` that have an adapter, grouped by adapter.

    order [N] int64: their places in the batch. tiles [M, 3] int32: slot, begin and end in `order` of tiles of at most `tile`
    tokens, each of one adapter. slots: that are met; None in a captured step, which is for the tokens that `order` and `tiles`
    name when it is replayed: an empty tile is skipped. step [1] int32: the number of a captured step, another one for each replay,
    by which the programs of a kernel know sums of this step from those of the last (`kernels.adapters.gemv_delta`).
    """

    total: int
    order: Tensor
    tiles: Tensor
    tile: int
    slots: Sequence[int] | None = None
    step: Tensor | None = None

    @classmethod
    def of(cls, slots: Ints, device: torch.device) -> AdapterRows | None:
        """slots [T]: of each token's adapter, -1 for none. None where all have none."""
        tile = tile_of(int(np.count_nonzero(slots >= 0)))
        order, tiles = grouped(slots, tile)
        if not len(order):
            return None
        placed, numbered = (torch.from_numpy(array).to(device, non_blocking=True) for array in (order, tiles))
        return cls(len(slots), placed, numbered, tile, np.unique(tiles[:, 0]).tolist())


def tile_of(tokens: int) -> int:
    """Of so many tokens with an adapter."""
    return FEW if tokens <= FEW_ROWS else MANY


def grouped(slots: Ints, tile: int) -> tuple[Ints, Ints]:
    """`order` and `tiles` of the tokens whose adapters are in `slots`, -1 for none: see `AdapterRows`."""
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    numbers = slots[order]
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
    runs = zip(firsts, [*firsts[1:], len(order)][: len(firsts)], strict=True)
    tiles = [(int(numbers[begin]), at, min(at + tile, end)) for begin, end in runs for at in range(begin, end, tile)]
    return order.astype(np.int64), np.array(tiles, dtype=np.int32).reshape(-1, 3)


def most_tiles(tokens: int, slots: int, tile: int) -> int:
    """How many tiles so many tokens can take, with adapters in so many slots."""
    met = min(tokens, slots)
    return met + (tokens - met) // tile


class AdapterBatch:
    """What the adapted layers of a rank share: how many slots there are, the largest rank, and which tokens of the forward that is
    being run, or captured, have an adapter; None: none has."""

    def __init__(self, slots: int, max_rank: int) -> None:
        self.slots, self.max_rank = slots, max_rank
        self.rows: AdapterRows | None = None


class AdapterFactors(NamedTuple):
    """The factors of one linear layer, of as many parts as have an A of their own (q, k and v), in S slots with room for rank R.

    a [S, parts * R, in]; b [S, out, R], times the scale; ranks [S, parts] int32: 0 where an adapter leaves the part alone.
    columns: of the output, (part, begin, end), in order; tiles [M, 3] int32: the same in tiles of at most COLUMNS; part_of [out]
    int8: the same for each. ranks_cpu: the same as `ranks`. sums [parts * R] int64: see `kernels.adapters.gemv_delta`.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    columns: Sequence[tuple[int, int, int]]
    tiles: Tensor
    part_of: Tensor
    ranks_cpu: list[list[int]]
    sums: Tensor

    @classmethod
    def empty(
        cls, slots: int, room: int, inputs: int, columns: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device
    ) -> AdapterFactors:
        """Of a layer that no slot's adapter changes yet."""
        parts, outputs = 1 + max(part for part, _, _ in columns), columns[-1][2]
        part_of = torch.empty(outputs, dtype=torch.int8, device=device)
        for part, begin, end in columns:
            part_of[begin:end] = part
        return cls(
            torch.zeros(slots, parts * room, inputs, dtype=dtype, device=device),
            torch.zeros(slots, outputs, room, dtype=dtype, device=device),
            torch.zeros(slots, parts, dtype=torch.int32, device=device), columns, column_tiles(columns, device), part_of,
            [[0] * parts for _ in range(slots)], torch.zeros(parts * room, dtype=torch.int64, device=device),
        )  # fmt: skip


class GemvDelta(NamedTuple):
    """What a GEMV of one token reads of its adapter, see `kernels.adapters.gemv_delta`."""

    a: Tensor
    b: Tensor
    sums: Tensor
    part_of: Tensor
    tiles: Tensor
    ranks: Tensor
    step: Tensor
    parts: int
    room: int

    @classmethod
    def of(cls, factors: AdapterFactors, rows: AdapterRows) -> GemvDelta:
        """rows: of one token in a captured step."""
        assert rows.step is not None
        return cls(
            factors.a, factors.b, factors.sums, factors.part_of, rows.tiles, factors.ranks, rows.step, factors.ranks.shape[1],
            factors.b.shape[2],
        )  # fmt: skip

    def programs(self, rows: int) -> int:
        """How many of a kernel compute A times x, `rows` of it each."""
        return self.parts * self.room // rows


COLUMNS = 128
"""Of the output, that one program of a kernel computes."""


def column_tiles(columns: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    """See `AdapterFactors.tiles`."""
    tiles = [(part, at, min(at + COLUMNS, end)) for part, begin, end in columns for at in range(begin, end, COLUMNS)]
    return torch.tensor(tiles, dtype=torch.int32, device=device)
