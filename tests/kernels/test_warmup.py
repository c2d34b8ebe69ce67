# SPDX-License-Identifier: Apache-2.0
"""Steps of the warm-up's counts launch every variant of a kernel that any count launches. GEMMs: see gemm/test_heuristics.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

import pytest

from phalanx import kernels
from phalanx.kernels import warmup
from phalanx.kernels.attention import heuristics as attention
from phalanx.kernels.ops import heuristics as ops


def attention_variants(rows: int) -> list[Hashable]:
    """The constants with which decode and prefill attention are compiled for so many rows, for layers of many kinds."""
    constants: list[Hashable] = []
    for kv_heads, group, head_dim, itemsize, num_sms, short in itertools.product(
        (1, 2, 8), (1, 4, 8, 20), (64, 128, 256), (1, 2, 4), (132, 78), (False, True)
    ):
        tiling = attention.select_decode(rows, kv_heads, group, head_dim, itemsize, num_sms, short=short)
        split = tiling.extra_splits > 0
        constants.append((split, *tiling[2:], attention.row_class(rows) if split else 0))
        constants.append((tiling.chunk, split))
    return constants


def latent_variants(rows: int) -> list[Hashable]:
    """The same of decode attention over latents."""
    constants: list[Hashable] = []
    for heads, itemsize, num_sms, shared_memory in itertools.product(
        (1, 8, 16, 20, 32, 40, 64, 96, 128), (1, 2, 4), (132, 108, 78, 148), (99 << 10, 163 << 10, 227 << 10)
    ):
        tiling = attention.select_latent_decode(rows, heads, 576, itemsize, num_sms, shared_memory=shared_memory)
        split = tiling.extra_splits > 0
        constants.append((tiling.heads, tiling.tile, tiling.warps, tiling.stages, split, tiling.apart))
        constants.append((tiling.tile, tiling.split.max_splits, attention.row_class(rows)) if split else None)
        if rows <= attention.ROW_CLASSES[-1]:
            tiling = attention.select_latent_bands(rows, heads, num_sms)
            constants.append((tiling.tile, tiling.split.max_splits, attention.row_class(rows), tiling.extra_splits > 0))
        constants.append(attention.select_latent_merge(rows))
    return constants


def ops_variants(tokens: int) -> list[Hashable]:
    """The warps with which norms of tokens and heads, and quantization, are launched for so many tokens."""
    blocks = [32 << power for power in range(12)]
    norms = [ops.row_warps(block, tokens * heads) for block in blocks for heads in (1, 4, 32)]
    return [*norms, *(ops.column_warps(block, tokens) for block in blocks), ops.rope_heads(tokens)]


@pytest.mark.parametrize(
    ("counts_up_to", "variants"),
    [
        (attention.warmup_token_counts, attention_variants),
        (attention.warmup_token_counts, latent_variants),
        (ops.warmup_token_counts, ops_variants),
    ],
    ids=["attention", "latent", "ops"],
)
@pytest.mark.parametrize("most", [0, 1, 5, 63, 129, 400])
def test_every_variant_is_launched(
    counts_up_to: Callable[[int], list[int]], variants: Callable[[int], list[Hashable]], most: int
) -> None:
    counts = counts_up_to(most)
    assert all(1 <= count <= most for count in counts)
    launched = [set(each) for each in zip(*map(variants, counts), strict=True)]
    for count in range(1, most + 1):
        for variant, warm in zip(variants(count), launched, strict=True):
            assert variant in warm, (count, variant)


@pytest.mark.parametrize("most", [0, 1, 7, 64, 1000, 4095])
def test_counts_are_united_ascending_and_few(most: int) -> None:
    for counts in (kernels.warmup_token_counts(most), warmup.warmup_row_counts(most)):
        assert counts == sorted(set(counts))
        assert counts[-1:] == [most][: bool(most)]
        assert len(counts) <= 2 * most.bit_length() + 4
