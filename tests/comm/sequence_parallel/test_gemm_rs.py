# SPDX-License-Identifier: Apache-2.0
"""Products that land with the owners of their rows: every row once, where the kernel reads it, and the kernel compiles."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.comm.choose import LANDED_FROM_BYTES
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.rows import OwnedRows, landed, own_rows
from phalanx.comm.rows.owners import OnGpus
from phalanx.comm.symmetric import LANDING_LIMIT_BYTES, Landing, Workspace, half_bytes, landing_bytes, landing_room
from tests.comm.rows.test_owned import SMS, space

META = torch.device("meta")
Asked = tuple[int, int, int, torch.dtype, int]


def landing(rank: int, world: int, message_bytes: int) -> tuple[Landing, list[Asked]]:
    """With nothing in it, and what was asked of its `there`."""
    asked: list[Asked] = []

    def there(*wanted: int) -> torch.Tensor:
        asked.append(wanted)  # type: ignore[arg-type]
        return torch.empty(wanted[1:3], dtype=wanted[3], device=META)  # type: ignore[arg-type]

    held: Callable[..., torch.Tensor] = there
    here = torch.zeros(4, dtype=torch.int32)
    return Landing(rank, world, landing_room(world, message_bytes), message_bytes, here, (0,) * world, held), asked


@given(
    st.integers(1, 20_000), st.sampled_from([16, 1008, 5120, 8192]), st.integers(2, 8),
    st.sampled_from([torch.bfloat16, torch.float32]), st.integers(1, 1 << 26),
)  # fmt: skip
def test_every_row_lands_once_where_its_owner_reads_it(
    tokens: int, hidden: int, world: int, dtype: torch.dtype, least: int
) -> None:
    row = hidden * dtype.itemsize
    longest = 8192 * row
    for rank in range(world):
        here, asked = landing(rank, world, longest)
        pieces = landed.pieces_of(tokens, hidden, dtype, here, least=least)
        depth = -(-tokens // world)
        few = tokens * row < least or tokens <= depth * (world - 1)
        if few or world * depth * row > here.room:
            assert pieces is None
            continue
        assert pieces is not None
        owners = [asked_of[0] for asked_of in asked]
        assert owners == [*range(rank + 1, world), *range(rank + 1)], "each rank begins with another peer, and ends with itself"
        for (rows, out), (owner, count, columns, kind, before) in zip(pieces, asked, strict=True):
            (mine,) = own_rows(tokens, tokens, owner, world)
            assert (rows.start, rows.stop) == (mine.start, mine.stop)
            assert out.shape == (count, columns) == (len(mine), hidden)
            assert kind == dtype
            assert before == rank * depth * row, "the kernel reads parts by rank, each as long as the longest"
            assert before + count * row <= here.room


@given(st.integers(0, 1 << 29), st.integers(1, 8))
def test_a_landing_holds_every_message_or_there_is_none(message_bytes: int, world: int) -> None:
    room, taken = landing_room(world, message_bytes), landing_bytes(world, message_bytes)
    assert (room > 0) == (taken > 0) == (world > 1 and LANDED_FROM_BYTES <= message_bytes <= LANDING_LIMIT_BYTES)
    if room:
        row = 65536  # of the widest model that lands
        assert message_bytes + world * row <= room < message_bytes + world * row + 4096
        assert room + 16 * world <= taken, "flags lie behind"


def test_a_group_says_where_to_write_once_for_a_size() -> None:
    here, asked = landing(1, 2, 8192 * 8192 * 2)
    owners = OnGpus(space(2, 8192 * 8192 * 2), here)

    def fusion(tokens: int, quant: str = "fp8", hidden: int = 8192) -> ResidualRmsNorm:
        like = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=META)
        return ResidualRmsNorm(like, like[0], 1e-5, quant)  # type: ignore[arg-type]

    first = owners.pieces(8192, 8192, fusion(8192))
    assert first is not None
    assert owners.pieces(8192, 8192, fusion(8192)) is first
    assert len(asked) == 2
    assert owners.pieces(2048, 8192, fusion(2048)) is not None
    assert owners.pieces(2047, 8192, fusion(2047)) is None, "parts of products would be too small"
    assert owners.pieces(16384, 8192, fusion(16384)) is None, "no room to land"
    for tokens in (8192, 4096):
        assert owners.pieces(tokens, 8192, fusion(tokens, "none")) is None, "the longest norms in 16 bit have no room"
    shorter = OnGpus(space(2, 4096 * 8192 * 2), landing(1, 2, 4096 * 8192 * 2)[0])
    assert shorter.pieces(4096, 8192, fusion(4096, "none")) is not None
    assert OnGpus(space(2, 1 << 20), None).pieces(8192, 8192, fusion(8192)) is None


@given(st.integers(1, 10_000), st.sampled_from([16, 5120, 8192]), st.integers(2, 8), st.integers(1, 2))
def test_what_is_handed_out_fits_half_a_workspace(tokens: int, hidden: int, world: int, itemsize: int) -> None:
    nothing = torch.zeros(2, dtype=torch.int32)
    workspace = Workspace(0, world, (0,) * world, half_bytes(world, 8192 * hidden * 2) // 16, nothing, nothing, SMS, 90)

    def end(rows: int) -> int:
        """Of the scales behind them, as the kernel has them."""
        words_at = rows * (hidden * itemsize // 16) * 16
        return words_at + 4 * rows

    most = bisect.bisect_right(range(1 << 30), 16 * workspace.half, key=end) - 1
    for rows in (tokens, most, most + 1):
        assert landed.room_to_hand_out(rows, hidden * itemsize, workspace) == (rows <= most)


def test_owners_by_chunks_are_refused() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    here, _ = landing(0, 2, LANDED_FROM_BYTES)
    with pytest.raises(ValueError, match="by 3 rows"):
        landed.all_reduce_norm(ResidualRmsNorm(OwnedRows.of(x, 3), x[0], 1e-5), space(2, 1 << 20), here)


@pytest.mark.parametrize(("capability", "world"), [(80, 4), (90, 2), (90, 8), (100, 3)])
def test_kernels_compile(capability: int, world: int) -> None:
    pytest.importorskip("triton")
    from tests.comm import compiled

    workspace, dtype = compiled.workspace(world, capability), compiled.DTYPES[capability]
    here, _ = landing(world - 1, world, LANDED_FROM_BYTES)
    with compiled.only(capability) as launched:
        for tokens, quant, scale in ((700, "none", None), (4100, "fp8", None), (1100, "fp8", torch.ones(()))):
            x = torch.zeros(tokens, 4096, dtype=dtype)
            *_, residual = landed.all_reduce_norm(ResidualRmsNorm(x, x[0], 1e-5, quant, scale), workspace, here)  # type: ignore[arg-type]
            again = landed.all_reduce_norm(ResidualRmsNorm(residual, x[0], 1e-5, quant, scale), workspace, here)  # type: ignore[arg-type]
            assert isinstance(again[-1], OwnedRows)
            assert len(list(own_rows(tokens, again[-1].at_once, 0, world))) == 1
    assert {name for name, _, _ in launched} == {"landed_norm"}
    assert len({made.hash for _, _, made in launched}) == 3, "a kernel is compiled for what it does, not for a number of tokens"
    for _, grid, made in launched:
        per_sm, ptx = -(-grid[0] // SMS), made.asm["ptx"]
        assert made.metadata.shared * per_sm <= 200 << 10
        assert per_sm == 1 or f".maxnreg {made.metadata.maxnreg}" in ptx
        assert ptx.count("ld.acquire.sys") == ptx.count("fence.acq_rel.sys") == world - 1
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
