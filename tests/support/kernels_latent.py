# SPDX-License-Identifier: Apache-2.0
"""Decode rows over a cache of latents, and the types of the kernels' arguments."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

SIGNATURE = {
    "table_rows": "*i64", **dict.fromkeys(("tables", "lengths", "arrivals", "splits"), "*i32"),
    **dict.fromkeys(("split_max", "totals", "outs", "lse"), "*fp32"), "score_scale": "fp32",
    "members": "i32", "items": "i32", "early": "i32",
    **dict.fromkeys(("table_stride", "row_stride", "head_stride", "rotated_row_stride", "rotated_head_stride"), "i32"),
}  # fmt: skip


class Case(NamedTuple):
    """Rows of these lengths; the queries of `heads` heads."""

    lengths: list[int]
    heads: int = 4
    rank: int = 32
    rope: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    indirect: bool = True
    band: int = 16
    extra_splits: int = 8
    tile: int = 32
    chunk: int = 128
    apart: bool = False
    lse: bool = False


class Inputs(NamedTuple):
    query: Tensor
    rotated: Tensor
    cache: Tensor
    tables: Tensor
    rows: Tensor | None
    lengths: Tensor


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    """Blocks in random order; whatever no row attends to is NaN, as stale memory may be. Both parts of a query lie in other
    tensors, as they do in a model."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(case.lengths), -(-max(case.lengths) // case.block_size) + 2
    used = [-(-length // case.block_size) for length in case.lengths]
    blocks = list(range(1, sum(used) + 1))
    random.Random(seed).shuffle(blocks)
    cached = case.rank + case.rope
    cache = torch.full((len(blocks) + 1, case.block_size, 1, cached), float("nan"))
    slots = random.Random(seed).sample(range(rows + 2), rows) if case.indirect else list(range(rows))
    tables = torch.zeros(rows + 2, width + 1, dtype=torch.int32)[:, :width]  # rows lie apart
    for row, length in enumerate(case.lengths):
        for at in range(used[row]):
            tables[slots[row], at] = blocks.pop()
        for at in range(length):
            cache[int(tables[slots[row], at // case.block_size]), at % case.block_size] = torch.randn(cached, generator=generator)
    query = (torch.randn(case.heads, rows, case.rank, generator=generator) * 3).transpose(0, 1)
    rotated = torch.randn(rows, case.heads, 24 + case.rope, generator=generator)[..., 24:] * 3
    stored = cache.to(torch.float8_e4m3fn if case.fp8 else case.dtype)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    both = query.to(case.dtype), rotated.to(case.dtype)
    return Inputs(*both, stored, tables, torch.tensor(slots) if case.indirect else None, lengths)
