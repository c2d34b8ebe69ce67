# SPDX-License-Identifier: Apache-2.0
"""How attention is tiled over programs, decided from shapes alone, so that a captured launch serves all lengths, or all short ones.

Decode: how many programs may share a row (split-KV), how much one reads at a time, and where they leave their partial results.
Prefill: which tokens a program has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, gpu

MAX_SPLITS_PER_ROW = 32
"""The last program of a row to finish reads what all others left."""

ROW_CLASSES = (64, 512, 4096)
"""The planning kernel of split-KV reads the lengths of so many rows, there or not; batches of more rows are not split."""

SHORT_KV = 256
"""Tokens of a short row, at most: where programs are few and should finish soon, one program reads them all at once."""

PROGRAMS_PER_SM = 8
"""Programs of decode attention that run on a multiprocessor at once. Rows of equal length are split no further than into as many
programs as the GPU runs at once."""


class DecodeTiling(NamedTuple):
    """extra_splits: programs for one KV head beyond one per row, which the longest rows share; 0: rows are not split, and there may
    be any number of them. chunk: tokens of a row for each of its splits, at least, unless the row is shorter. tile: tokens that a
    program computes at a time, divided among its warps, 16 or more each. stages: as Triton's num_stages: tiles that are computed or
    loaded. registers: of a thread, at most, so that as many programs fit on a multiprocessor as it allows. cooperative: a program's
    warps work on the same scores, rather than each on its own."""

    extra_splits: int
    chunk: int
    tile: int
    warps: int
    stages: int
    registers: int
    cooperative: bool = False


def select_decode(
    rows: int, kv_heads: int, group: int, head_dim: int, itemsize: int, num_sms: int, *,
    short: bool = False, shared_memory: int = HOPPER_SHARED_MEMORY,
) -> DecodeTiling:  # fmt: skip
    """For `rows` decode rows of any length, or (short) of up to SHORT_KV tokens each. group: query heads per KV head; itemsize:
    bytes of a cached element; num_sms: the GPU's; shared_memory: bytes that a program may use. As measured on H200."""
    programs, concurrent = rows * kv_heads * -(-group // 16), PROGRAMS_PER_SM * num_sms
    # Splits per row where all rows are equally long. With one, such rows are not split, but one that is longer than the others is:
    # no finer than that needs, as merging splits costs more than it gains where all are short.
    per_row = min(max(concurrent // (2 * programs), 1), MAX_SPLITS_PER_ROW) if rows <= ROW_CLASSES[-1] else 0
    if head_dim * itemsize > 256:  # also in fp32, whose GEMMs do not run on tensor cores
        return DecodeTiling(per_row * rows, 128, tile=32, warps=2, stages=2, registers=255)
    chunk = 128 if per_row > 1 else 512
    # Where one program per row fills no more than half of the GPU, too few bytes are being loaded: two warps help, or, where
    # multiprocessors would have two or three programs, which is uneven, more programs for rows that have several chunks.
    two_warps = per_row == 1 and itemsize == 1 and concurrent // programs == 2
    if per_row == 1 and not two_warps:
        per_row = max(concurrent // programs, 1)
    extra_splits = per_row * rows
    few = 2 * programs <= num_sms
    if few and short and _short_row_bytes(group, head_dim, itemsize) <= shared_memory:  # latency of one row is what counts
        return DecodeTiling(0, SHORT_KV, tile=SHORT_KV, warps=8, stages=2, registers=255, cooperative=True)
    if two_warps:
        return DecodeTiling(extra_splits, chunk, tile=32, warps=2, stages=4, registers=168)
    if not few and (itemsize == 1 or chunk == 128):  # more bytes being loaded per program, where programs alone are too few
        return DecodeTiling(extra_splits, chunk, tile=32, warps=1, stages=3, registers=168)
    return DecodeTiling(extra_splits, chunk, tile=16, warps=1, stages=4, registers=168)


def row_class(rows: int) -> int:
    """The least of `ROW_CLASSES` that is at least `rows`."""
    return next(most for most in ROW_CLASSES if rows <= most)


def _short_row_bytes(group: int, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory, at most, of a program that reads a short row at once: its keys and values, the wider values that e4m3
    becomes, at worst fp32, and some for what warps exchange. For more than 8 heads Hopper's GEMMs keep another copy of 16 bit."""
    element = 2 * itemsize + 4 if itemsize == 1 else 4 * itemsize if itemsize == 2 and group > 8 else 2 * itemsize
    return (SHORT_KV * element << (head_dim - 1).bit_length()) + (24 << 10)


class SplitKvWorkspace:
    """Where programs that share a row leave their partial results, and count themselves; on one device, for one stream.

    It grows, and buffers are never freed: captured launches refer to them. Counts are 0 between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _, self.num_sms, self.shared_memory = gpu(device)
        self._buffers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def take(self, groups: int, splits: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For so many groups of programs: (maxima, sums, each groups * splits * heads fp32; outputs, those times width; counts,
        groups int32), or larger. Nothing is shared where splits is 1."""
        if splits == 1:
            groups = 1
        heads *= groups * splits
        for buffers in self._buffers:
            if buffers[0].numel() >= heads and buffers[2].numel() >= heads * width and buffers[3].numel() >= groups:
                return buffers
        with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
            sizes = heads, heads, heads * width
            top, total, out = (torch.zeros(size, dtype=torch.float32, device=self._device) for size in sizes)
            buffers = top, total, out, torch.zeros(groups, dtype=torch.int32, device=self._device)
        self._buffers.append(buffers)
        return buffers


TILE_ROWS = 128
"""(token, head) pairs of queries that a tile of a prefill row has, at most, for one KV head."""


class PrefillTiling(NamedTuple):
    """rows: (token, head) pairs that a program has, TILE_ROWS or a half of it. keys: that it computes at a time, a power of two.
    stages: as Triton's num_stages. registers: of a thread, at most, where the compiler is not to choose, so that as many programs
    fit on a multiprocessor as it allows."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def tile_tokens(group: int) -> int:
    """Tokens of a tile, for `group` query heads per KV head."""
    return max(1, TILE_ROWS // group)


def count_prefill_tiles(query_starts_cpu: Sequence[int], group: int) -> int:
    """Tiles of rows that have tokens query_starts_cpu[r] .. query_starts_cpu[r + 1] - 1. group: query heads per KV head."""
    tokens = tile_tokens(group)
    return sum(-(-(end - begin) // tokens) for begin, end in pairwise(query_starts_cpu))


def max_prefill_tiles(tokens: int, rows: int, group: int) -> int:
    """The most tiles of any batch of so many rows that have so many tokens together, or fewer."""
    return min(tokens, tokens // tile_tokens(group) + rows)


def select_prefill(head_dim: int, itemsize: int) -> PrefillTiling:
    """For any rows, as a captured launch serves all. itemsize: bytes of a query's element. As measured on H200."""
    if itemsize == 4:  # whose GEMMs do not run on tensor cores
        return PrefillTiling(64, 32, warps=4, stages=2)
    if head_dim > 128:
        return PrefillTiling(64, 32, warps=4, stages=2)
    # Several programs on a multiprocessor: one's GEMMs go on while others take exponentials.
    return PrefillTiling(64, 64, warps=4, stages=3)


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Numbers of decode rows, up to max_tokens, that between them launch every variant of these kernels that any number does:
    tilings change once at most between a power of two and its double, and the planning kernel behind each of `ROW_CLASSES`."""
    counts = {*(1 << power for power in range(max_tokens.bit_length())), *(most + 1 for most in ROW_CLASSES)}
    return sorted({min(count, max_tokens) for count in counts} - {0})
