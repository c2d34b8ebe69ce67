# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The weighted sum of each token's experts.

    out[t] = round(sum over slots s of weights[t, s] * (sum over parts of values[part, t * top_k + s]) + plus[t])

In fp32 and in the order of slots: the same bits each time. Experts of other ranks are left out: nothing has written their rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.vectors import nearest

_BLOCK, _BLOCK_OF_PARTS = 1024, 512
"""Columns of a program; where there are parts, so few that all loads of a column fit in registers together."""


@triton.jit(do_not_specialize=["first", "tokens"])
def _combine(
    values, weights, ids, plus, out, tokens, first, experts, width, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    ALL_LOCAL: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Both loops are unrolled, so that no load waits for another one: with few tokens their latency is all that this takes.
    ALL_LOCAL: all experts are of this rank, so that rows are loaded before it is known which of them are padding; with parts, that
    would need more registers than there are."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        local = tl.load(ids + pair) - first
        is_local = inside & (local >= 0) & (local < experts)
        loaded = inside if ALL_LOCAL else is_local
        value = tl.load(values + pair * width + column, loaded, 0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            place = values + (part * tokens.to(tl.int64) * TOP_K + pair) * width + column
            value += tl.load(place, loaded, 0.0).to(tl.float32)
        if ALL_LOCAL:
            value = tl.where(is_local, value, 0.0)
        total += value * tl.load(weights + pair)
    if plus is not None:
        total += tl.load(plus + token * width + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * width + column, nearest(total, tl.zeros([BLOCK], out.dtype.element_ty), SM), inside)


def combine(
    values: Tensor, routing: Routing, *, first: int, experts: int, out: Tensor, plus: Tensor | None = None, all_local: bool = False
) -> Tensor:  # fmt: skip
    """values [parts, T * k, H] -> out [T, H]; the experts of this rank are first .. first + experts. plus [T, H]: what is added,
    contiguous; it may be `out`. all_local: no other rank has experts of the layer."""
    tokens, width = out.shape
    sm = sm_arch(out.device)
    block = min(_BLOCK if len(values) == 1 else _BLOCK_OF_PARTS, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, block))](
        values, *routing, plus, out, tokens, first, experts, width, TOP_K=routing.top_k, PARTS=len(values),
        ALL_LOCAL=all_local and len(values) == 1, BLOCK=block, SM=sm, num_warps=4, launch_pdl=sm >= 90,
    )  # fmt: skip
    return out
