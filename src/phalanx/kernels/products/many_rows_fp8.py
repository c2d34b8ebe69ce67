# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Many rows times a matrix in e4m3, for Hopper and later: tiles come by tensor descriptors, both scales are in the epilogue.

    out[t, n] = round((sum over k of x[t, k] * weight[n, k]) * x_scale[t] * scale[n])          rounded once

The sum is the tensor cores' own, as with `use_fast_accum` of `torch._scaled_mm`. Programs stay and take one tile after the other:
GROUP tiles of tokens go down the weight's rows together, so that what they share is in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from phalanx.kernels.between.silu_gate import nearest
from phalanx.kernels.products.choice import ManyRows
from phalanx.kernels.residual_rms_norm import capability

GROUP = tl.constexpr(8)


@triton.jit
def _many_rows_fp8(
    x, x_scale, weight, scale, out, tokens, rows, turns, COLUMNS: tl.constexpr, PER_TOKEN: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """x, weight, out: tensor descriptors, which give zeros and store nothing beyond their ends. KIND: the dtype of out."""
    if PTX >= 90:
        gdc_launch_dependents()
        gdc_wait()
    down, across = tl.cdiv(tokens, TOKENS), tl.cdiv(rows, ROWS)
    for turn in tl.range(0, turns, flatten=True):
        tile = turn * tl.num_programs(0) + tl.program_id(0)
        group = tile // (GROUP * across)
        high = tl.maximum(tl.minimum(down - group * GROUP, GROUP), 1)
        inside = tile % (GROUP * across)
        token = (group * GROUP + inside % high) * TOKENS
        row = (inside // high) * ROWS
        total = tl.zeros([TOKENS, ROWS], tl.float32)
        for step in tl.range(0, (COLUMNS + BLOCK - 1) // BLOCK):
            left, right = x.load([token, step * BLOCK]), weight.load([row, step * BLOCK])
            total = tl.dot(left, right.T, total)
        any_row, any_token = row + tl.arange(0, ROWS), token + tl.arange(0, TOKENS)
        if PER_TOKEN:
            total *= tl.load(x_scale + any_token, any_token < tokens, 0.0)[:, None]
        else:
            total *= tl.load(x_scale)
        total *= tl.load(scale + any_row, any_row < rows, 0.0)[None, :]
        out.store([token, row], nearest(total, tl.zeros([1, 1], KIND), PTX))


KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def many_rows_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, out: Tensor | None = None,
    tiling: ManyRows,
) -> Tensor:  # fmt: skip
    """x [T, in] e4m3 with x_scale [T, 1] or () times weight [out, in] e4m3 with scale [out] -> [T, out] in `dtype` (bf16, fp16), in
    `out` where one is given. All contiguous; `in` a multiple of 16, `out` of 8."""
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device) if out is None else out
    tiles = triton.cdiv(tokens, tiling.tokens) * triton.cdiv(outputs, tiling.rows)
    programs, ptx = tiles, capability(x.device)
    if tiling.per_processor and ptx:
        programs = min(tiles, tiling.per_processor * torch.cuda.get_device_properties(x.device).multi_processor_count)
    _many_rows_fp8[(programs,)](
        TensorDescriptor.from_tensor(x, [tiling.tokens, tiling.block]), x_scale,
        TensorDescriptor.from_tensor(weight, [tiling.rows, tiling.block]), scale,
        TensorDescriptor.from_tensor(out, [tiling.tokens, tiling.rows]), tokens, outputs, triton.cdiv(tiles, programs),
        COLUMNS=inputs, PER_TOKEN=x_scale.numel() == tokens > 1, TOKENS=tiling.tokens, ROWS=tiling.rows, BLOCK=tiling.block,
        KIND=KINDS[out.dtype], PTX=ptx, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=ptx >= 90,
    )  # fmt: skip
    return out
