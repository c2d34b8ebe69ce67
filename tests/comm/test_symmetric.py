# SPDX-License-Identifier: Apache-2.0
"""How large a workspace is, and what fits into it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.sequence_parallel.rs_norm_ag import chunk_rows_of
from phalanx.comm.symmetric import LIMIT_BYTES, PART_ALIGNMENT, SymmetricWorkspace, half_bytes, part_vectors, workspace_bytes

worlds, sizes = st.integers(2, 8), st.integers(16, 1 << 31)


def workspace_of(world: int, message_bytes: int) -> SymmetricWorkspace:
    nothing = torch.zeros(2)
    return SymmetricWorkspace(0, world, (0,) * world, half_bytes(world, message_bytes) // 16, nothing, nothing, 132, 90)


@given(worlds, sizes)
def test_a_workspace_stays_within_its_limit(world: int, message_bytes: int) -> None:
    assert 0 < workspace_bytes(world, message_bytes) <= LIMIT_BYTES
    assert workspace_bytes(world, message_bytes) == 2 * half_bytes(world, message_bytes)


def test_a_rank_alone_needs_none() -> None:
    assert workspace_bytes(1, 1 << 30) == 0


@given(worlds, sizes)
def test_what_is_said_to_fit_fits(world: int, message_bytes: int) -> None:
    space = workspace_of(world, message_bytes)
    assert (world - 1) * space.oneshot_vectors <= space.half
    vectors = space.twoshot_vectors
    assert (world - 1) * part_vectors(vectors, world) + vectors <= space.half
    # Rows of up to 32 KiB (16384 x bf16), or the whole message, fit at once.
    assert min(space.oneshot_vectors, vectors) * 16 >= 32 << 10


@given(worlds, st.integers(1 << 20, 48 << 20))
def test_the_longest_message_goes_in_one_two_shot_within_the_limit(world: int, message_bytes: int) -> None:
    assert workspace_of(world, message_bytes).twoshot_vectors * 16 >= message_bytes - 1024 * world


@pytest.mark.parametrize("hidden", [2048, 4096, 8192, 16384])
def test_two_ranks_have_no_chunk_of_a_few_rows(hidden: int) -> None:
    """A launch for them would take nearly as long as one for thousands."""
    tokens = 8192
    rows = chunk_rows_of(hidden * 2 // 16, workspace_of(2, tokens * hidden * 2).twoshot_vectors, 2)
    assert min(rows, tokens) == min(tokens, (64 << 20) // (2 * hidden))


@given(worlds, st.integers(1, 1 << 24))
def test_shares_cover_the_message(world: int, vectors: int) -> None:
    part = part_vectors(vectors, world)
    assert part * world >= vectors
    assert part % PART_ALIGNMENT == 0
    assert part - PART_ALIGNMENT < -(-vectors // world)
