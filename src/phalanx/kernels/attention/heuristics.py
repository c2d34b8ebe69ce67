# SPDX-License-Identifier: Apache-2.0
"""How attention is cut into programs: of decode, how many may share a row, how much one reads at a time, and where they leave their
parts; of prefill, which tokens one has. Decided from shapes alone, so that a captured launch serves all lengths, or all that are
short."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

MOST_PIECES = 32
"""Of one row: the last program to arrive reads what all others left."""

ROWS_CLASSES = (64, 512, 4096)
"""Programs that find pieces look over the lengths of so many rows, there or not; of more rows none is cut."""

SHORT = 256
"""Tokens of a short row, at most: where few programs are to be done soon, one reads them all at once."""

PROGRAMS_PER_PROCESSOR = 8
"""That run at once; rows that are alike are cut no further than into what the GPU can run at once."""

SHARED = 227 << 10
"""Bytes of shared memory that a program may have on Hopper and later; others have less."""


class Split(NamedTuple):
    """shares: programs for one KV head beyond one a row, which the longest rows have together; 0: none, and rows may be any number.
    chunk: tokens of a row for each program that shares it, at least, unless the row is shorter. tile: tokens that a program
    computes at a time, divided among its warps, 16 or more each. stages: as Triton's num_stages: tiles that are computed or under
    way. registers: of a thread, at most: so many programs fit on a processor. together: a program's warps work on the same scores,
    rather than each on its own."""

    shares: int
    chunk: int
    tile: int
    warps: int
    stages: int
    registers: int
    together: bool = False


def chosen(
    rows: int, kv_heads: int, group: int, head_dim: int, itemsize: int, processors: int, *,
    short: bool = False, shared: int = SHARED,
) -> Split:  # fmt: skip
    """For `rows` rows of any length, or (short) of up to SHORT tokens each. group: query heads per KV head; itemsize: bytes of a
    cached element; processors: the GPU's; shared: bytes that a program may have of a processor's. As measured on H200."""
    programs, room = rows * kv_heads * -(-group // 16), PROGRAMS_PER_PROCESSOR * processors
    # As many to each row where all are alike. With one it is not cut then, but one that is longer than the others is: no finer than
    # that needs, as adding up costs more than it gains where all are short.
    each = min(max(room // (2 * programs), 1), MOST_PIECES) if rows <= ROWS_CLASSES[-1] else 0
    if head_dim * itemsize > 256:  # also in fp32, whose products are not a tensor core's
        return Split(each * rows, 128, tile=32, warps=2, stages=2, registers=255)
    chunk = 128 if each > 1 else 512
    # Where one for each row leaves half of the room, too few bytes are under way: two warps help, or, where processors would have
    # two or three programs, which is uneven, more programs for rows that have several chunks.
    two_warps = each == 1 and itemsize == 1 and room // programs == 2
    if each == 1 and not two_warps:
        each = max(room // programs, 1)
    shares = each * rows
    few = 2 * programs <= processors
    if few and short and _at_once(group, head_dim, itemsize) <= shared:  # what counts is how soon one row is done
        return Split(0, SHORT, tile=SHORT, warps=8, stages=2, registers=255, together=True)
    if two_warps:
        return Split(shares, chunk, tile=32, warps=2, stages=4, registers=168)
    if not few and (itemsize == 1 or chunk == 128):  # more bytes under way for each program, where programs alone are too few
        return Split(shares, chunk, tile=32, warps=1, stages=3, registers=168)
    return Split(shares, chunk, tile=16, warps=1, stages=4, registers=168)


def rows_class(rows: int) -> int:
    """Of `ROWS_CLASSES`, for so many rows."""
    return next(most for most in ROWS_CLASSES if rows <= most)


def _at_once(group: int, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory, at most, of a program that reads a short row at once: its keys and values, what e4m3 is widened to,
    at worst fp32, and some for what warps tell each other. For more than 8 heads Hopper's products keep another copy of 16 bit."""
    element = 2 * itemsize + 4 if itemsize == 1 else 4 * itemsize if itemsize == 2 and group > 8 else 2 * itemsize
    return (SHORT * element << (head_dim - 1).bit_length()) + (24 << 10)


class Workspace:
    """Where programs that share a row leave their parts, and count themselves; on one device, for one stream.

    It grows, and what was given out stays: captured launches hold it. Counts are 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.processors, self.shared = 1, SHARED
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.processors = found.multi_processor_count
            self.shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
        self._given: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def take(self, groups: int, pieces: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For so many groups of programs: (maxima, sums, each groups * pieces * heads fp32; outputs, those times width;
        counts, groups int32), or larger. Nothing is shared where pieces is 1."""
        if pieces == 1:
            groups = 1
        heads *= groups * pieces
        for held in self._given:
            if held[0].numel() >= heads and held[2].numel() >= heads * width and held[3].numel() >= groups:
                return held
        with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
            sizes = heads, heads, heads * width
            top, total, out = (torch.zeros(size, dtype=torch.float32, device=self._device) for size in sizes)
            held = top, total, out, torch.zeros(groups, dtype=torch.int32, device=self._device)
        self._given.append(held)
        return held


TILE_ROWS = 128
"""Of a row of several tokens, a tile has the queries of so many (token, head), at most, for one KV head."""


class PrefillChoice(NamedTuple):
    """rows: (token, head) that a program has, TILE_ROWS or a half of it. keys: that it computes at a time, a power of two. stages:
    as Triton's num_stages. registers: of a thread, at most, where the compiler is not to choose: so many programs fit on a
    processor."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def tile_tokens(group: int) -> int:
    """Tokens of a tile, for `group` query heads per KV head."""
    return max(1, TILE_ROWS // group)


def prefill_tiles(query_starts_cpu: Sequence[int], group: int) -> int:
    """Tiles of rows that have tokens query_starts_cpu[r] .. query_starts_cpu[r + 1] - 1. group: query heads per KV head."""
    tokens = tile_tokens(group)
    return sum(-(-(end - begin) // tokens) for begin, end in pairwise(query_starts_cpu))


def most_prefill_tiles(tokens: int, rows: int, group: int) -> int:
    """Of any batch of so many rows that have so many tokens together, or fewer."""
    return min(tokens, tokens // tile_tokens(group) + rows)


def prefill_choice(head_dim: int, itemsize: int) -> PrefillChoice:
    """For any rows, as a captured launch serves all. itemsize: bytes of a query's element. As measured on H200."""
    if itemsize == 4:  # whose products are not a tensor core's
        return PrefillChoice(64, 32, warps=4, stages=2)
    if head_dim > 128:
        return PrefillChoice(64, 32, warps=4, stages=2)
    # Several programs on a processor: one's products go on while others take exponentials.
    return PrefillChoice(64, 64, warps=4, stages=3)
