# SPDX-License-Identifier: Apache-2.0
"""Batches of prefill rows, for the tests of the kernels that compute their attention."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention.heuristics import PrefillTiling
from tests.support.kernels_attention import SCALES, in_int8, sinks_of

KEPT = 7.0
"""What `out` holds where there is no row."""


class Case(NamedTuple):
    """Rows of (tokens, KV length). before, after: tokens of no row about those of the rows; padding: rows without tokens."""

    rows: list[tuple[int, int]]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    int8: bool = False
    indirect: bool = True
    before: int = 2
    after: int = 3
    padding: int = 3
    tiling: PrefillTiling = PrefillTiling(64, 32, 4, 2)
    sinks: float | None = None


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    tables: Tensor
    table_rows: Tensor | None
    starts: Tensor
    lengths: Tensor
    token_scales: Tensor | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        return self[:7]


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    """Blocks in random order; whatever no row attends to is NaN, as stale memory may be."""
    generator = torch.Generator().manual_seed(seed)
    rows = [*case.rows, *([(0, 1)] * case.padding)]
    used = [-(-length // case.block_size) for count, length in rows if count]
    blocks = list(range(1, sum(used) + 1))
    random.Random(seed).shuffle(blocks)
    shape = (len(blocks) + 1, case.block_size, case.kv_heads, case.head_dim)
    caches = [torch.full(shape, float("nan")) for _ in range(2)]
    slots = random.Random(seed).sample(range(len(rows) + 2), len(rows)) if case.indirect else list(range(len(rows)))
    width = max(used, default=0) + 1
    tables = torch.zeros(len(rows) + 2, width + 1, dtype=torch.int32)[:, :width]  # rows lie apart
    starts = [case.before]
    for slot, (count, length) in zip(slots, rows, strict=True):
        starts.append(starts[-1] + count)
        first = 0 if case.window is None else max(0, length - count + 1 - case.window)
        if not count:
            continue
        for at in range(-(-length // case.block_size)):
            tables[slot, at] = blocks.pop() if at >= first // case.block_size else 0
        for at in range(first, length):
            for cache in caches:
                new = torch.randn(case.kv_heads, case.head_dim, generator=generator)
                cache[int(tables[slot, at // case.block_size]), at % case.block_size] = new
    query = torch.randn(starts[-1] + case.after, case.kv_heads * case.group, case.head_dim, generator=generator) * 3
    if case.fp8:
        caches = [(cache / scale).to(torch.float8_e4m3fn) for cache, scale in zip(caches, SCALES, strict=True)]
    else:
        caches = [cache.to(case.dtype) for cache in caches]
    token_scales = None
    if case.int8:
        *caches, token_scales = in_int8(*caches)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    table_rows = torch.tensor(slots) if case.indirect else None
    starts_of_rows = torch.tensor(starts, dtype=torch.int32)
    return Inputs(query.to(case.dtype), caches[0], caches[1], tables, table_rows, starts_of_rows, lengths, token_scales)


def options(case: Case, inputs: Inputs, device: str = "cpu") -> dict[str, Any]:
    sinks = sinks_of(case.kv_heads * case.group, case.dtype, case.sinks)
    return {
        "scale": case.head_dim**-0.5, "window": case.window, "kv_scales": SCALES if case.fp8 else None,
        "token_scales": inputs.token_scales, "sinks": None if sinks is None else sinks.to(device),
    }  # fmt: skip


def assert_near(case: Case, out: Tensor, wanted: Tensor) -> None:
    step = 2 * torch.finfo(case.dtype).eps
    assert not wanted.isnan().any()
    torch.testing.assert_close(out, wanted, rtol=step, atol=max(step, 1e-5), msg=lambda message: f"{case}: {message}")


SIGNATURE = {
    "table_rows": "*i64", "token_scales": "*i32", **dict.fromkeys(("tables", "starts", "lengths"), "*i32"),
    **dict.fromkeys(("split_max", "totals", "outs"), "*fp32"), "arrivals": "*i32",
    **dict.fromkeys(("score_scale", "value_scale"), "fp32"),
    **dict.fromkeys(("table_stride", "rows", "window", "programs", "waves", "early"), "i32"),
}  # fmt: skip
"""How Triton names the arguments."""
