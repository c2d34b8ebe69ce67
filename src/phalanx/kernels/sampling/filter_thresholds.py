# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""The threshold that top-k, top-p and min-p give a row of logits: the least scaled logit that is kept. Nothing is sorted.

A token's depth is how far its logit lies below the row's maximum, at least 0. The search works on the bits of depths, which as
integers have their order. Top-k and top-p ask the same question: the least depth down to which the row has enough, of tokens (k of
them) or of probability mass (p of all). A search keeps an interval of two depths, the upper with too little above and at it, the
lower with enough, and in each pass over the row sums at eight pivots between them: so a pass leaves an eighth of the interval,
narrowed to depths at which there are tokens. The first pass takes pivots where the threshold mostly is. As soon as few enough
tokens are left in the interval, they are put aside, and later passes read those alone: of logits as models have them, a search
reads the row twice, and at worst a dozen times and once more for each time that tokens were too unevenly spread over lanes to be
put aside. One program has a row.

Mass is exp2 in fp32, summed by each lane in fp32 and over lanes in integers, in an order that depends on the stride alone
(`sampling.filter_thresholds` fixes it): a row's threshold does not depend on other rows, the sums never fall from depth to depth,
and are right to about 1e-6 of the total."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.sampling.gumbel_argmax import BLOCK, _largest, _padded_parts

LANES = 1024
EACH = 4
"""Adjacent logits that a lane reads at a time: 16 bytes, the most that one lane sums by itself."""
CAPACITY = 16
"""Depths that a lane can put aside: where at most a quarter as many are left per lane, it hardly ever happens that some lane has
more, and then the search goes on in the entire row."""

DEEPEST = tl.constexpr(0x7F7FFFFF)  # the bits of the largest float, which stands for the depth of -inf
BINADE = tl.constexpr(1 << 23)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _value(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reaches(depth, pivot, SM: tl.constexpr):
    """1.0 where the depth is at most the pivot, else 0.0: in one instruction, where a comparison and a select would be two."""
    if SM > 0:
        flag = tl.inline_asm_elementwise("set.le.f32.f32 $0, $1, $2;", "=f,f,f", [depth, pivot], tl.float32, True, 1)
    else:
        flag = (depth <= pivot).to(tl.float32)
    return flag


@triton.jit
def _more(total, depth, weight, pivot, SM: tl.constexpr):
    """Each lane's sum [LANES] plus the weights [LANES, EACH] of depths that are no more than the pivot."""
    return total + tl.sum(_reaches(depth, pivot, SM) * weight, 1)


@triton.jit
def _sum_lanes(sums):
    """The sum over all lanes, in units of 2^-40: exact in any order."""
    return tl.sum((sums * 1099511627776.0).to(tl.int64), 0)


@triton.jit
def _depth(values, top):
    return tl.minimum(tl.maximum(top - values, 0.0), LARGEST)


@triton.jit
def _accumulate(state, depth, inside, rate, above, pivots, SM: tl.constexpr):
    """Add a tile of depths [LANES, ..] to the state: the sums at eight pivots, the least depth that is more than `above`, and the
    greatest that is at most the last pivot. inside: which of the tile count; None where all do."""
    s0, s1, s2, s3, s4, s5, s6, s7, least, most = state
    p0, p1, p2, p3, p4, p5, p6, p7 = pivots
    weight = tl.exp2(depth * rate)
    if inside is not None:
        depth, weight = tl.where(inside, depth, LARGEST), tl.where(inside, weight, 0.0)
    s0, s1 = _more(s0, depth, weight, p0, SM), _more(s1, depth, weight, p1, SM)
    s2, s3 = _more(s2, depth, weight, p2, SM), _more(s3, depth, weight, p3, SM)
    s4, s5 = _more(s4, depth, weight, p4, SM), _more(s5, depth, weight, p5, SM)
    s6, s7 = _more(s6, depth, weight, p6, SM), _more(s7, depth, weight, p7, SM)
    least = tl.minimum(least, tl.min(depth + _reaches(depth, above, SM) * LARGEST, 1))
    most = tl.maximum(most, tl.max(depth * _reaches(depth, p7, SM), 1))
    return s0, s1, s2, s3, s4, s5, s6, s7, least, most


@triton.jit
def _pass(start, width, top, rate, above, pivots, LANES: tl.constexpr, EACH: tl.constexpr, SM: tl.constexpr):
    """`_accumulate` over the entire row."""
    column = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    none = tl.zeros([LANES], tl.float32)
    state = (none, none, none, none, none, none, none, none, none + LARGEST, none)
    at = 0
    while at + LANES * EACH <= width:  # without a mask, so that a lane reads all its logits at once
        state = _accumulate(state, _depth(tl.load(start + at + column), top), None, rate, above, pivots, SM)
        at += LANES * EACH
    if at < width:
        depth = _depth(tl.load(start + at + column, at + column < width, 0.0), top)
        state = _accumulate(state, depth, at + column < width, rate, above, pivots, SM)
    return _summed(state)


@triton.jit
def _pass_few(few, counts, rounds, rate, above, pivots, LANES: tl.constexpr, SM: tl.constexpr):
    """`_accumulate` over the depths that `_gather` has put aside: `counts` [LANES] per lane, `rounds` at most."""
    lane = tl.arange(0, LANES)[:, None]
    none = tl.zeros([LANES], tl.float32)
    state = (none, none, none, none, none, none, none, none, none + LARGEST, none)
    at = 0
    while at < rounds:
        inside = at < counts[:, None]
        state = _accumulate(state, tl.load(few + at * LANES + lane, inside, 0.0), inside, rate, above, pivots, SM)
        at += 1
    return _summed(state)


@triton.jit
def _summed(state):
    s0, s1, s2, s3, s4, s5, s6, s7, least, most = state
    sums = (
        _sum_lanes(s0), _sum_lanes(s1), _sum_lanes(s2), _sum_lanes(s3),
        _sum_lanes(s4), _sum_lanes(s5), _sum_lanes(s6), _sum_lanes(s7),
    )  # fmt: skip
    return sums, tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _put(few, counts, depth, inside, lane, LANES: tl.constexpr, CAPACITY: tl.constexpr):
    """Append the depths of a tile [LANES, EACH] that are inside to those that each lane has put aside; returns the new counts
    [LANES]."""
    one = inside.to(tl.int32)
    place = counts[:, None] + tl.cumsum(one, 1) - one
    tl.store(few + place * LANES + lane, depth, inside & (place < CAPACITY))
    return counts + tl.sum(one, 1)


@triton.jit
def _gather(few, start, width, top, low, high, LANES: tl.constexpr, EACH: tl.constexpr, CAPACITY: tl.constexpr):
    """Put aside the depths of the row in (low, high]: returns how many each lane has [LANES], of which it has put CAPACITY
    aside."""
    lane = tl.arange(0, LANES)[:, None]
    column = lane * EACH + tl.arange(0, EACH)[None, :]
    counts = tl.zeros([LANES], tl.int32)
    at = 0
    tl.debug_barrier()  # no thread still reads what was put aside before
    while at + LANES * EACH <= width:
        depth = _depth(tl.load(start + at + column), top)
        bits = depth.to(tl.int32, bitcast=True)
        counts = _put(few, counts, depth, (bits > low) & (bits <= high), lane, LANES, CAPACITY)
        at += LANES * EACH
    if at < width:
        depth = _depth(tl.load(start + at + column, at + column < width, 0.0), top)
        bits = depth.to(tl.int32, bitcast=True)
        counts = _put(few, counts, depth, (bits > low) & (bits <= high) & (at + column < width), lane, LANES, CAPACITY)
    tl.debug_barrier()
    return counts


@triton.jit
def _narrow(low, high, under, over, total, pivot, target):
    """Narrow the interval (low, high], and the sums at both ends, by a pivot and the sum there."""
    if total >= target:
        if pivot < high:
            high, over = pivot, total
    elif pivot > low:
        low, under = pivot, total
    return low, high, under, over


@triton.jit
def _search(
    start, width, top, row_temperature, rate, limit, target, share, crowd, few,
    LANES: tl.constexpr, EACH: tl.constexpr, CAPACITY: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Bits of the least depth, at most `limit`, down to which the weights exp2(depth * rate) reach the target, in units of 2^-40; a
    target of 0 stands for the fraction `share` of their sum down to the limit, which the first pass gives. crowd: at most so many
    tokens have a depth of at most `limit`, but for ties. few: memory for CAPACITY * LANES depths."""
    low, high = tl.full((), -1, tl.int32), limit
    first, step = (row_temperature * 0.25).to(tl.int32, bitcast=True), BINADE + 0  # a quarter to 16 nats
    under, over, aside = target * 0, target * 0, target * 0
    counts, rounds, few_enough = tl.zeros([LANES], tl.int32), 0, LANES * CAPACITY / 4.0
    while high - low > 1:
        if (rounds == 0) & (crowd <= few_enough):
            counts = _gather(few, start, width, top, low, high, LANES, EACH, CAPACITY)
            rounds, aside = tl.max(counts, 0), under
            if rounds > CAPACITY:
                rounds, few_enough = 0, few_enough / 4
        b0, b1 = tl.minimum(first, high), tl.minimum(first + step, high)
        b2, b3 = tl.minimum(first + 2 * step, high), tl.minimum(first + 3 * step, high)
        b4, b5 = tl.minimum(first + 4 * step, high), tl.minimum(first + 5 * step, high)
        b6 = tl.minimum(first + 6 * step, high)
        pivots = (_value(b0), _value(b1), _value(b2), _value(b3), _value(b4), _value(b5), _value(b6), _value(high))
        above = tl.where(low < 0, -1.0, _value(low))
        if rounds > 0:
            sums, least, most = _pass_few(few, counts, rounds, rate, above, pivots, LANES, SM)
            base = aside
        else:
            sums, least, most = _pass(start, width, top, rate, above, pivots, LANES, EACH, SM)
            base = aside * 0
        s0, s1, s2, s3, s4, s5, s6, s7 = sums
        over = base + s7
        if target == 0:
            target = tl.maximum(tl.minimum(tl.ceil(share * over.to(tl.float64)).to(tl.int64), over), 1)
        # Only a depth that some token has can be the threshold.
        low = tl.maximum(low, tl.minimum(least.to(tl.int32, bitcast=True), high) - 1)
        high = tl.minimum(high, most.to(tl.int32, bitcast=True))
        low, high, under, over = _narrow(low, high, under, over, base + s0, b0, target)
        low, high, under, over = _narrow(low, high, under, over, base + s1, b1, target)
        low, high, under, over = _narrow(low, high, under, over, base + s2, b2, target)
        low, high, under, over = _narrow(low, high, under, over, base + s3, b3, target)
        low, high, under, over = _narrow(low, high, under, over, base + s4, b4, target)
        low, high, under, over = _narrow(low, high, under, over, base + s5, b5, target)
        low, high, under, over = _narrow(low, high, under, over, base + s6, b6, target)
        step = ((high - low) >> 3) + 1
        first = low + step
        crowd = (over - under).to(tl.float32) * 9.094947017729282e-13 / tl.exp2(_value(high) * rate)
    return high


@triton.jit
def _scaled(bits, row_temperature):
    """A depth as what `reference.scale_logits` makes of its logit."""
    return tl.where(bits < DEEPEST, -tl.div_rn(_value(bits), row_temperature), float("-inf"))


@triton.jit
def _deepest_equal(bits, row_temperature):
    """The greatest depth whose scaled logit equals that of this depth, in bits: division may round neighbours to the same
    number."""
    target = tl.div_rn(_value(bits), row_temperature)
    low, high = bits, tl.full((), DEEPEST, tl.int32)
    while high > low:
        middle = low + ((high - low + 1) >> 1)
        if tl.div_rn(_value(middle), row_temperature) == target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(
    do_not_specialize=["width", "rows", "parts"],
    do_not_specialize_on_alignment=["thresholds", "max_keys", "temperature", "filters"],
)
def _filter_thresholds(
    logits, thresholds, max_keys, temperature, filters, few, stride, width, rows, parts,
    PARTS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, CAPACITY: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    if SM >= 90:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    row_temperature = tl.load(temperature + row)
    k = tl.load(filters + row).to(tl.int32)
    p = tl.load(filters + rows + row)
    m = tl.load(filters + 2 * rows + row).to(tl.float32)
    threshold = float("-inf")
    order = (_largest(max_keys, row, rows, parts, 1, PARTS) >> 32).to(tl.int32)
    top = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
    if (row_temperature > 0.0) & (top > float("-inf")):
        start = logits + row.to(tl.int64) * stride
        top = tl.minimum(top, LARGEST)  # so that no depth is NaN
        few += row.to(tl.int64) * (CAPACITY * LANES)
        limit, crowd = tl.full((), DEEPEST, tl.int32), width.to(tl.float32)
        by_mass = 0
        while by_mass < 2:  # top-k, then top-p of what it leaves: one loop, so that the search is compiled once
            if tl.where(by_mass > 0, p < 1.0, k < width):
                limit = _deepest_equal(limit, row_temperature)
                rate = by_mass * (-LOG2_E / row_temperature)
                target = tl.where(by_mass > 0, 0, k).to(tl.int64) << 40
                limit = _search(start, width, top, row_temperature, rate, limit, target, p, crowd, few, LANES, EACH, CAPACITY, SM)
                threshold = tl.maximum(threshold, _scaled(limit, row_temperature))
                crowd = k.to(tl.float32)
            by_mass += 1
        if m > 0.0:
            if SM > 0:
                threshold = tl.maximum(threshold, libdevice.log(m))
            else:
                threshold = tl.maximum(threshold, tl.log(m))
    tl.store(thresholds + row, threshold)


def filter_thresholds(logits: Tensor, max_keys: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    """The kernel of `sampling.filter_thresholds`: [S] for logits [S, V] in fp32 whose rows are contiguous."""
    rows, width = logits.shape
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        sm, parts = sm_arch(logits.device), max_keys.shape[2]
        few = torch.empty(rows, CAPACITY * LANES, dtype=torch.float32, device=logits.device)
        _filter_thresholds[(rows,)](
            logits, thresholds, max_keys, temperature, filters, few, logits.stride(0), width, rows, parts,
            PARTS=_padded_parts(triton.cdiv(width, BLOCK)), LANES=LANES, EACH=EACH, CAPACITY=CAPACITY, SM=sm,
            num_warps=LANES // 32, launch_pdl=sm >= 90,
        )  # fmt: skip
    return thresholds
