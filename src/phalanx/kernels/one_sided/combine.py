# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""Combine: what each rank's experts gave to a token goes back to the token's rank, which adds it up.

    out[t] = round(sum over the ranks r that token t reaches of (row rank * rows + t of r's sums))    in fp32, in the order of ranks

One region without halves is enough: a rank that pushes for the next combine has finished the dispatch between, for which it needed
a header of this rank, which this rank sent after its combine had ended, with its region cleared.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce.oneshot import sum_in_rank_order
from phalanx.kernels.allreduce.signals import at, clear, dependents, enter, poll, push, seal, slot
from phalanx.kernels.one_sided.dispatch import reached_ranks, reaches
from phalanx.kernels.vectors import load, pack, store


@triton.jit
def _send_back(
    sums, received_ids, peers, region, rows, pitch, per_rank,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(pitch, BLOCK)
    for item in range(tl.program_id(0), rows * parts, tl.num_programs(0)):
        token = item // parts
        column = item % parts * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            row = (RANK + step) % WORLD * rows + token
            mask = (column < pitch) & reaches(reached_ranks(received_ids, row, per_rank, True, TOP_K, SLOTS), RANK)
            words = load(sums, row * pitch + column, mask, SM)
            place = slot((RANK + step) % WORLD, RANK, WORLD) * rows + token
            push(at(peers[(RANK + step) % WORLD] + region, place * pitch + column, mask), seal(words))


@triton.jit(do_not_specialize=["region", "count", "rows", "per_rank"])
def combine(
    sums, ids, received_ids, out, peers, epoch, region, count, rows, pitch, per_rank,
    KIND: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    BLOCK: tl.constexpr, WARPS: tl.constexpr, SM: tl.constexpr,
):  # fmt: skip
    """sums: world * rows rows of `pitch` vectors; ids [count, TOP_K], received_ids [world * rows, TOP_K]: what `dispatch` sent and
    received; out: `count` rows. region: bytes before the region of combines in each rank's memory. BLOCK: vectors of a row that a
    program handles at once. The rest: see `dispatch.dispatch`. All programs must run at once."""
    dependents(SM)
    enter(epoch, SM)
    region = region.to(tl.int64)
    _send_back(sums, received_ids, peers, region, rows, pitch, per_rank, TOP_K, SLOTS, RANK, WORLD, BLOCK, SM)
    parts = tl.cdiv(pitch, BLOCK)
    for item in range(tl.program_id(0), count * parts, tl.num_programs(0)):
        token = item // parts
        column = item % parts * BLOCK + tl.arange(0, BLOCK)
        mask = column < pitch
        ranks = reached_ranks(ids, token, per_rank, True, TOP_K, SLOTS)
        addresses = ()
        for place in tl.static_range(WORLD - 1):
            source = (RANK + 1 + place) % WORLD
            sent = mask & reaches(ranks, source)
            addresses = addresses + (at(peers[RANK] + region, (place * rows + token) * pitch + column, sent),)
        stays = mask & reaches(ranks, RANK)
        own = load(sums, (RANK * rows + token) * pitch + column, stays, SM)
        words = poll(addresses, BLOCK, WARPS)
        for place in tl.static_range(WORLD - 1):
            clear(addresses[place])
        total = sum_in_rank_order(own, words, KIND, RANK, WORLD)
        store(out, token * pitch + column, pack(total, KIND, SM), mask, SM)
