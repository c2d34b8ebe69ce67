# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Quantization to e4m3 with a scale per token and 128 columns, for GEMMs with weights that are scaled by block.

    quantized: e4m3(x / scale), scale = largest |x| of the group / 448                   see `reference.per_token_group_quant_fp8`

A program has some groups of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gemm import block_heuristics
from phalanx.kernels.quantize import e4m3_byte, scale_of
from phalanx.kernels.vectors import largest_along

GROUP = tl.constexpr(block_heuristics.BLOCK_K)
PITCH = 128
"""The scales of a group take a multiple of so many tokens: a tile's scales then begin on 16 bytes, and tokens that a tile has
beyond the last have memory."""
MANY_GROUPS, FEW_GROUPS = 32, 8
"""Groups of one program: where tokens are many, and where they are few."""


@triton.jit(do_not_specialize=["pitch", "groups"])
def _per_token_group_quant(
    x, out, scales, counts, pitch, columns, groups, SKIP: tl.constexpr, GROUPS: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """scales [groups, pitch]: GEMMs read those of adjacent tokens together. counts: see `per_token_group_quant_fp8`."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    if counts is not None and row >= tl.load(counts + 1):
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, :] - SKIP
    mask = (column >= 0) & (column < columns)
    begin = row.to(tl.int64) * columns
    value = tl.load(x + begin + column, mask, 0.0).to(tl.float32)
    scale = scale_of(largest_along(tl.abs(value), 1))
    tl.store(scales + group * pitch + row, scale, group < groups)
    tl.store(out + begin + column, e4m3_byte(value * tl.div_rn(1.0, scale), SM), mask)


def empty_scales(tokens: int, groups: int, device: torch.device) -> Tensor:
    """[tokens, groups] fp32, adjacent tokens adjacent in memory; the scales of a single token are contiguous."""
    pitch = 1 if tokens == 1 else triton.cdiv(tokens, PITCH) * PITCH
    return torch.empty((groups, pitch), dtype=torch.float32, device=device)[:, :tokens].t()


def per_token_group_quant_fp8(
    x: Tensor, begin: int = 0, *, rows: int | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel of `reference.per_token_group_quant_fp8` for groups of 128; x [T, in] contiguous in bf16, fp16 or fp32, `in` and
    begin multiples of 16. The scales [T, groups] lie with tokens side by side, a group's padded to a multiple of `PITCH`: as
    `block_scaled_gemm` reads them.

    rows: of both results instead of T; rows beyond T are not set, and a group's scales follow those of the group before without a
    gap, as torch reads them. counts [2] int32: rows of x from counts[1] on are not quantized, and not set either."""
    tokens, columns = x.shape
    groups = triton.cdiv(begin + columns, GROUP.value)
    out = torch.empty((rows or tokens, columns), dtype=torch.float8_e4m3fn, device=x.device)
    if rows is None:
        scales = empty_scales(tokens, groups, x.device)
    else:
        scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device).t()
    if tokens:
        sm = sm_arch(x.device)
        groups_per_program = MANY_GROUPS if tokens > block_heuristics.FEW_TOKENS else FEW_GROUPS
        _per_token_group_quant[(tokens, triton.cdiv(groups, groups_per_program))](
            x, out.view(torch.uint8), scales, counts, scales.stride(1), columns, groups, SKIP=begin,
            GROUPS=groups_per_program, SM=sm, num_warps=4 if groups_per_program == MANY_GROUPS else 2, launch_pdl=sm >= 90,
        )  # fmt: skip
    return out, scales
