# SPDX-License-Identifier: Apache-2.0
"""Cases of decode attention, in Triton's interpreter against the reference; and its kernel, compiled."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention.heuristics import DecodeTiling
from tests.support.kernels_attention import SCALES, in_int8, sinks_of
from tests.support.kernels_compiled import compiled_as

CPU = torch.device("cpu")


class Case(NamedTuple):
    """Rows of these lengths; the queries of `group` heads per KV head."""

    lengths: list[int]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    int8: bool = False
    indirect: bool = True
    extra_splits: int = 8
    tile: int = 32
    warps: int = 2
    cooperative: bool = False
    sinks: float | None = None
    merge_heads: int = 0
    merge_splits: int = 0
    chunk: int = 40


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    tables: Tensor
    rows: Tensor | None
    lengths: Tensor
    token_scales: Tensor | None = None


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    """Blocks in random order; whatever no row attends to is NaN, as stale memory may be."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(case.lengths), -(-max(case.lengths) // case.block_size) + 2
    used = [-(-length // case.block_size) for length in case.lengths]
    blocks = list(range(1, sum(used) + 1))
    random.Random(seed).shuffle(blocks)
    shape = (len(blocks) + 1, case.block_size, case.kv_heads, case.head_dim)
    caches = [torch.full(shape, float("nan")) for _ in range(2)]
    slots = random.Random(seed).sample(range(rows + 2), rows) if case.indirect else list(range(rows))
    tables = torch.zeros(rows + 2, width + 1, dtype=torch.int32)[:, :width]  # rows lie apart
    for row, length in enumerate(case.lengths):
        for at in range(used[row]):
            tables[slots[row], at] = blocks.pop()
        first = 0 if case.window is None else max(0, length - case.window)
        for at in range(first, length):
            for cache in caches:
                block = int(tables[slots[row], at // case.block_size])
                cache[block, at % case.block_size] = torch.randn(case.kv_heads, case.head_dim, generator=generator)
        if case.window is not None:
            tables[slots[row], : first // case.block_size] = 0  # stale
    query = torch.randn(rows, case.kv_heads * case.group, case.head_dim, generator=generator) * 3
    if case.fp8:
        caches = [(cache / scale).to(torch.float8_e4m3fn) for cache, scale in zip(caches, SCALES, strict=True)]
    else:
        caches = [cache.to(case.dtype) for cache in caches]
    token_scales = None
    if case.int8:
        *caches, token_scales = in_int8(*caches)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return Inputs(query.to(case.dtype), *caches, tables, torch.tensor(slots) if case.indirect else None, lengths, token_scales)


def options_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    """What the case says beside the operands."""
    scales = {"kv_scales": SCALES if case.fp8 else None, "token_scales": inputs.token_scales}
    return {"scale": case.head_dim**-0.5, "window": case.window, **scales}


def check(case: Case, workspace: Any = None, seed: int = 0) -> None:
    from phalanx.kernels import reference
    from phalanx.kernels.attention.decode import decode_attention
    from phalanx.kernels.attention.heuristics import SplitKvWorkspace

    inputs = inputs_of(case, seed)
    rest = options_of(case, inputs)
    rest["sinks"] = sinks_of(inputs.query.shape[1], case.dtype, case.sinks)
    wanted = reference.decode_attention(*inputs[:6], **rest)
    workspace = workspace or SplitKvWorkspace(CPU)
    tiling = DecodeTiling(
        case.extra_splits, case.chunk, case.tile, case.warps, 2, 255, case.cooperative, merge_heads=case.merge_heads,
        merge_splits=case.merge_splits,
    )  # fmt: skip
    out = decode_attention(*inputs[:6], **rest, workspace=workspace, tiling=tiling)
    assert not wanted.isnan().any()
    step = torch.finfo(case.dtype).eps
    torch.testing.assert_close(
        out, wanted, rtol=2 * step, atol=2 * step if case.dtype != torch.float32 else 1e-5, msg=lambda m: f"{case}: {m}"
    )
    assert all(int(counts.abs().sum()) == 0 for *_, counts in workspace._buffers), "the counts are 0 again"


CACHES = {"fp8": "*u8", "int8": "*i8"}
SIGNATURE = {
    "table_rows": "*i64", "token_scales": "*i32", **dict.fromkeys(("tables", "lengths", "arrivals", "splits"), "*i32"),
    **dict.fromkeys(("split_max", "totals", "outs"), "*fp32"), **dict.fromkeys(("score_scale", "value_scale"), "fp32"),
    **dict.fromkeys(("table_stride", "window"), "i32"),
}  # fmt: skip


def compiled_kernel(tiling: DecodeTiling, dtype: str, *, kv: str, group: int, head_dim: int, early: bool, arch: int) -> Any:
    """The kernel as Triton compiles it for 8 KV heads."""
    from triton import next_power_of_2

    from phalanx.kernels.attention import decode

    heads, lanes = 8 if group <= 8 else 16, next_power_of_2(group)
    constants = {
        "GROUP": group, "KV_HEADS": 8, "DIM": head_dim, "WIDTH": next_power_of_2(head_dim), "HEADS": heads, "LANES": lanes,
        "BLOCK_SIZE": 16, "AT_ONCE": tiling.merge_splits or min(16, max(1, 16 * tiling.warps // lanes)),
        "BLOCK": tiling.merge_splits > 0, "PREFETCH": tiling.prefetch, "TILE": tiling.tile,
        "APART": 1 if tiling.cooperative else tiling.warps, "STAGES": tiling.stages, "INDIRECT": not tiling.extra_splits,
        "WINDOWED": head_dim == 64, "EARLY": early, "SM": arch, **({} if tiling.extra_splits else {"splits": None}),
        **({} if head_dim == 64 else {"sinks": None}), **({} if kv == "int8" else {"token_scales": None}),
        **({"arrivals": None} if tiling.merge_heads else {}),
    }  # fmt: skip
    kinds = {}
    for name in decode._decode.arg_names:
        kinds[name] = SIGNATURE.get(name, CACHES.get(kv, dtype) if name.endswith("cache") else dtype)
    aligned = [name for name, kind in kinds.items() if kind[0] == "*"]
    return compiled_as(decode._decode, kinds, constants, arch, aligned=aligned, num_warps=tiling.warps, maxnreg=tiling.registers)
