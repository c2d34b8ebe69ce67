# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The begin of a forward in one kernel: embedding lookup and the first RMSNorm; and an RMSNorm alone.

    id = ids[t], or last_tokens[slots[t]] where ids[t] < 0
    residual = table[id - begin], zeros where the id is outside this rank's table
    norm and its quantization as in `residual_rms_norm`

A program has one row. For a norm alone, rows may be spread in memory: heads of a token, a run of them in each token's row.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.ops.heuristics import row_warps
from phalanx.kernels.ops.residual_rms_norm import NormOutputs, load_weight, normalize, quant_mode, square_sum
from phalanx.kernels.vectors import load, store, unpack

Last = tuple[Tensor, Tensor]


@triton.jit
def _gather(
    ids, last_tokens, slots, table, out, row, column, mask, begin, table_rows, vectors, LAST: tl.constexpr, SM: tl.constexpr
):  # fmt: skip
    """Store the row's vectors of the table, and return them; zeros where the id is outside the table."""
    token = tl.load(ids + row)
    if LAST:
        token = tl.where(token < 0, tl.load(last_tokens + tl.load(slots + row)), token)
    source = token - begin
    inside = (source >= 0) & (source < table_rows)
    words = load(table, source * vectors + column, mask & inside, SM)
    store(out, row.to(tl.int64) * vectors + column, words, mask, SM)
    return words


@triton.jit(do_not_specialize=["begin", "table_rows"], do_not_specialize_on_alignment=["ids", "last_tokens", "slots"])
def _embed(
    ids, last_tokens, slots, table, out, zeros, begin, table_rows, vectors,
    LAST: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < vectors
    _gather(ids, last_tokens, slots, table, out, row, column, mask, begin, table_rows, vectors, LAST, SM)
    nothing = tl.zeros([BLOCK], tl.int32)
    store(zeros, row.to(tl.int64) * vectors + column, (nothing, nothing, nothing, nothing), mask, SM)


@triton.jit(
    do_not_specialize=["hidden", "begin", "table_rows", "inner", "outer"],
    do_not_specialize_on_alignment=["ids", "last_tokens", "slots"],
)
def _embed_norm(
    ids, last_tokens, slots, table, weight, pointers, scale, begin, table_rows, inner, outer, hidden, eps,
    IDS: tl.constexpr, LAST: tl.constexpr, KIND: tl.constexpr, QUANT: tl.constexpr, FP32_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    SM: tl.constexpr,
):  # fmt: skip
    """Without IDS, a norm alone: its row r is row r // inner * outer + r % inner of the table, and no residual is stored."""
    LANES: tl.constexpr = 4 if KIND == "fp32" else 8
    column = tl.arange(0, BLOCK)
    vectors = hidden // LANES
    mask = column < vectors
    row = tl.program_id(0)
    if SM >= 90:
        gdc_launch_dependents()
    factors = load_weight(weight, column, mask, FP32_WEIGHT, SM)  # no kernel before this one writes weights
    if SM >= 90:
        gdc_wait()
    if IDS:
        words = _gather(ids, last_tokens, slots, table, pointers[1], row, column, mask, begin, table_rows, vectors, LAST, SM)
    else:
        source = (row // inner).to(tl.int64) * outer + row % inner
        words = load(table, source * vectors + column, mask, SM)
    lanes = unpack(words, KIND)
    normalize(lanes, square_sum(lanes), factors, row, column, mask, pointers, scale, hidden, eps, KIND, QUANT, False, BLOCK, SM)


def embed(ids: Tensor, table: Tensor, begin: int, last: Last | None) -> tuple[Tensor, Tensor]:
    """The kernel of `reference.embed`, for rows that are made of vectors of 16 bytes."""
    vectors = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=table.device)
    zeros = torch.empty_like(vectors)
    if len(ids):
        words = table.view(torch.int32)
        block, sm = triton.next_power_of_2(words.shape[1] // 4), sm_arch(table.device)
        _embed[(len(ids),)](
            ids, *(last or (ids, ids)), words, vectors.view(torch.int32), zeros.view(torch.int32), begin, len(table),
            words.shape[1] // 4, LAST=last is not None, BLOCK=block, SM=sm, num_warps=row_warps(block, len(ids)),
            launch_pdl=sm >= 90,
        )  # fmt: skip
    return vectors, zeros


def embed_norm(
    ids: Tensor, table: Tensor, last: Last | None, weight: Tensor, eps: float, quant: Literal["none", "fp8", "nvfp4"] = "none",
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The kernel of `reference.embed_norm`, for rows that are made of vectors of 16 bytes (nvfp4: of 16 elements)."""
    mode = quant_mode(quant, scale)
    tokens, hidden = len(ids), table.shape[1]
    norm_outputs = NormOutputs(table[:1].expand(tokens, hidden), mode, False)
    if tokens:
        block, sm = triton.next_power_of_2(hidden * table.element_size() // 16), sm_arch(table.device)
        _embed_norm[(tokens,)](
            ids, *(last or (ids, ids)), table.view(torch.int32), weight.view(torch.int32), norm_outputs.pointers(0, tokens),
            norm_outputs.residual if scale is None else scale, 0, len(table), 1, 1, hidden, eps, IDS=True, LAST=last is not None,
            KIND=DTYPE_NAMES[table.dtype], QUANT=mode, FP32_WEIGHT=weight.dtype != table.dtype, BLOCK=block, SM=sm,
            num_warps=row_warps(block, tokens), launch_pdl=sm >= 90,
        )  # fmt: skip
    return norm_outputs.outputs()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The kernel of `reference.rms_norm`, for x [T, H] or [T, heads, H] whose rows are made of vectors of 16 bytes and lie as
    `runs_of_rows` says."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // x.shape[-1]
    if rows:
        inner, outer = runs_of_rows(x)
        block, sm = triton.next_power_of_2(x.shape[-1] * x.element_size() // 16), sm_arch(x.device)
        words, into = x.view(torch.int32), out.view(torch.int32)
        _embed_norm[(rows,)](
            words, words, words, words, weight.view(torch.int32), (into, into, into, into), words, 0, 0, inner, outer,
            x.shape[-1], eps, IDS=False, LAST=False, KIND=DTYPE_NAMES[x.dtype], QUANT="none",
            FP32_WEIGHT=weight.dtype != x.dtype, BLOCK=block, SM=sm,
            num_warps=row_warps(block, rows), launch_pdl=sm >= 90,
        )  # fmt: skip
    return out


def runs_of_rows(x: Tensor) -> tuple[int, int]:
    """(adjacent rows in each run, rows from the begin of one run to the next) of x [T, H] or [T, heads, H]; (0, 0) if its rows do
    not lie in such runs."""
    hidden = x.shape[-1]
    regular = x.stride(-1) == 1 and x.stride(0) % hidden == 0
    if x.dim() == 2 and regular:
        return 1, x.stride(0) // hidden
    if x.dim() == 3 and regular and x.stride(1) == hidden:
        return x.shape[1], x.stride(0) // hidden
    return 0, 0
