# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""The one-sided exchange on GPUs, over symmetric memory: ranks write tokens, and later sums, straight into each other's memory.

Each rank's memory: two halves, of dispatches in turn, with a header for each row of every other rank, and a payload; then a region
of sums, one row for each of this rank's rows and every other rank.

Dispatch: each token goes once to each rank that has one of its experts, with its routing.

    out_ids, out_weights [world * rows, k]: the routing of every token of every rank, by rank; -1 where a rank has no such token
    out_values[source * rows + t] = values of token t of rank `source`, where it has an expert of this rank; else not written
    out_scales: likewise, in words of 4 bytes, where values come with scales

A token's place is known without counting: nothing is compacted, and no size goes through the host. Its routing goes to every rank,
as a header of 16-byte vectors: expert + 1 for each slot (0 for none), then the weights; so a receiver knows which payloads it has
to wait for. A payload is the row of values, then its scales.

`comm.signals` explains how ranks wait. Two halves of a region are enough for dispatches alone: each rank needs a header of
every other in every call, as that page requires.

Combine: what each rank's experts gave to a token goes back to the token's rank, which adds it up.

    out[t] = round(sum over the ranks r that token t reaches of (row rank * rows + t of r's sums))    in fp32, in the order of ranks

One region without halves is enough: a rank that pushes for the next combine has finished the dispatch between, for which it needed
a header of this rank, which this rank sent after its combine had ended, with its region cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.comm.oneshot import sum_in_rank_order
from phalanx.comm.signals import at, clear, dependents, draw_ticket, enter, leave, mark_call, poll, push, seal, slot
from phalanx.comm.strategies import formed
from phalanx.comm.symmetric import SymmetricRegion, form_region
from phalanx.comm.torch_group import TorchGroup
from phalanx.kernels.dtypes import DTYPE_NAMES
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.kernels.vectors import load, pack, store

LIMIT_BYTES = 256 << 20
"""The largest size of a rank's memory; steps of more rows take another exchange."""
_VECTOR = 16
_WARPS = 8
_PER_SM = 2
"""Programs of a multiprocessor: all programs of a grid must run at once."""
_FEW_ROWS = 64
"""Rows up to which a combine splits them over many programs. A power of 2, which a warm-up meets."""
_FEW_VECTORS, _MANY_VECTORS = 128, 512
"""Vectors of a row that a program of a combine handles at once: of few rows, and of many."""


class RegionSizes(NamedTuple):
    """Bytes of the memory of one rank of `world`, for `rows` rows of a rank: of a half, and of the region of sums."""

    rows: int
    half: int
    sums: int

    @property
    def total(self) -> int:
        return 2 * self.half + self.sums

    @classmethod
    def of(cls, world: int, rows: int, row_bytes: int, top_k: int, limit: int = LIMIT_BYTES) -> RegionSizes:
        """For rows of `row_bytes` in the dtype of sums, which a payload does not exceed. Fewer rows where they would exceed the
        limit."""
        each = (world - 1) * (header_vectors(top_k) * _VECTOR + row_bytes)
        rows = min(rows, limit // (2 * each + (world - 1) * row_bytes))
        return cls(rows, rows * each, rows * (world - 1) * row_bytes)


def header_vectors(top_k: int) -> int:
    """Vectors of 16 bytes that hold a token's experts and their weights."""
    return -(-2 * top_k // 4)


def _words(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.view(torch.int32)


def _power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class GpuOneSided:
    """`OneSided` of one group."""

    region: SymmetricRegion
    sizes: RegionSizes

    @property
    def max_rows(self) -> int:
        return self.sizes.rows

    def dispatch(
        self, x: Tensor | Quantized, routing: Routing, rows: int, experts: int
    ) -> tuple[Tensor | Quantized, Routing]:  # fmt: skip
        """See `OneSided.dispatch`."""
        region = self.region
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows of a rank do not fit memory for {self.max_rows}")
        values, scale = x if isinstance(x, Quantized) else (x, None)
        values = values.contiguous()
        count, hidden = values.shape
        by_row = None if scale is None or scale.dim() == 0 else scale
        scale_words = 0 if by_row is None else by_row.shape[1]
        vectors, top_k, total = hidden * values.element_size() // _VECTOR, routing.top_k, region.world * rows
        pitch = vectors + -(-scale_words // 4)
        out = torch.empty((total, hidden), dtype=values.dtype, device=values.device)
        weights, ids = (part.new_empty((total, top_k)) for part in routing)
        out_scale = None if by_row is None else by_row.new_empty((total, scale_words))
        block = max(_power_of_2(pitch), 32 * _WARPS)
        programs = min(max(rows, (region.world - 1) * rows), _PER_SM * region.num_sms)
        dispatch[(programs,)](
            values.view(torch.int32), _words(by_row), *((0, 0) if by_row is None else by_row.stride()),
            routing.weights.view(torch.int32), routing.ids, out.view(torch.int32),
            _words(out_scale), weights.view(torch.int32), ids, region.addresses,
            (region.epoch, *region.marks()), self.sizes.half // _VECTOR, count,
            rows, vectors, pitch, scale_words, experts // region.world,
            TOP_K=top_k, SLOTS=_power_of_2(top_k), HEADER=header_vectors(top_k), BLOCK=block, **self._constants,
        )  # fmt: skip
        received = Routing(weights, ids)
        if scale is None:
            return out, received
        return Quantized(out, scale if out_scale is None else out_scale), received

    def combine(self, sums: Tensor, sent: Routing, received: Routing, experts: int) -> Tensor:
        """See `OneSided.combine`."""
        region, top_k = self.region, sent.top_k
        rows, count = len(sums) // region.world, len(sent.ids)
        pitch = sums.shape[1] * sums.element_size() // _VECTOR
        block = max(_FEW_VECTORS if rows <= _FEW_ROWS else _MANY_VECTORS, 32 * (warps := 4 if rows <= _FEW_ROWS else _WARPS))
        out = sums.new_empty((count, sums.shape[1]))
        programs = min(rows * -(-pitch // block), _PER_SM * (_WARPS // warps) * region.num_sms)
        combine[(programs,)](
            sums.view(torch.int32), sent.ids, received.ids, out.view(torch.int32), region.addresses,
            (region.epoch, *region.marks()), 2 * self.sizes.half, count, rows, pitch, experts // region.world,
            KIND=DTYPE_NAMES[sums.dtype], TOP_K=top_k, SLOTS=_power_of_2(top_k), BLOCK=block,
            **{**self._constants, "WARPS": warps, "num_warps": warps},
        )  # fmt: skip
        return out

    @property
    def _constants(self) -> dict[str, int | bool]:
        region = self.region
        return {
            "RANK": region.rank, "WORLD": region.world, "WARPS": _WARPS, "SM": region.sm, "num_warps": _WARPS,
            "maxnreg": 65536 // (_PER_SM * _WARPS * 32), "launch_pdl": region.sm >= 90,
        }  # fmt: skip


def form(group: TorchGroup, *, hidden: int, top_k: int, dtype: torch.dtype, rows: int) -> GpuOneSided | str:
    """See `one_sided.form`."""
    sizes = RegionSizes.of(group.size, rows, hidden * dtype.itemsize, top_k)
    region = formed(group, partial(form_region, group.process_group, group.device, sizes.total, group.kernel_marks))
    return region if isinstance(region, str) else GpuOneSided(region, sizes)


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
        words = words + (tl.where(place < TOP_K, expert, weight),)
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
            both = both + (tl.where(column < vectors, words[k], scale),)
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
    mark_call(epoch)
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
