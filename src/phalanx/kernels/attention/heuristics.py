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

LOWEST_SCORE = -1e30
"""Below every score, and still finite: the difference of two is a number. Also the log-sum-exp of no score."""

MAX_SPLITS_PER_ROW = 128
"""The last program of a row to finish reads what all others left."""

MAX_SMALL_SPLITS = 32
"""The same, where a program has one or two warps, which read what fewer others left at once; and of latent attention."""

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
    warps work on the same scores, rather than each on its own. max_splits: of a row.

    Merging the splits of a row: merge_heads: heads of each program of a kernel of its own that does it, a power of two; 0: the last
    split to arrive does it. merge_splits: splits that are read as one block, a power of two; 0: one behind the other, as many at
    once as registers hold. prefetch: tiles that each split asks the L2 cache for while the kernel before still runs, where lengths
    are read early."""

    extra_splits: int
    chunk: int
    tile: int
    warps: int
    stages: int
    registers: int
    cooperative: bool = False
    max_splits: int = MAX_SPLITS_PER_ROW
    merge_heads: int = 0
    merge_splits: int = 0
    prefetch: int = 0


def select_decode(
    rows: int, kv_heads: int, group: int, head_dim: int, itemsize: int, num_sms: int, *,
    short: bool = False, fp32: bool = False, shared_memory: int = HOPPER_SHARED_MEMORY,
) -> DecodeTiling:  # fmt: skip
    """For `rows` decode rows of any length, or (short) of up to SHORT_KV tokens each. group: query heads per KV head; itemsize:
    bytes of a cached element; num_sms: the GPU's; fp32: queries are, and what is cached becomes; shared_memory: bytes that a
    program may use. As measured on H200."""
    shape = rows, kv_heads, group, head_dim, itemsize, num_sms
    return _select_decode(*shape, short=short, fp32=fp32, shared_memory=shared_memory)._replace(prefetch=PREFETCH)


def _select_decode(
    rows: int, kv_heads: int, group: int, head_dim: int, itemsize: int, num_sms: int, *, short: bool, fp32: bool, shared_memory: int
) -> DecodeTiling:
    programs, concurrent = rows * kv_heads * -(-group // 16), PROGRAMS_PER_SM * num_sms
    few = 2 * programs <= num_sms
    if few and short and _short_row_bytes(group, head_dim, itemsize) <= shared_memory:  # latency of one row is what counts
        return DecodeTiling(0, SHORT_KV, tile=SHORT_KV, warps=8, stages=2, registers=255, cooperative=True)
    if fp32 or head_dim * itemsize > 256:  # GEMMs in fp32 do not run on tensor cores
        per_row = min(max(concurrent // (2 * programs), 1), MAX_SMALL_SPLITS) if rows <= ROW_CLASSES[-1] else 0
        return DecodeTiling(per_row * rows, 128, tile=32, warps=2, stages=2, registers=255, max_splits=MAX_SMALL_SPLITS)
    if programs <= 2 * num_sms:
        return _one_wave(rows, programs, head_dim * itemsize, num_sms)
    # Rows of equal length are not split further than into as many programs as run at once, but one that is longer than the others
    # is. Where one program per row fills no more than half of the GPU, too few bytes are being loaded: two warps help.
    per_row = concurrent // programs
    if itemsize == 1 and per_row in (2, 3):
        return DecodeTiling(rows * (per_row - 1), 512, tile=32, warps=2, stages=4, registers=168, max_splits=MAX_SMALL_SPLITS)
    extra_splits = max(per_row, 1) * rows if rows <= ROW_CLASSES[-1] else 0
    tile, stages = (32, 3) if itemsize == 1 else (16, 4)  # the same bytes being loaded
    return DecodeTiling(extra_splits, 512, tile, warps=1, stages=stages, registers=168, max_splits=MAX_SMALL_SPLITS)


PREFETCH = 1
"""Of every tiling: see `DecodeTiling`."""

FEW_ROWS = 16
"""Launches of fewer rows, a power of two for the sake of `warmup_token_counts`, where all splits are of a few rows, have small
programs, twice as many, and a kernel that merges their splits, one head a program: in a layer, one row of 2,048 tokens takes 2 us
less than with a merge by the last split to arrive, and one of 16,384 tokens 2.5 (benchmarks/results/kernels_attention_merge.json,
which also has what prefetching gains)."""


def _one_wave(rows: int, programs: int, token_bytes: int, num_sms: int) -> DecodeTiling:
    """Where `programs`, one per row and KV head, are at most twice the multiprocessors: splits so many that the GPU runs all at
    once, and loads as much at a time as its memory delivers. token_bytes: of a key."""
    each = 32 if token_bytes <= 128 else 16  # tokens of a warp
    if 8 * programs <= num_sms:  # all splits are of a few rows: the fewer, the sooner they are merged
        splits = num_sms // programs * rows
        if rows >= FEW_ROWS:
            return DecodeTiling(splits, 128, tile=4 * each, warps=4, stages=4, registers=168)
        small = DecodeTiling(2 * splits, 64, tile=2 * each, warps=2, stages=4, registers=168)
        return small._replace(merge_heads=1, merge_splits=32)
    if programs > num_sms:
        return DecodeTiling(rows, 128, tile=4 * each, warps=4, stages=4, registers=168)
    per_row = (4 * num_sms + programs) // (2 * programs)  # of programs of two warps, two on a multiprocessor, rounded
    return DecodeTiling(per_row * rows, 128, tile=2 * each, warps=2, stages=3, registers=168)


MAX_MERGED_SPLITS = 128
"""Splits of a row, at most, where a kernel of its own merges them."""


class LatentTiling(NamedTuple):
    """Of latent decode attention. heads: rows of a program's tiles of scores, 16 or more; apart: a kernel of its own merges the
    splits, at most `most_merged` of a row; its other fields as of `DecodeTiling`."""

    heads: int
    extra_splits: int
    tile: int
    warps: int
    stages: int
    chunk: int = 128
    apart: bool = False
    most_merged: int = MAX_MERGED_SPLITS

    @property
    def split(self) -> DecodeTiling:
        """As `split_kv.plan` takes it."""
        most = self.most_merged if self.apart else MAX_SMALL_SPLITS
        return DecodeTiling(self.extra_splits, self.chunk, self.tile, self.warps, self.stages, 255, max_splits=most)


LATENT_TILINGS = {
    (64, 2): ((64, 8, 2), (32, 8, 3), (32, 8, 2)),
    (32, 2): ((32, 4, 3), (32, 4, 2)),
    (16, 2): ((32, 4, 3), (32, 4, 2), (16, 4, 2)),
    (64, 1): ((64, 8, 2), (32, 8, 2)),
    (16, 1): ((64, 8, 3), (64, 8, 2), (32, 8, 2), (16, 4, 2)),
    (16, 4): ((16, 4, 2),),
}
"""Heads of a program and bytes of a cached element -> (tile, warps, stages), the fastest on an H200 first
(benchmarks/results/kernels_latent_before.json); the others are for GPUs with less shared memory."""


def select_latent_decode(
    rows: int, heads: int, width: int, itemsize: int, num_sms: int, *, shared_memory: int = HOPPER_SHARED_MEMORY
) -> LatentTiling:  # fmt: skip
    """For `rows` decode rows of any length. heads: of this rank; width: elements of a cached token; itemsize: bytes of one.

    Each band of heads reads the latents again, but programs of few heads are more and shorter: so 64 heads go together where rows
    are enough to occupy an eighth of the GPU, and 32 where they occupy half of it. Variants of the kernel depend on the magnitude
    of `rows` alone: see `warmup_token_counts`."""
    least, band = 1 << (rows.bit_length() - 1), 16
    if heads >= 64 and least * -(-heads // 64) >= num_sms // 8:
        band = 64
    elif 32 <= heads < 64 and least * -(-heads // 32) >= num_sms // 2:
        band = 32
    fitting = _latent_tilings(band, width, itemsize, shared_memory)
    if not fitting:
        band, fitting = 16, _latent_tilings(16, width, itemsize, shared_memory) or list(LATENT_TILINGS[16, itemsize][-1:])
    bands = -(-heads // band)
    programs, (tile, warps, stages) = least * bands, fitting[0]
    few = programs <= num_sms // 16
    extra_splits, apart = 0, False
    if rows <= ROW_CLASSES[-1]:
        # One program a multiprocessor, or two small ones; and some for a row that is much longer than the others.
        waves = 2 if band == 16 and bands > 1 and not few else 1
        extra_splits = max(waves * num_sms // bands - rows, num_sms // (2 * bands), 1)
        apart = waves * num_sms // bands >= 5 * least
    if (band, itemsize) == (16, 1) and programs >= (num_sms if bands == 1 else num_sms // 8):
        tile, warps, stages = 32, 4, stages + 1  # more programs at once
    elif (band, itemsize) == (16, 2) and few and _latent_bytes(band, width, itemsize, tile, stages + 1) <= shared_memory:
        stages += 1  # more reads under way
    return LatentTiling(band, extra_splits, tile, warps, stages, 64 if apart else 128, apart)


LATENT_RANK, LATENT_ROPE = 512, 64
"""Of the latents to which the warp-specialized kernel for latent decode attention attends (DeepSeek's and Kimi's)."""

LATENT_BAND, LATENT_TILE = 64, 64
"""Heads of a program of that kernel, and tokens that it computes at a time."""

LATENT_BAND_SPLITS = 64
"""Splits of a row, at most, in that kernel, each of which leaves 128 KiB: one row of 16,384 tokens takes twice as long with 128
(benchmarks/results/kernels_latent.json)."""

LATENT_BAND_LEAST = 33
"""Heads of a rank from which on that kernel is used: a band of fewer would be empty by half."""


def select_latent_bands(rows: int, heads: int, num_sms: int) -> LatentTiling:
    """As `select_latent_decode`, of the warp-specialized kernel, for up to ROW_CLASSES[-1] rows. A program of it takes a whole
    multiprocessor: splits are so many that each has one, and some for a row that is much longer than the others. A kernel of its
    own merges them."""
    bands = -(-heads // LATENT_BAND)
    extra_splits = max(num_sms // bands - rows, num_sms // (2 * bands), 1)
    tiling = LatentTiling(LATENT_BAND, extra_splits, LATENT_TILE, warps=4, stages=2, chunk=LATENT_TILE, apart=True)
    return tiling._replace(most_merged=LATENT_BAND_SPLITS)


def select_latent_merge(rows: int) -> tuple[int, int, bool]:
    """lanes, at_once and block of `split_reduce.merge_apart`. Of few rows each may have many splits."""
    return (1, 16, True) if rows < FEW_ROWS else (2, 8, False)


def _latent_tilings(band: int, width: int, itemsize: int, shared_memory: int) -> list[tuple[int, int, int]]:
    """Those of LATENT_TILINGS that fit."""
    tilings = LATENT_TILINGS.get((band, itemsize), ())
    return [each for each in tilings if _latent_bytes(band, width, itemsize, each[0], each[2]) <= shared_memory]


def _latent_bytes(heads: int, width: int, itemsize: int, tile: int, stages: int) -> int:
    """Bytes of shared memory, at most: queries, the tiles that are under way, and in e4m3 one that is widened to 16 bit."""
    operand = max(itemsize, 2)
    buffers = stages if heads == 64 and itemsize > 1 else stages - 1  # what wgmma reads is held until it is done
    widened = tile * width * operand if itemsize == 1 else 0
    return heads * width * operand + buffers * tile * width * itemsize + widened + (8 << 10)


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

    def take(self, groups: int, results: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For so many groups of programs that share a row, and results of programs together, each of `heads` rows of `width`:
        (maxima, sums, each results * heads fp32; outputs, those times width; counts, groups int32), or larger."""
        heads *= results
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
    fit on a multiprocessor as it allows. split_keys: of programs that share the keys of a tile each has so many, at least.
    split_cost, waves: see `split_kv.prefill_span`. splits_per_sm: programs that a multiprocessor runs at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    split_keys: int = 512
    split_cost: int = 192
    splits_per_sm: int = 2
    waves: int = 1


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


LONG_WAVES, LONG_SPLIT, LONG_SPLIT_COST = 1, 512, 384
"""Split-KV of the warp-specialized kernel for prefill rows, see `split_kv.prefill_span`: waves of programs that may share keys, 0
for none; keys of a split, at least; and for how many keys a program computes as long as it takes to begin, to end and to be merged.
With more waves the time of a launch follows its pairs of tokens and keys more closely, but more programs that find nothing to do
begin and end behind the others: four take 6 to 10 us more at short contexts on an H200, where a launch takes 16 to 40 us, and one
takes 1 us."""

LONG_KV, LONG_TOKENS = 512, 64
"""KV tokens of a row, on average, from which that kernel is the faster one on an H200; and tokens of a launch from which it is used
whatever the lengths, which a captured launch does not know: at 400 KV tokens it takes 1 us less or more there, and at 100,000 half
as long."""

MAX_LONG_ROWS = 512
"""Prefill rows of a launch of that kernel, at most, so that one variant of it serves all."""


def is_long_prefill(tokens: int, rows: int, mean_length: int | None) -> bool:
    """Whether that kernel is the faster one for so many rows of so many tokens together, where it can compute them. mean_length:
    see `dispatch.prefill_attention`."""
    if rows > MAX_LONG_ROWS:
        return False
    return tokens >= LONG_TOKENS if mean_length is None else mean_length >= LONG_KV


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Numbers of decode rows, up to max_tokens, that between them launch every variant of these kernels that any number does:
    tilings change once at most between a power of two and its double, and the planning kernel behind each of `ROW_CLASSES`."""
    counts = {*(1 << power for power in range(max_tokens.bit_length())), *(most + 1 for most in ROW_CLASSES)}
    return sorted({min(count, max_tokens) for count in counts} - {0})
