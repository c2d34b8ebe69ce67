# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""GEMM with a weight in e4m3 that has a scale per row and 128 columns, as DeepSeek-V3 (arXiv 2412.19437, 3.3.2) does it.

    out[t, n] = round(sum over blocks b of (sum over k in b of x[t, k] * weight[n, k]) * x_scale[t, b] * scale[n, b])

Each block is summed by the tensor cores, and its sum is scaled and added up in fp32 outside of them: their own sums of e4m3 keep
fewer bits. x is in e4m3 with a scale per row and block; or in 16 bit, without scales: then the weight is widened in registers,
which any GPU can do.

Weights are the rows of a tile and tokens its columns, of which tensor cores take any multiple of 8, where rows come in 64. Programs
that part_blocks a tile (split-K) leave fp32 sums, which a second kernel adds up in their order: the same bits each time. Weights,
which no kernel writes, are prefetched before the kernel waits for the one before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm.block_heuristics import BLOCK_K, BlockTiling
from phalanx.kernels.gemm.per_token_group_quant import PITCH, empty_scales
from phalanx.kernels.quantize import widened
from phalanx.kernels.vectors import nearest

BLOCK_COLUMNS = tl.constexpr(BLOCK_K)
"""Columns of a block."""
GROUP_TILES = tl.constexpr(16)
"""Tiles of tokens that go through the weight at the same time: what they read stays in the L2 cache."""
PARTS_BLOCK = 1024
"""Outputs for which one program of the second kernel adds up the parts."""


@triton.jit
def _prefetch(weight, row, inputs, block, SKIP: tl.constexpr):
    """Prefetch a tile's block of columns into the L2 cache."""
    column = tl.maximum(block * BLOCK_COLUMNS - SKIP, 0)
    place = weight + row.to(tl.int64) * inputs + tl.minimum(column, inputs - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def _tile_of(tiles_n, tiles_t):
    """(tile of rows, tile of tokens, part) of this program: GROUP_TILES tiles of tokens beside each other, row by row."""
    part, program = tl.program_id(1), tl.program_id(0)
    of_group = GROUP_TILES * tiles_n
    first = program // of_group * GROUP_TILES
    beside = tl.minimum(tiles_t - first, GROUP_TILES)
    return program % of_group // beside, first + program % beside, part


@triton.jit(do_not_specialize=["tokens", "blocks", "tiles_n", "tiles_t", "part_blocks"])
def _block_scaled_gemm(
    x, x_scale, weight, scale, out, tokens, pitch, outputs, inputs, blocks, tiles_n, tiles_t, part_blocks, SKIP: tl.constexpr,
    FULL: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, PREFETCH: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """x_scale [blocks, pitch], pitch a multiple of TOKENS; or None, for x in 16 bit and a weight in uint8. FULL: all blocks have
    128 columns. part_blocks: blocks of one part. out: [tokens, outputs], or fp32 [parts, tokens, outputs]."""
    if SM >= 90:
        gdc_launch_dependents()
    tile_n, tile_t, part = _tile_of(tiles_n, tiles_t)
    row, token = tile_n * ROWS + tl.arange(0, ROWS), tile_t * TOKENS + tl.arange(0, TOKENS)
    # Rows and tokens beyond the last repeat the last, and are not stored.
    real_row, real_token = tl.minimum(row, outputs - 1), tl.minimum(token, tokens - 1)
    first = part * part_blocks
    last = tl.minimum(first + part_blocks, blocks)
    if SM >= 90:
        for ahead in tl.static_range(PREFETCH):
            _prefetch(weight, real_row, inputs, tl.minimum(first + ahead, blocks - 1), SKIP)
        gdc_wait()
    column = tl.arange(0, BLOCK_COLUMNS)[None, :] - SKIP
    weight_place = weight + real_row[:, None].to(tl.int64) * inputs + column
    x_place = x + real_token[:, None].to(tl.int64) * inputs + column
    scale_place = scale + real_row.to(tl.int64) * blocks
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    # Scales come one step ahead: their loads are no operands of a product, which alone are pipelined.
    factor = tl.load(scale_place + first)
    if x_scale is not None:
        x_factor = tl.load(x_scale + first * pitch + token)
    for block in range(first, last):
        at, next_block = block * BLOCK_COLUMNS, tl.minimum(block + 1, last - 1)
        next_factor = tl.load(scale_place + next_block)
        if FULL:
            w, v = tl.load(weight_place + at), tl.load(x_place + at)
        else:
            inside = (column + at >= 0) & (column + at < inputs)
            w, v = tl.load(weight_place + at, inside, 0.0), tl.load(x_place + at, inside, 0.0)
        if x_scale is not None:
            next_x_factor = tl.load(x_scale + next_block * pitch + token)
            total += tl.dot(w, tl.trans(v)) * x_factor[None, :] * factor[:, None]
            x_factor = next_x_factor
        else:
            values = widened(w, total, SM)
            if SM == 0:  # the interpreter does not multiply bf16
                total += tl.dot(values, tl.trans(v.to(tl.float32)), input_precision="ieee") * factor[:, None]
            else:
                total += tl.dot(values.to(v.dtype), tl.trans(v)) * factor[:, None]
        factor = next_factor
    inside = (row < outputs)[:, None] & (token < tokens)[None, :]
    place = out + token[None, :].to(tl.int64) * outputs + row[:, None]
    if PARTS:
        tl.store(place + part.to(tl.int64) * tokens * outputs, total, inside)
    else:
        tl.store(place, nearest(total, tl.zeros([ROWS, TOKENS], out.dtype.element_ty), SM), inside)


@triton.jit(do_not_specialize=["size", "count"])
def _add_parts(parts, out, size, count, BLOCK: tl.constexpr, SM: tl.constexpr):
    """parts [count, size] -> out [size]."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, 0.0)
    for part in range(1, count):
        total += tl.load(parts + at + size.to(tl.int64) * part, inside, 0.0)
    tl.store(out + at, nearest(total, tl.zeros([BLOCK], out.dtype.element_ty), SM), inside)


def block_scaled_gemm(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, begin: int, tiling: BlockTiling
) -> Tensor:  # fmt: skip
    """x [T, in] times weight [out, in] e4m3 with scale [out, blocks] fp32, contiguous -> [T, out] in `dtype`.

    x in e4m3 with x_scale [T, blocks], as `per_token_group_quant_fp8` gives them; or in bf16 or fp16 and x_scale None. begin: which
    column of its block of 128 the first one is. `in`, out and begin are multiples of 16."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    blocks, sm = scale.shape[1], sm_arch(x.device)
    tiles_n, tiles_t = triton.cdiv(outputs, tiling.rows), triton.cdiv(tokens, tiling.tokens)
    part_blocks = triton.cdiv(blocks, tiling.parts)
    parts = triton.cdiv(blocks, part_blocks)
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    sums = torch.empty((parts, tokens, outputs), dtype=torch.float32, device=x.device) if parts > 1 else out
    if not tokens:
        return out
    if x_scale is not None and (x_scale.stride(0) != 1 or x_scale.stride(1) % PITCH):
        x_scale = empty_scales(tokens + 1, blocks, x.device)[:tokens].copy_(x_scale)
    _block_scaled_gemm[(tiles_n * tiles_t, parts)](
        x, x_scale, weight if x_scale is not None else weight.view(torch.uint8), scale, sums, tokens,
        0 if x_scale is None else x_scale.stride(1), outputs, inputs, blocks, tiles_n, tiles_t, part_blocks,
        SKIP=begin, FULL=begin == 0 and inputs % BLOCK_COLUMNS.value == 0, PARTS=parts > 1, ROWS=tiling.rows, TOKENS=tiling.tokens,
        PREFETCH=min(tiling.stages, 4), SM=sm, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=sm >= 90,
    )  # fmt: skip
    if parts > 1:
        _add_parts[(triton.cdiv(out.numel(), PARTS_BLOCK),)](
            sums, out, out.numel(), parts, BLOCK=PARTS_BLOCK, SM=sm, num_warps=4, launch_pdl=sm >= 90
        )
    return out
