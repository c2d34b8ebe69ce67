# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's lists and tuples grow by +)
"""The end of split-KV attention: the partial results of a row's splits, merged by log-sum-exp, and stored.

    top = max(split_max);  weights = 2^(split_max - top)
    out = sum(weights * outs) / sum(weights * totals)

The last split of a row to arrive merges those of all, or a kernel behind it does: in the order of the tokens, so that the bits are
the same, whoever it is."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.attention.split_kv import load_split
from phalanx.kernels.vectors import nearest

LOG2_E = 1.4426950408889634
SINK_SCALE = tl.constexpr(LOG2_E)

LOWEST = tl.constexpr(-1e30)
"""Below every score, and still finite: the difference of two is a number."""


@triton.jit
def split_reduce(
    out, sinks, split_max, totals, outs, arrivals, row, item, first, count, first_head, members, top, total, mixed, like,
    value_scale, q_heads, DIM: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The end of program (band of heads, split): (top [HEADS], total [HEADS], mixed [HEADS, WIDTH]) are the maximum, sum and
    output of split `item` of a row that has `count` splits, from split `first` on. A row's only split stores its output. Otherwise
    each leaves its results in the workspace, and the last to arrive merges them. LANES: so many heads are merged; sinks: None, or
    a logit per head."""
    HEADS: tl.constexpr = mixed.shape[0]
    WIDTH: tl.constexpr = mixed.shape[1]
    if count == 1:
        _store(out, sinks, row, first_head, members, top, total, mixed, like, value_scale, q_heads, DIM, SM)
    else:
        lane, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
        group = tl.program_id(0) * tl.num_programs(1) + first
        left = (group + item - first) * HEADS + lane
        tl.store(split_max + left, top)
        tl.store(totals + left, total)
        tl.store(outs + left[:, None] * WIDTH + dim[None, :], mixed, (lane < members)[:, None])
        if arrivals is not None:
            counted = row * tl.num_programs(0) + tl.program_id(0)
            tl.debug_barrier()  # all warps have stored before one of them releases what they stored
            if tl.atomic_add(arrivals + counted, 1, sem="acq_rel") == count - 1:
                tl.store(arrivals + counted, 0)
                highest, merged_total, merged = _merge_splits(
                    split_max, totals, outs, group, count, WIDTH, HEADS, LANES, AT_ONCE
                )  # fmt: skip
                _store(
                    out, sinks, row, first_head, members, highest, merged_total, merged, like, value_scale, q_heads, DIM, SM
                )  # fmt: skip


@triton.jit
def split_merge(
    splits, out, split_max, totals, outs, members,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Program (LANES of the `members` heads, split): where it is the first of several splits of a row, merge what `split_reduce`
    left, in bands of HEADS heads. Many programs share the reading, where the last to arrive would read all by itself."""
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    item, head = tl.program_id(1), tl.program_id(0) * LANES
    row, first, count, _, _, _, table_row = load_split(splits, item)
    if (table_row >= 0) & (first == item) & (count > 1):
        group, lane = head // HEADS * tl.num_programs(1) + item, head % HEADS
        top, total, merged = _merge_splits(
            split_max + lane, totals + lane, outs + lane * WIDTH, group, count, WIDTH, HEADS, LANES, AT_ONCE
        )  # fmt: skip
        like = tl.zeros([1], out.dtype.element_ty)
        _store(out, None, row, head, members - head, top, total, merged, like, 1.0, members, DIM, SM)


@triton.jit
def _merge_splits(
    split_max, totals, outs, group, count, WIDTH: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Merge the partial results that the splits of a row left in the workspace from `group` on -> (maximum [LANES], sum [LANES],
    output [LANES, WIDTH]).

    A thread has the same dims of all splits: nothing is exchanged between threads, and AT_ONCE splits are read at once."""
    lane, dim = tl.arange(0, LANES), tl.arange(0, WIDTH)
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    out = tl.zeros([LANES, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        higher, split_tops = top, ()
        for each in tl.static_range(AT_ONCE):
            place = (group + first + each) * HEADS + lane
            split_top = tl.load(split_max + place, first + each < count, LOWEST, cache_modifier=".cg")
            higher, split_tops = tl.maximum(higher, split_top), split_tops + (split_top,)
        fade = tl.exp2(top - higher)
        total, out, top = total * fade, out * fade[:, None], higher
        for each in tl.static_range(AT_ONCE):
            valid, place = first + each < count, (group + first + each) * HEADS + lane
            weight = tl.exp2(split_tops[each] - higher)
            total += tl.load(totals + place, valid, 0.0, cache_modifier=".cg") * weight
            out += tl.load(outs + place[:, None] * WIDTH + dim[None, :], valid, 0.0, cache_modifier=".cg") * weight[:, None]
    return top, total, out


@triton.jit
def with_sinks(sinks, top, total, head, valid):
    """total [HEADS] of weights 2^(score - top), and those of the heads' sinks: logits that have no value. A sink so far above all
    scores that its weight is infinite leaves them none."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, valid, 0.0).to(tl.float32) * SINK_SCALE - top)
    return total


@triton.jit
def _store(
    out, sinks, row, first_head, members, top, total, mixed, like, value_scale, q_heads, DIM: tl.constexpr, SM: tl.constexpr
):
    """mixed [lanes, WIDTH] / total [lanes] as the output of the `members` heads from first_head on. top [lanes]: their maximum."""
    each = tl.arange(0, mixed.shape[0])
    total = with_sinks(sinks, top, total, first_head + each, each < members)
    lane, dim = tl.arange(0, mixed.shape[0])[:, None], tl.arange(0, mixed.shape[1])[None, :]
    place = (row.to(tl.int64) * q_heads + first_head + lane) * DIM + dim
    result = mixed * tl.where(total > 0, value_scale / total, 0.0)[:, None]
    tl.store(out + place, nearest(result, like, SM), (lane < members) & (dim < DIM))
