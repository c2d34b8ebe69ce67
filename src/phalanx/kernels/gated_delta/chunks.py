# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""What the kernels of the gated delta rule share: where a row and a chunk of tokens is, normed heads, gates."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.vectors import nearest


@triton.jit
def row_at(slots, starts, lengths, row, SM: tl.constexpr):
    """A kernel's first loads, behind the kernel before: a row's (first token in the step, number of tokens, slot, position of its
    first token), all int64."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(starts + row).to(tl.int64)
    count = tl.load(starts + row + 1) - token
    return token, count, tl.load(slots + row).to(tl.int64), tl.load(lengths + row) - count


@triton.jit
def chunk_at(starts, rows, index, TOKENS: tl.constexpr, MOST: tl.constexpr):
    """Chunk `index` of rows of any number of tokens -> (its first token among its row's, less than 0 where there is no such chunk;
    the row; the row's first token; its number of tokens). MOST: a power of two that is at least `rows`."""
    each = tl.arange(0, MOST)
    begin = tl.load(starts + each, each < rows, 0)
    count = tl.load(starts + each + 1, each < rows, 0) - begin
    chunks = (count + TOKENS - 1) // TOKENS
    ends = tl.cumsum(chunks, 0)
    here = (index < ends) & (index >= ends - chunks)
    first = tl.sum(tl.where(here, (index - ends + chunks) * TOKENS, 0), 0)
    exists = tl.sum(here.to(tl.int32), 0) > 0
    return (
        tl.where(exists, first, -1), tl.sum(tl.where(here, each, 0), 0), tl.sum(tl.where(here, begin, 0), 0),
        tl.sum(tl.where(here, count, 0), 0),
    )  # fmt: skip


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias), in fp32."""
    return -tl.exp(a_log) * softplus(a + dt_bias)


@triton.jit
def load_normed(qkv, place, mask, EPS: tl.constexpr):
    """Heads [tokens, dims] divided by their lengths, in fp32."""
    values = tl.load(qkv + place, mask, 0.0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, 1) + EPS)[:, None]


@triton.jit
def dot(left, right, like, total, SM: tl.constexpr):
    """left @ right + total in fp32, the operands rounded to the dtype of `like`; those in fp32 as three numbers in TF32. Triton's
    interpreter multiplies no bf16."""
    left, right = left.to(like.dtype), right.to(like.dtype)
    if SM == 0:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="tf32x3")


@triton.jit
def gated_norm(values, weight, z, eps, DIM: tl.constexpr, SM: tl.constexpr):
    """values [rows, dims] in fp32, 0 beyond DIM -> round(values / rms) * weight * silu(z), in fp32."""
    inverse = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    normed = nearest(nearest(values * inverse[:, None], z, SM).to(tl.float32) * weight.to(tl.float32), z, SM).to(tl.float32)
    gate = z.to(tl.float32)
    return normed * (gate * sigmoid(gate))
