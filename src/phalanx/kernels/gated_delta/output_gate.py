# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""x * sigmoid(gate) in one pass: of attention, a gate for each value; of shared experts, one for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.gated_delta.chunks import sigmoid
from phalanx.kernels.vectors import nearest

BLOCK = 1024


@triton.jit
def _sigmoid_mul(x, gate, out, width, pitch, ONE: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * width + column, mask, 0.0)
    if ONE:
        gates = tl.load(gate + row * pitch).to(tl.float32)
    else:
        gates = tl.load(gate + row * pitch + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * width + column, nearest(values.to(tl.float32) * sigmoid(gates), values, SM), mask)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """The kernel of `reference.sigmoid_mul`, for contiguous x and a gate whose rows are contiguous."""
    (tokens, width), out = x.shape, torch.empty_like(x)
    if tokens:
        sm = sm_arch(x.device)
        _sigmoid_mul[(tokens, triton.cdiv(width, BLOCK))](
            x, gate, out, width, gate.stride(0), ONE=gate.shape[1] == 1, BLOCK=BLOCK, SM=sm, num_warps=4, launch_pdl=sm >= 90
        )
    return out
