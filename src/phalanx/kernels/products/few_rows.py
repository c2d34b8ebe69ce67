# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""A few rows (up to 128) times a matrix, as fast as the matrix can be read: e4m3 with scales (Ada and later), or bf16 and fp16.

    out[t, n] = round((sum over k of x[t, k] * weight[n, k]) * x_scale[t] * scale[n])          in fp32, rounded once

The weight is the left operand of the tensor cores, so that their 64 rows are all at work whatever the number of tokens is. A
program has some rows of the weight and, where those are too few programs, a part of the columns: then it leaves its fp32 sums in
`partials`, and the last program of those rows to arrive adds them in the order of the columns, so that the result is the same each
time. Before the kernel waits for the one before it, it calls its first tiles of the weight, which no kernel writes, into L2.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.errors import EngineError
from phalanx.kernels.between.silu_gate import nearest
from phalanx.kernels.products.choice import FewRows
from phalanx.kernels.residual_rms_norm import capability

MOST_TOKENS = 128
COUNTERS = 1 << 16
LINE = tl.constexpr(128)  # bytes that one prefetch calls


@triton.jit
def _call_to_l2(weight, row, begin, end, COLUMNS: tl.constexpr, BYTES: tl.constexpr):
    """The lines of BYTES bytes of each row from column `begin`, none past `end`."""
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    column = begin + tl.arange(0, BYTES // LINE) * (LINE // SIZE)
    place = weight + row[:, None].to(tl.int64) * COLUMNS + tl.minimum(column, end - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sums(
    x, weight, row, token, begin, COLUMNS: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    PROMOTE: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """[rows, tokens] fp32 over SHARE columns from `begin`. WHOLE: there are as many."""
    column = tl.arange(0, BLOCK)
    left = weight + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    right = x + token[None, :] * COLUMNS + column[:, None]
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for step in tl.range(0, SHARE // BLOCK, num_stages=STAGES):
        at = begin + step * BLOCK
        if WHOLE:
            tile, factor = tl.load(left + at), tl.load(right + at)
        else:
            tile = tl.load(left + at, (at + column < COLUMNS)[None, :], 0.0)
            factor = tl.load(right + at, (at + column < COLUMNS)[:, None], 0.0)
        if PTX == 0:  # the interpreter multiplies bf16's bits
            tile, factor = tile.to(tl.float32), factor.to(tl.float32)
        total = tl.dot(tile, factor, total, max_num_imprecise_acc=PROMOTE)
    return total


@triton.jit
def _few_rows(
    x, x_scale, weight, scale, out, partials, arrived, tokens, rows,
    COLUMNS: tl.constexpr, SCALED: tl.constexpr, PER_TOKEN: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PROMOTE: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program: rows tile * ROWS .. and the split-th part of the columns. TOKENS: tokens up to a power of 2. Rows and tokens past
    the last one are the last one again, and nobody stores them."""
    if PTX >= 90:
        gdc_launch_dependents()
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    own = tile * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(own, rows - 1)
    any_token = tl.arange(0, TOKENS)
    token = tl.minimum(any_token, tokens - 1)
    SHARE: tl.constexpr = ((COLUMNS + BLOCK - 1) // BLOCK + SPLITS - 1) // SPLITS * BLOCK
    begin = split * SHARE
    if PTX >= 90:
        if AHEAD:
            end = tl.minimum(begin + SHARE, COLUMNS)
            _call_to_l2(weight, row, begin, end, COLUMNS, AHEAD * BLOCK * weight.dtype.element_ty.primitive_bitwidth // 8)
        gdc_wait()
    total = _sums(x, weight, row, token, begin, COLUMNS, SHARE, BLOCK, COLUMNS % (SHARE * SPLITS) == 0, PROMOTE, STAGES, PTX)
    if SPLITS > 1:
        place = tl.arange(0, ROWS)[:, None] * TOKENS + any_token[None, :]
        mine = partials + (tile * SPLITS + split).to(tl.int64) * (ROWS * TOKENS)
        tl.store(mine + place, total)
        tl.debug_barrier()  # all threads' sums are stored before one of them says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            first = partials + tile.to(tl.int64) * (SPLITS * ROWS * TOKENS)
            total = tl.zeros([ROWS, TOKENS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(first + other * (ROWS * TOKENS) + place, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    else:
        last = True
    if last:
        if SCALED:
            if PER_TOKEN:
                total *= tl.load(x_scale + token)[None, :]
            else:
                total *= tl.load(x_scale)
            total *= tl.load(scale + row)[:, None]
        value = nearest(total, tl.zeros([1, 1], out.dtype.element_ty), PTX)
        tl.store(
            out + any_token[None, :].to(tl.int64) * rows + own[:, None],
            value,
            (any_token < tokens)[None, :] & (own < rows)[:, None],
        )


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros [COUNTERS] int32, which each launch leaves as zeros: kernels on one stream share them, since each waits for the one
    before it. The first call may not be captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise EngineError(
            "a product asked for its counters while a graph is captured",
            why="they would be zeros only once that graph ran",
            next="run the product once before the capture",
        )
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def few_rows(
    x: Tensor, weight: Tensor, *, tiling: FewRows, x_scale: Tensor | None = None, scale: Tensor | None = None,
    dtype: torch.dtype | None = None, out: Tensor | None = None, promote: bool = True,
) -> Tensor:  # fmt: skip
    """x [T, in], T up to 128, times weight [out, in], both contiguous in one of e4m3, bf16, fp16 -> [T, out] in `dtype` (None:
    x's), in `out` where one is given.

    x_scale [T, 1] or (), scale [out]: fp32, for e4m3. promote: each tile's sum is added in fp32, as Hopper's tensor cores alone do
    not for e4m3.
    """
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((tokens, outputs), dtype=dtype or x.dtype, device=x.device) if out is None else out
    tiles, splits = triton.cdiv(outputs, tiling.rows), tiling.splits
    padded = max(16, triton.next_power_of_2(tokens))
    partials = arrived = out
    if splits > 1:
        partials = torch.empty(tiles * splits * tiling.rows * padded, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
        assert tiles <= COUNTERS
    ptx = capability(x.device)
    scaled = x_scale is not None and scale is not None
    _few_rows[(tiles * splits,)](
        x, x_scale if scaled else x, weight, scale if scaled else x, out, partials, arrived, tokens, outputs,
        COLUMNS=inputs, SCALED=scaled, PER_TOKEN=x_scale is not None and x_scale.numel() == tokens > 1, TOKENS=padded,
        ROWS=tiling.rows, BLOCK=tiling.block, SPLITS=splits, PROMOTE=tiling.block if promote and x.element_size() == 1 else 0,
        STAGES=tiling.stages, AHEAD=tiling.ahead, PTX=ptx, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=ptx >= 90,
    )  # fmt: skip
    return out
