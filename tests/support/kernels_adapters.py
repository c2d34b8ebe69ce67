# SPDX-License-Identifier: Apache-2.0
"""Random factors of adapters, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.adapters.rows import AdapterFactors

WIDTHS = (70, 24, 130)
"""Columns of the parts: none fills its tiles."""


def factors_of(ranks: Sequence[Sequence[int]], inputs: int, room: int, dtype: torch.dtype) -> AdapterFactors:
    """Random ones. What lies beyond a rank is NaN: nothing may read it, but for the unit in which kernels multiply."""
    parts, columns, at = len(ranks[0]), [], 0
    for part, width in enumerate(WIDTHS[:parts]):
        columns.append((part, at, at + width))
        at += width
    a, b = torch.full((len(ranks), parts * room, inputs), torch.nan), torch.full((len(ranks), at, room), torch.nan)
    for slot, of_slot in enumerate(ranks):
        for (part, begin, end), rank in zip(columns, of_slot, strict=True):
            unit = -(-rank // 16) * 16
            a[slot, part * room : part * room + unit] = b[slot, begin:end, :unit] = 0
            a[slot, part * room : part * room + rank] = torch.randn(rank, inputs)
            b[slot, begin:end, :rank] = torch.randn(end - begin, rank)
    numbers = [list(of_slot) for of_slot in ranks]
    table = torch.tensor(numbers, dtype=torch.int32)
    empty = AdapterFactors.empty(len(ranks), room, inputs, columns, dtype, table.device)
    return empty._replace(a=a.to(dtype), b=b.to(dtype), ranks=table, ranks_cpu=numbers)
