# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""Dispatch: each token goes once to each rank that has one of its experts, with its routing.

    out_ids, out_weights [world * rows, k]: the routing of every token of every rank, by rank; -1 where a rank has no such token
    out_values[source * rows + t] = values of token t of rank `source`, where it has an expert of this rank; else not written
    out_scales: likewise, in words of 4 bytes, where values come with scales

A token's place is known without counting: nothing is compacted, and no size goes through the host. Its routing goes to every rank,
as a header of 16-byte vectors: expert + 1 for each slot (0 for none), then the weights; so a receiver knows which payloads it has
to wait for. A payload is the row of values, then its scales.

`allreduce.signals` explains how ranks wait. Two halves of a region are enough for dispatches alone: each rank needs a header of
every other in every call, as that page requires.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.signals import at, clear, dependents, draw_ticket, enter, leave, poll, push, seal, slot
from phalanx.kernels.vectors import load, store


@triton.jit
def _both(left, right):
    return left | right


@triton.jit
def reached_ranks(ids, row, per_rank, present, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """A bit for each rank that has an expert of the token in row `row` of ids [T, TOP_K]; none where it is not `present`."""
    number = tl.arange(0, SLOTS)
    expert = tl.load(ids + row * TOP_K + number, (number < TOP_K) & present, -1)
    return tl.reduce(tl.where(expert >= 0, 1 << (tl.maximum(expert, 0) // per_rank), 0), 0, _both)


@triton.jit
def reaches(ranks, rank):
    """Whether the bit of `rank` is set."""
    return ((ranks >> rank) & 1) > 0


@triton.jit
def _header(weights, ids, row, lane, present, TOP_K: tl.constexpr):
    """The words of a token's header: experts + 1, then weights; zeros behind them, and for a token that is not `present`."""
    words = ()
    for k in tl.static_range(4):
        place = 4 * lane + k
        expert = tl.load(ids + row * TOP_K + place, (place < TOP_K) & present, -1) + 1
        weight = tl.load(weights + row * TOP_K + place - TOP_K, (place >= TOP_K) & (place < 2 * TOP_K) & present, 0)
        words = words + (tl.where(place < TOP_K, expert, weight),)  # noqa: RUF005 (Triton's tuples grow by +)
    return words


@triton.jit
def _store_routing(out_weights, out_ids, row, words, lane, TOP_K: tl.constexpr):
    for k in tl.static_range(4):
        place = 4 * lane + k
        tl.store(out_ids + row * TOP_K + place, words[k] - 1, place < TOP_K)
        tl.store(out_weights + row * TOP_K + place - TOP_K, words[k], (place >= TOP_K) & (place < 2 * TOP_K))


@triton.jit
def _payload(values, scales, row_stride, column_stride, row, column, vectors, scale_words, mask, SM: tl.constexpr):
    """The vectors `column` of a token's payload."""
    words = load(values, row * vectors + column, mask & (column < vectors), SM)
    if scales is not None:
        both = ()
        for k in tl.static_range(4):
            place = 4 * (column - vectors) + k
            is_scale = mask & (place >= 0) & (place < scale_words)
            scale = tl.load(scales + row * row_stride + place * column_stride, is_scale, 0)
            both = both + (tl.where(column < vectors, words[k], scale),)  # noqa: RUF005 (Triton's tuples grow by +)
        words = both
    return words


@triton.jit
def _store_payload(out_values, out_scales, row, words, column, vectors, scale_words, mask, SM: tl.constexpr):
    store(out_values, row * vectors + column, words, mask & (column < vectors), SM)
    if out_scales is not None:
        for k in tl.static_range(4):
            place = 4 * (column - vectors) + k
            tl.store(out_scales + row * scale_words + place, words[k], mask & (place >= 0) & (place < scale_words))


@triton.jit
def _send(
    values, scales, row_stride, column_stride, weights, ids, out_values, out_scales, out_weights, out_ids, peers, headers_at,
    payloads_at, count, rows, vectors, pitch, scale_words, per_rank,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, HEADER: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Push this rank's headers and payloads, and put those for itself where they belong."""
    lane = tl.arange(0, 32 * WARPS)
    column = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        present = row < count
        header = _header(weights, ids, row, lane, present, TOP_K)
        sealed = seal(header)
        for step in tl.static_range(1, WORLD):
            place = slot((RANK + step) % WORLD, RANK, WORLD) * rows + row
            push(at(peers[(RANK + step) % WORLD] + headers_at, place * HEADER + lane, lane < HEADER), sealed)
        _store_routing(out_weights, out_ids, RANK * rows + row, header, lane, TOP_K)
        mask = (column < pitch) & present
        payload = _payload(values, scales, row_stride, column_stride, row, column, vectors, scale_words, mask, SM)
        sealed = seal(payload)
        ranks = reached_ranks(ids, row, per_rank, present, TOP_K, SLOTS)
        for step in tl.static_range(1, WORLD):
            goes = mask & reaches(ranks, (RANK + step) % WORLD)
            place = slot((RANK + step) % WORLD, RANK, WORLD) * rows + row
            push(at(peers[(RANK + step) % WORLD] + payloads_at, place * pitch + column, goes), sealed)
        stays = mask & reaches(ranks, RANK)
        _store_payload(out_values, out_scales, RANK * rows + row, payload, column, vectors, scale_words, stays, SM)


@triton.jit
def _collect(
    out_values, out_scales, out_weights, out_ids, inbox, headers_at, payloads_at, rows, vectors, pitch, scale_words, per_rank,
    TOP_K: tl.constexpr, HEADER: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
    WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """Wait for the peers' headers, and for the payloads that they announce."""
    lane = tl.arange(0, 32 * WARPS)
    column = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), (WORLD - 1) * rows, tl.num_programs(0)):
        place = item % (WORLD - 1)  # by slot; tokens arrive from all peers at the same rate
        token = item // (WORLD - 1)
        row = (RANK + 1 + place) % WORLD * rows + token
        address = at(inbox + headers_at, (place * rows + token) * HEADER + lane, lane < HEADER)
        header = poll((address,), 32 * WARPS, WARPS)
        clear(address)
        _store_routing(out_weights, out_ids, row, header, lane, TOP_K)
        here = lane < 0
        for k in tl.static_range(4):
            here = here | ((4 * lane + k < TOP_K) & (header[k] > 0) & ((header[k] - 1) // per_rank == RANK))
        if tl.max(here.to(tl.int32), 0) > 0:
            mask = column < pitch
            payload_address = at(inbox + payloads_at, (place * rows + token) * pitch + column, mask)
            payload = poll((payload_address,), BLOCK, WARPS)
            clear(payload_address)
            _store_payload(out_values, out_scales, row, payload, column, vectors, scale_words, mask, SM)


@triton.jit(do_not_specialize=["row_stride", "column_stride", "half", "count", "rows", "per_rank"])
def dispatch(
    values, scales, row_stride, column_stride, weights, ids, out_values, out_scales, out_weights, out_ids, peers, epoch, half,
    count, rows, vectors, pitch, scale_words, per_rank,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, HEADER: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """values: `count` rows of `vectors` vectors; scales [count, scale_words] as int32 with these strides, None for none;
    weights, ids [count, TOP_K] as int32. out_*: as above, out_scales [world * rows, scale_words] contiguous. rows: of each rank, at
    least its count. pitch: vectors of a payload. per_rank: experts of a rank. HEADER: vectors of a header. BLOCK: holds a payload.
    SLOTS: a power of 2 that holds TOP_K. The rest: see `allreduce.oneshot`. All programs must run at once."""
    dependents(SM)
    number = enter(epoch, SM)
    headers_at = (number & 1) * half.to(tl.int64) * 16
    payloads_at = headers_at + (WORLD - 1) * rows.to(tl.int64) * (HEADER * 16)
    _send(
        values, scales, row_stride, column_stride, weights, ids, out_values, out_scales, out_weights, out_ids, peers, headers_at,
        payloads_at, count, rows, vectors, pitch, scale_words, per_rank, TOP_K, SLOTS, HEADER, RANK, WORLD, BLOCK, WARPS, SM,
    )  # fmt: skip
    programs = tl.num_programs(0)
    ticket = draw_ticket(epoch, programs)
    _collect(
        out_values, out_scales, out_weights, out_ids, peers[RANK], headers_at, payloads_at, rows, vectors, pitch,
        scale_words, per_rank, TOP_K, HEADER, RANK, WORLD, BLOCK, WARPS, SM,
    )  # fmt: skip
    leave(epoch, programs, ticket)
