# SPDX-License-Identifier: Apache-2.0
"""How the GEMMs of experts and of their router tile weights and tokens: pure functions of the sizes."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_K = 128
"""Columns of one k step: what one pass of a GEMM's loop multiplies, and that share a scale where scales are per block."""
_TOKENS = (16, 32, 64, 128)


class TileSize(NamedTuple):
    """pairs: of a token and an expert, in a full tile. extra: up to so many more are in an expert's last tile rather than in
    another, which would read the expert's weights again: they are a second, small GEMM in the same program."""

    pairs: int
    extra: int = 0


class ExpertTiling(NamedTuple):
    """rows, tokens: of the weight and of x in a program's tile, one of x for each pair (twice the rows in the GEMM of gate and up);
    beside: tiles of rows that go through the tokens together, so that what they read stays in the L2 cache. parts: programs that
    share a tile's columns (split-K). extra: see `TileSize`."""

    rows: int
    tokens: int
    warps: int
    stages: int
    beside: int
    parts: int = 1
    extra: int = 0


class RouterTiling(NamedTuple):
    """tokens, experts, block: tokens, rows of the router's weight and columns of a tile; tiles: how many tiles of columns a program
    adds up (split-K: the other columns are other programs')."""

    tokens: int
    experts: int
    block: int
    tiles: int
    warps: int


_T = RouterTiling
ROUTER_TILINGS: tuple[tuple[int, tuple[tuple[int, RouterTiling | None], ...]], ...] = (
    (16, (
        (32, _T(16, 16, 128, 1, 4)), (64, _T(32, 16, 256, 1, 4)), (128, _T(64, 16, 128, 1, 4)), (256, _T(64, 16, 128, 2, 4)),
        (512, _T(32, 16, 128, 2, 4)),
    )),
    (64, (
        (1, None), (32, _T(16, 32, 128, 1, 4)), (64, _T(16, 64, 128, 1, 4)), (128, _T(32, 64, 128, 1, 4)),
        (256, _T(64, 64, 128, 1, 8)), (512, _T(64, 64, 256, 1, 8)),
    )),
    (128, (
        (1, None), (32, _T(16, 32, 256, 1, 4)), (64, _T(32, 64, 128, 2, 4)), (256, _T(64, 64, 256, 1, 8)),
        (512, _T(64, 64, 256, 2, 8)),
    )),
    (1 << 30, ((1, None), (32, _T(16, 32, 256, 2, 4)), (64, _T(64, 64, 256, 1, 8)), (128, _T(64, 64, 128, 4, 8)))),
)  # fmt: skip
"""By the most experts, by the most tokens, as `benchmarks/kernels/router.py` found on an H200: the fastest on average over the
published models of each class. None, or more tokens: torch's GEMM (for one token our GEMV) is as fast."""


def select_router(tokens: int, experts: int) -> RouterTiling | None:
    """For x [tokens, hidden] times the weight [experts, hidden] of a router; None: `kernels.linear`. It changes at token counts of
    2^n only."""
    by_tokens = next(rows for most, rows in ROUTER_TILINGS if experts <= most)
    return next((tiling for most, tiling in by_tokens if tokens <= most), None)


def pairs_of_tile(tokens: int, top_k: int, experts: int, least: int = _TOKENS[0]) -> int:
    """Pairs of a full tile: twice what an expert has on average, so that few experts need a second one, which reads their weights
    again; `least` or a larger power of 2. It changes at token counts of 2^n only, which `warmup_token_counts` has."""
    per_token = max(1, experts // top_k)  # tokens for one pair of each expert
    ratio = 1 << (per_token.bit_length() - 1)
    return next((size for size in (least, *_TOKENS) if tokens <= size * ratio // 2), _TOKENS[-1])


def tile_size(tokens: int, top_k: int, experts: int, sm: int = 90) -> TileSize:
    """As `pairs_of_tile`; but where that is 128, an expert's pairs on average, and up to 16 more: a half of 128 would be empty.
    It changes at token counts of 2^n only, too. sm: compute capability times 10; below 90, registers hold no more than 128."""
    size = pairs_of_tile(tokens, top_k, experts)
    if size < _TOKENS[-1] or sm < 90:
        return TileSize(size)
    return TileSize(64 if pairs_of_tile(-(-tokens // 2), top_k, experts) == 64 else size, 16)


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Token counts up to max_tokens, ascending, that between them launch every variant of these kernels that any count does: the
    powers of 2, at which tiles change, and what lies beyond the last."""
    return sorted({*(1 << power for power in range(max_tokens.bit_length())), max_tokens} - {0})


BATCH_INVARIANT = TileSize(64)
"""Of all numbers of tokens, so that a token's bits do not depend on it."""


def batch_invariant_tiling(itemsize: int, sm: int) -> ExpertTiling:
    """Of both GEMMs, with tiles of BATCH_INVARIANT: no program shares another's columns."""
    return ExpertTiling(64, BATCH_INVARIANT.pairs, 4, _stages(192, itemsize, sm, programs=2), 8)


def expert_tilings(
    tokens: int, top_k: int, experts: int, num_experts: int, hidden: int, inner: int, itemsize: int, num_sms: int, *,
    sm: int = 90, by_block: bool = False,
) -> tuple[ExpertTiling, ExpertTiling]:  # fmt: skip
    """Of both GEMMs on a rank that has `experts` of a layer's num_experts. It changes at token counts of 2^n only."""
    size, pairs = tile_size(tokens, top_k, num_experts, sm), tokens * top_k
    busy = min(num_experts, pairs) * experts // num_experts or 1  # of this rank's experts, where all are alike
    local = -(-(top_k << (tokens - 1).bit_length()) * experts // num_experts)
    return (
        gate_up_tiling(local, busy, size, inner, itemsize, num_sms, sm=sm, by_block=by_block),
        down_tiling(local, busy, size, hidden, inner, itemsize, num_sms, sm=sm, by_block=by_block),
    )


def gate_up_tiling(
    pairs: int, experts: int, size: TileSize, outputs: int, itemsize: int, num_sms: int, *, sm: int = 90,
    by_block: bool = False,
) -> ExpertTiling:  # fmt: skip
    """For x [pairs of a tile, H] times gate and up; pairs, experts: of this rank; outputs: I. itemsize: bytes of a weight's
    element. sm: compute capability times 10. by_block: scales are, so that registers hold two sums.

    As `benchmarks/kernels/moe.py --sweep` found on an H200: few tokens need many bytes under way."""
    tokens, extra = size
    if tokens <= 32:
        programs = min(pairs, experts) * -(-outputs // 64)
        if by_block:  # the sums of a step wait for each other: several programs, or twice the warps, go on meanwhile
            warps, beside = (8, 2) if programs < 4 * num_sms else (4, 3)
            return ExpertTiling(64, tokens, warps, _stages(128 + tokens, itemsize, sm, programs=beside), 4)
        return ExpertTiling(64, tokens, 4, _stages(128 + tokens, itemsize, sm, programs=1 if programs < 4 * num_sms else 2), 4)
    if tokens == 64 or not _large_tiles(sm, by_block) or (sm == 90 and itemsize == 1):
        # On Hopper two programs of 64 rows with 144 pairs, each one warpgroup, keep tensor cores busier than one of 128 rows.
        warps = 8 if (by_block and extra) or (tokens == 128 and sm < 90) else 4
        return ExpertTiling(64, tokens, warps, _stages(128 + tokens + extra, itemsize, sm, programs=2), 8, extra=extra)
    return ExpertTiling(128, 128, 8, _stages(384 + extra, itemsize, sm, programs=1), 8, extra=extra)


def down_tiling(
    pairs: int, experts: int, size: TileSize, outputs: int, inputs: int, itemsize: int, num_sms: int, *, sm: int = 90,
    by_block: bool = False,
) -> ExpertTiling:  # fmt: skip
    """For the inner activations [pairs of a tile, I] times down; outputs: H, inputs: I. sm, by_block: as above.

    Where a rank has few whole experts, their tiles leave half of the multiprocessors idle, so programs share columns."""
    tokens, extra = size
    is_long = inputs >= 32 * BLOCK_K
    if tokens <= 32:
        programs = min(pairs, experts) * -(-outputs // 128)
        if by_block and programs >= num_sms:
            return ExpertTiling(64, tokens, 4, _stages(64 + tokens, itemsize, sm, programs=4), 4)
        if programs >= num_sms:
            return ExpertTiling(128, tokens, 8, _stages(128 + tokens, itemsize, sm, programs=1 if is_long else 3), 4)
        parts = 2 if inputs >= 4 * BLOCK_K else 1
        return ExpertTiling(128, tokens, 8, _stages(128 + tokens, itemsize, sm, programs=1 if is_long else 2), 4, parts)
    rows = 128 if tokens == 64 or _large_tiles(sm, by_block) else 64
    tiles = max(min(pairs, experts), pairs // (tokens + extra)) * -(-outputs // rows)
    parts = max(1, min(num_sms // tiles, inputs // (8 * BLOCK_K), 4))
    if tokens == 64:
        warps, programs = 4 if extra and not by_block else 8, 1 if is_long and not extra else 2
        return ExpertTiling(rows, 64, warps, _stages(192 + extra, itemsize, sm, programs=programs), 8, parts, extra)
    # One warpgroup holds its sums on Hopper; it spills them on Blackwell, and where it stores them in fp32.
    warps = 4 if rows == 128 and sm == 90 and parts == 1 else 8
    stages = _stages(rows + 128 + extra, itemsize, sm, programs=1 if is_long else 2)
    return ExpertTiling(rows, 128, warps, stages, 8, parts, extra)


def _large_tiles(sm: int, by_block: bool) -> bool:
    """Whether registers hold the sums of 128 rows of gate and of up: where tensor cores read shared memory."""
    return sm >= 90 and not by_block


def _stages(rows: int, itemsize: int, sm: int, programs: int) -> int:
    """Blocks of columns under way at once, of `rows` of both operands together, where a multiprocessor has `programs` of them."""
    shared = 208 * 1024 if sm >= 90 else 144 * 1024  # of the 227 KiB and 163 KiB that a program may have at most
    return max(2, min(8, shared // (programs * rows * BLOCK_K * itemsize)))
