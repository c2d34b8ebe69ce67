# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMM whose rows do not depend on each other: a token's output has the same bits alone and among any others.

    out[t, n] = round((sum over k of x[t, k] * weight[n, k]) * x_scale[t] * weight_scale[n] + bias[n])

The products of one output are added in the order of k, by the same instruction, however many tokens there are: no split-K, tokens
are always the rows of the tensor cores' product, and a tile has at least the 64 of Hopper's. Tiles differ in how many products they
hold, which no output sees: `tests/kernels/test_batch_invariant.py` compares their bits on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import gpu, sm_arch
from phalanx.kernels.gemm.block_heuristics import BlockTiling
from phalanx.kernels.vectors import nearest

BESIDE = tl.constexpr(8)
"""Tiles of tokens that go through the weight together, so that what they read of it stays in the L2 cache."""


class Tiling(NamedTuple):
    """tokens, rows: of x and of the weight in a tile; bytes: of a row of either that a k step reads."""

    tokens: int
    rows: int
    bytes: int
    warps: int
    stages: int


FEW_TOKENS, SOME_TOKENS = 64, 1024
LEAST_TILES, SOME_TILES, MANY_TILES = Tiling(64, 32, 256, 4, 6), Tiling(64, 64, 256, 4, 6), Tiling(64, 64, 128, 4, 6)
"""Up to FEW_TOKENS, by the outputs: the fewer tiles they are, the more k steps are under way. At one and at 64 tokens they are as
fast as cuBLAS on an H200, within 5 percent."""
TILINGS = (LEAST_TILES, SOME_TILES, MANY_TILES, Tiling(128, 128, 128, 8, 4), Tiling(128, 256, 128, 8, 3))
BLOCK_TILING = BlockTiling(64, 64, 4, 4)
"""Of `block_scaled_gemm`, for any number of tokens."""


def select(tokens: int, outputs: int) -> Tiling:
    if tokens > FEW_TOKENS:
        return TILINGS[3] if tokens <= SOME_TOKENS else TILINGS[4]
    return LEAST_TILES if outputs <= 5120 else SOME_TILES if outputs <= 16384 else MANY_TILES


@triton.jit
def _dot(x, w, total, SM: tl.constexpr):
    if SM == 0:  # Triton's interpreter multiplies neither bf16 nor e4m3
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens"])
def _batch_invariant_gemm(
    x, weight, bias, x_scale, weight_scale, out, tokens, outputs, inputs, x_pitch, out_pitch,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    program, tiles, across = tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, ROWS)
    group = program // (BESIDE * across)
    beside = tl.minimum(tiles - group * BESIDE, BESIDE)
    token = (group * BESIDE + program % (BESIDE * across) % beside) * TOKENS + tl.arange(0, TOKENS)
    row = program % (BESIDE * across) // beside * ROWS + tl.arange(0, ROWS)
    column, valid = tl.arange(0, COLUMNS), token < tokens
    own = tl.minimum(row, outputs - 1).to(tl.int64)  # rows beyond the last repeat the last, and are not stored
    x_place = x + token.to(tl.int64)[:, None] * x_pitch + column[None, :]
    w_place = weight + own[None, :] * inputs + column[:, None]
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for at in range(0, inputs, COLUMNS):
        if FULL:
            values = tl.load(x_place + at, valid[:, None], 0.0)
            w = tl.load(w_place + at)
        else:
            values = tl.load(x_place + at, valid[:, None] & (column[None, :] + at < inputs), 0.0)
            w = tl.load(w_place + at, column[:, None] + at < inputs, 0.0)
        total = _dot(values, w, total, SM)
    if x_scale is not None:
        total = total * tl.load(x_scale + token, valid, 0.0)[:, None] * tl.load(weight_scale + own)[None, :]
    if bias is not None:
        total += tl.load(bias + own).to(tl.float32)[None, :]
    place = out + token.to(tl.int64)[:, None] * out_pitch + row[None, :]
    tl.store(place, nearest(total, tl.load(place, False, 0.0), SM), valid[:, None] & (row < outputs)[None, :])


def batch_invariant_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scales: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None, dtype: torch.dtype | None = None, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """x [T, in] times weight [out, in] transposed, plus bias [out] -> [T, out], in `dtype` (x's where none is given), or in `out`,
    whose rows are contiguous. x and weight are in the same dtype; scales: fp32 of x's rows [T, 1] and of the weight's [out], of
    values in e4m3."""
    tokens, (outputs, inputs) = len(x), weight.shape
    out = torch.empty(tokens, outputs, dtype=dtype or x.dtype, device=x.device) if out is None else out
    if not tokens:
        return out
    tiling, sm = tiling or select(tokens, outputs), sm_arch(x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    columns = tiling.bytes // x.element_size()
    stages = min(tiling.stages, max(2, gpu(x.device).shared_memory // ((tiling.tokens + tiling.rows) * tiling.bytes)))
    x_scale, weight_scale = (None, None) if scales is None else (scales[0].expand(tokens, 1).contiguous(), scales[1])
    _batch_invariant_gemm[(triton.cdiv(tokens, tiling.tokens) * triton.cdiv(outputs, tiling.rows),)](
        x, weight, bias, x_scale, weight_scale, out, tokens, outputs, inputs, x.stride(0), out.stride(0), TOKENS=tiling.tokens,
        ROWS=tiling.rows, COLUMNS=columns, FULL=inputs % columns == 0, SM=sm, num_warps=tiling.warps, num_stages=stages,
        launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
