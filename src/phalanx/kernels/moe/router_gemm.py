# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The router's GEMM for few tokens: a weight of few rows, which one program for each tile of rows would be long to read.

    parts[s, t, e] = sum over columns k of part s of x[t, k] * weight[e, k]        in fp32

Programs share the columns (split-K); `topk_softmax` adds up the parts, always in the same order. The first tile of the weight is
loaded before the kernel waits for the one before it, since no kernel writes weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.moe.heuristics import RouterTiling


@triton.jit(do_not_specialize=["tokens"])
def _router_gemm(
    x, weight, parts, tokens, experts, hidden, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    part = tl.program_id(2)
    column = part * (TILES * BLOCK) + tl.arange(0, BLOCK)
    is_expert, is_token = (expert < experts)[:, None], (token < tokens)[None, :]
    weight_place = weight + expert[:, None] * hidden + column[None, :]
    next_weights = tl.load(weight_place, is_expert & (column < hidden)[None, :], 0.0)
    if SM >= 90:
        gdc_wait()
    x_place = x + token[None, :].to(tl.int64) * hidden + column[:, None]
    total = tl.zeros([EXPERTS, TOKENS], tl.float32)
    for tile in range(TILES):
        weights = next_weights
        if TILES > 1:
            inside = (column + (tile + 1) * BLOCK < hidden)[None, :] & (tile + 1 < TILES)
            next_weights = tl.load(weight_place + (tile + 1) * BLOCK, is_expert & inside, 0.0)
        values = tl.load(x_place + tile * BLOCK, is_token & (column + tile * BLOCK < hidden)[:, None], 0.0)
        total = tl.dot(weights, values, total)
    row = part.to(tl.int64) * tokens + token
    tl.store(parts + row[None, :] * experts + expert[:, None], total, is_expert & is_token)


def router_gemm(x: Tensor, weight: Tensor, tiling: RouterTiling) -> Tensor:
    """x [T, H], weight [E, H], both contiguous in bf16 or fp16 -> parts [S, T, E] fp32, whose sum over S is x times weight
    transposed."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    splits = triton.cdiv(hidden, tiling.block * tiling.tiles)
    parts = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    sm = sm_arch(x.device)
    _router_gemm[(triton.cdiv(tokens, tiling.tokens), triton.cdiv(experts, tiling.experts), splits)](
        x, weight, parts, tokens, experts, hidden, TOKENS=tiling.tokens, EXPERTS=tiling.experts, BLOCK=tiling.block,
        TILES=tiling.tiles, SM=sm, num_warps=tiling.warps, num_stages=2 if tiling.tiles > 1 else 1, launch_pdl=sm >= 90,
    )  # fmt: skip
    return parts
