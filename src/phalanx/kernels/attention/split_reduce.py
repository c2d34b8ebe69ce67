# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's lists and tuples grow by +)
"""The end of split-KV attention: the partial results of a row's splits, merged by log-sum-exp, and stored.

    top = max(split_max);  weights = 2^(split_max - top)
    out = sum(weights * outs) / sum(weights * totals)

The last split of a row to arrive merges those of all, or a kernel behind it does: in an order that the number of splits alone
decides, so that the bits are the same, whoever it is.

The last to arrive has waited for a fence and an atomic, and then reads the results of all splits by itself, some at a time. A
kernel of its own waits for the one before it to end instead, and has a program for every head or two, which read all splits at
once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phalanx.kernels.attention.heuristics import LOWEST_SCORE
from phalanx.kernels.attention.split_kv import load_first_split, load_split
from phalanx.kernels.vectors import nearest

LOG2_E = 1.4426950408889634
SCORE_SCALE = tl.constexpr(LOG2_E)

LOWEST = tl.constexpr(LOWEST_SCORE)


@triton.jit
def split_reduce(
    out, sinks, lse, split_max, totals, outs, arrivals, row, item, first, count, first_head, members, top, total, mixed, like,
    value_scale, q_heads, DIM: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """The end of program (band of heads, split): (top [HEADS], total [HEADS], mixed [HEADS, WIDTH]) are the maximum, sum and
    output of split `item` of a row that has `count` splits, from split `first` on. A row's only split stores its output. Otherwise
    each leaves its results in the workspace, and the last to arrive merges them, or where arrivals is None `split_merge` does.
    LANES: so many heads are merged; AT_ONCE, BLOCK: see `merge_splits`; sinks: None, or a logit per head. lse: None, or where the
    log-sum-exp of each row's scores goes, [rows, q_heads] fp32: LOWEST of a row that has no token."""
    HEADS: tl.constexpr = mixed.shape[0]
    WIDTH: tl.constexpr = mixed.shape[1]
    if count == 1:
        _store(out, sinks, lse, row, first_head, members, top, total, mixed, like, value_scale, q_heads, DIM, SM)
    else:
        group, counted = tl.program_id(0) * tl.num_programs(1) + first, row * tl.num_programs(0) + tl.program_id(0)
        there = (tl.arange(0, HEADS) < members)[:, None]
        if leave_split(split_max, totals, outs, arrivals, group, item - first, count, counted, top, total, mixed, there):
            highest, merged_total, merged = merge_splits(
                split_max, totals, outs, group, count, WIDTH, HEADS, LANES, AT_ONCE, BLOCK
            )  # fmt: skip
            _store(out, sinks, lse, row, first_head, members, highest, merged_total, merged, like, value_scale, q_heads, DIM, SM)


@triton.jit
def leave_split(split_max, totals, outs, arrivals, group, split, count, counted, top, total, mixed, there):
    """Leave (maximum [HEADS], sum [HEADS], output [HEADS, WIDTH]) of one of `count` splits in the workspace, whose results from
    `group` on are those of these splits. there: where the output counts, or None for everywhere. Returns whether this is the last
    of them to arrive, by count number `counted`, which is 0 again then; where arrivals is None nobody merges here."""
    HEADS: tl.constexpr = mixed.shape[0]
    WIDTH: tl.constexpr = mixed.shape[1]
    left = (group + split) * HEADS + tl.arange(0, HEADS)
    tl.store(split_max + left, top)
    tl.store(totals + left, total)
    tl.store(outs + left[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mixed, there)
    last = False
    if arrivals is not None:
        tl.debug_barrier()  # all warps have stored before one of them releases what they stored
        last = tl.atomic_add(arrivals + counted, 1, sem="acq_rel") == count - 1
        if last:
            tl.store(arrivals + counted, 0)
    return last


@triton.jit(do_not_specialize=["items"])
def split_merge(
    splits, out, sinks, lse, split_max, totals, outs, items, value_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    LANES: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Program (KV head, band of HEADS of its GROUP query heads, and LANES of these; row): where the row has several of the `items`
    splits, merge what `split_reduce` left of them. Many programs share the reading, where the last split to arrive would read all
    by itself. EARLY: see early_lengths of `decode_attention`."""
    if SM >= 90:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    BANDS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    EACH: tl.constexpr = ((GROUP if GROUP < HEADS else HEADS) + LANES - 1) // LANES
    band, lane = tl.program_id(0) // EACH, tl.program_id(0) % EACH * LANES
    head = band // BANDS * GROUP + band % BANDS * HEADS + lane
    members = tl.minimum(GROUP - band % BANDS * HEADS, HEADS) - lane
    row, first, count, _, _, _, _ = load_split(splits, load_first_split(splits, tl.program_id(1)))
    # All programs wait, those with nothing to merge, too: the kernel behind this one then waits for the splits, which end before.
    if SM >= 90 and EARLY:
        gdc_wait()
    if count > 1:
        top, total, merged = merge_splits(
            split_max + lane, totals + lane, outs + lane * WIDTH, band * items + first, count, WIDTH, HEADS, LANES, AT_ONCE, BLOCK
        )  # fmt: skip
        like = tl.zeros([1], out.dtype.element_ty)
        _store(out, sinks, lse, row, head, members, top, total, merged, like, value_scale, KV_HEADS * GROUP, DIM, SM)


def merge_apart(
    splits: Tensor, out: Tensor, sinks: Tensor | None, split_max: Tensor, totals: Tensor, outs: Tensor, *, kv_heads: int,
    heads: int, width: int, lanes: int, at_once: int, block: bool, value_scale: float, early_lengths: bool, sm: int,
    lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `split_merge` for the rows of out [R, q_heads, dim]. heads: of a program whose results these are; lanes: heads that a
    program merges; at_once, block: as AT_ONCE and BLOCK of `merge_splits`; early_lengths: `splits` may be read while the kernel
    before runs. lse: see `split_reduce`."""
    rows, q_heads, dim = out.shape
    group = q_heads // kv_heads
    programs = kv_heads * triton.cdiv(group, heads) * triton.cdiv(min(group, heads), lanes)
    split_merge[(programs, rows)](
        splits, out, sinks, lse, split_max, totals, outs, len(splits), value_scale, GROUP=group, KV_HEADS=kv_heads, DIM=dim,
        WIDTH=width, HEADS=heads, LANES=lanes, AT_ONCE=at_once, BLOCK=block, EARLY=early_lengths, SM=sm, num_warps=4,
        launch_pdl=sm >= 90,
    )  # fmt: skip


@triton.jit
def merge_splits(
    split_max, totals, outs, group, count, WIDTH: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the partial results that the splits of a row left in the workspace from `group` on -> (maximum [LANES], sum [LANES],
    output [LANES, WIDTH]). AT_ONCE splits are read at once; BLOCK: as one block, which is reduced by a tree."""
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    out = tl.zeros([LANES, WIDTH], tl.float32)
    for first in range(0, count, AT_ONCE):
        if BLOCK:
            top, total, out = _add_block(
                top, total, out, split_max, totals, outs, group, first, count, WIDTH, HEADS, LANES, AT_ONCE
            )  # fmt: skip
        else:
            top, total, out = _add_in_order(
                top, total, out, split_max, totals, outs, group, first, count, WIDTH, HEADS, LANES, AT_ONCE
            )  # fmt: skip
    return top, total, out


@triton.jit
def _add_in_order(
    top, total, out, split_max, totals, outs, group, first, count, WIDTH: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """(top, total, out), and AT_ONCE splits from `first` on, one behind the other. A thread has the same dims of all splits:
    nothing is exchanged between threads."""
    lane, dim = tl.arange(0, LANES), tl.arange(0, WIDTH)
    higher, split_tops = top, ()
    for each in tl.static_range(AT_ONCE):
        place = (group + first + each) * HEADS + lane
        split_top = tl.load(split_max + place, first + each < count, LOWEST, cache_modifier=".cg")
        higher, split_tops = tl.maximum(higher, split_top), split_tops + (split_top,)
    fade = tl.exp2(top - higher)
    total, out = total * fade, out * fade[:, None]
    for each in tl.static_range(AT_ONCE):
        valid, place = first + each < count, (group + first + each) * HEADS + lane
        weight = tl.exp2(split_tops[each] - higher)
        total += tl.load(totals + place, valid, 0.0, cache_modifier=".cg") * weight
        out += tl.load(outs + place[:, None] * WIDTH + dim[None, :], valid, 0.0, cache_modifier=".cg") * weight[:, None]
    return higher, total, out


@triton.jit
def _add_block(
    top, total, out, split_max, totals, outs, group, first, count, WIDTH: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """(top, total, out), and AT_ONCE splits from `first` on. All is read before any of it is used: one latency of the L2 cache."""
    lane, dim, split = tl.arange(0, LANES), tl.arange(0, WIDTH), first + tl.arange(0, AT_ONCE)
    valid, place = (split < count)[:, None], (group + split)[:, None] * HEADS + lane[None, :]
    split_top = tl.load(split_max + place, valid, LOWEST, cache_modifier=".cg")
    split_total = tl.load(totals + place, valid, 0.0, cache_modifier=".cg")
    there = place[:, :, None] * WIDTH + dim[None, None, :]
    mixed = tl.load(outs + there, valid[:, :, None], 0.0, cache_modifier=".cg")
    higher = tl.maximum(top, tl.max(split_top, 0))
    weight, fade = tl.exp2(split_top - higher[None, :]), tl.exp2(top - higher)
    total = total * fade + tl.sum(split_total * weight, 0)
    out = out * fade[:, None] + tl.sum(mixed * weight[:, :, None], 0)
    return higher, total, out


@triton.jit
def with_sinks(sinks, top, total, head, valid):
    """total [HEADS] of weights 2^(score - top), and those of the heads' sinks: logits that have no value. A sink so far above all
    scores that its weight is infinite leaves them none."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head, valid, 0.0).to(tl.float32) * SCORE_SCALE - top)
    return total


@triton.jit
def _store(
    out, sinks, lse, row, first_head, members, top, total, mixed, like, value_scale, q_heads, DIM: tl.constexpr, SM: tl.constexpr
):
    """mixed [lanes, WIDTH] / total [lanes] as the output of the `members` heads from first_head on. top [lanes]: their maximum."""
    each = tl.arange(0, mixed.shape[0])
    total = with_sinks(sinks, top, total, first_head + each, each < members)
    if lse is not None:
        log = (top + tl.log2(tl.where(total > 0, total, 1.0))) / SCORE_SCALE
        tl.store(lse + row.to(tl.int64) * q_heads + first_head + each, tl.where(total > 0, log, LOWEST), each < members)
    lane, dim = tl.arange(0, mixed.shape[0])[:, None], tl.arange(0, mixed.shape[1])[None, :]
    place = (row.to(tl.int64) * q_heads + first_head + lane) * DIM + dim
    result = mixed * tl.where(total > 0, value_scale / total, 0.0)[:, None]
    tl.store(out + place, nearest(result, like, SM), (lane < members) & (dim < DIM))
