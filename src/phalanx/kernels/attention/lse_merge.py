# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The outputs that several ranks have of the same heads, each over its part of a row's tokens, merged by log-sum-exp.

out = sum over ranks of softmax over ranks(lse)[r] * part[r]                      see `dispatch.merge_by_lse`
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.vectors import nearest


@triton.jit
def _lse_merge(
    parts, logs, out, count, PITCH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, SM: tl.constexpr
):
    """Program (one head of one row, of `count` on each rank). PITCH: elements of a part, its log-sum-exp behind them, which `logs`
    has, the same memory in fp32."""
    item, dim = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    WORDS: tl.constexpr = 4 // (out.dtype.element_ty.primitive_bitwidth // 8)
    top = tl.load(logs + (item * PITCH + WIDTH) // WORDS)
    for rank in tl.static_range(1, RANKS):
        top = tl.maximum(top, tl.load(logs + ((rank * count + item) * PITCH + WIDTH) // WORDS))
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([LANES], tl.float32)
    like = tl.zeros([1], out.dtype.element_ty)
    for rank in tl.static_range(RANKS):
        place = (rank * count + item) * PITCH
        weight = tl.exp(tl.load(logs + (place + WIDTH) // WORDS) - top)
        part = tl.load(parts + place + dim, dim < WIDTH, 0.0).to(tl.float32)
        total += weight
        merged += part * weight
    tl.store(out + item * WIDTH + dim, nearest(merged / total, like, SM), dim < WIDTH)


def merge_by_lse(received: Tensor, width: int) -> Tensor:
    """The kernel of `dispatch.merge_by_lse`, for a contiguous tensor and an even width."""
    ranks, tokens, heads, pitch = received.shape
    out = received.new_empty(tokens, heads, width)
    if out.numel():
        _lse_merge[(tokens * heads,)](
            received, received.view(torch.float32), out, tokens * heads, PITCH=pitch, WIDTH=width,
            LANES=triton.next_power_of_2(width), RANKS=ranks, SM=sm_arch(received.device), num_warps=4,
        )  # fmt: skip
    return out
