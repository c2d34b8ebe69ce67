# SPDX-License-Identifier: Apache-2.0
"""TWOSHOT+LANDED on GPUs: a product writes the rows that each rank owns into that rank's memory, and `kernels.rows.landed` goes on
from there.

    rows of rank r: out = round(x of rank 0 + x of rank 1 + ...), then the fusion, on rank r; norm or e4m3 and scales go to all

The bits are those of `owned` behind a whole product, as far as the product of a part of the rows gives the bits of the whole one's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.chunked import pitch_of
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.rows.owned import launch_of
from phalanx.comm.rows.ownership import OwnedRows, same_owners
from phalanx.comm.symmetric import Landing, Workspace


def pieces_of(tokens: int, hidden: int, dtype: torch.dtype, landing: Landing, *, least: int) -> list[tuple[slice, Tensor]] | None:
    """`Spread.pieces` of a product [tokens, hidden]; None where its rows do not have room, it is shorter than `least` bytes, or the
    last rank would own none. The next product may be written there when this one's `all_reduce_norm` has been launched."""
    rank, world, row = landing.rank, landing.world, hidden * dtype.itemsize
    depth = -(-tokens // world)
    if tokens * row < least or world * depth * row > landing.room or tokens <= depth * (world - 1):
        return None  # a product of no rows, for a last rank that owns none, is none
    pieces = []
    # Each rank begins with another peer, and ends with itself, while what it sent is still on the wire.
    for step in range(1, world + 1):
        owner = (rank + step) % world
        rows = slice(owner * depth, min((owner + 1) * depth, tokens))
        pieces.append((rows, landing.there(owner, rows.stop - rows.start, hidden, dtype, rank * depth * row)))
    return pieces


def room_to_hand_out(tokens: int, row_bytes: int, workspace: Workspace) -> bool:
    """Whether half of the workspace holds what `tokens` rows become, `row_bytes` each, and a scale of 4 bytes for each."""
    return tokens * (row_bytes + 4) <= 16 * workspace.half


def all_reduce_norm(fusion: ResidualRmsNorm, workspace: Workspace, landing: Landing) -> tuple[Tensor, ...]:
    """As `owned.all_reduce_norm`, of a product like fusion.residual that was written to its `pieces_of`; the residual is whole, or
    OwnedRows with owners by all rows at once."""
    from phalanx.kernels.residual_rms_norm import Sinks, quant_mode
    from phalanx.kernels.rows.landed import landed_norm
    from phalanx.kernels.vectors import KINDS

    residual, (rows, hidden) = fusion.residual, fusion.residual.shape
    if isinstance(residual, OwnedRows):
        if not same_owners(rows, residual.at_once, rows):
            raise ValueError(f"the residual's rows have owners by {residual.at_once} rows, and this all-reduce's by {rows}")
        residual = residual.held
    mode = quant_mode(fusion.quant, fusion.scale)
    sinks = Sinks(residual, mode, False)
    taken = sinks.norm if sinks.quantized is None else sinks.quantized
    assert taken is not None
    run = launch_of(rows, pitch_of(residual), pitch_of(taken), workspace.world, workspace.sms)
    landed_norm[(run.programs,)](
        landing.here, residual.view(torch.int32), fusion.weight.view(torch.int32), sinks.pointers(0, rows), taken.view(torch.int32),
        sinks.residual if fusion.scale is None else fusion.scale, workspace.addresses, landing.flags, workspace.turn,
        workspace.half, rows, hidden, run.movers, fusion.eps, KIND=KINDS[residual.dtype], QUANT=mode, RANK=workspace.rank,
        WORLD=workspace.world, BLOCK=run.block, TAKE=run.take, WARPS=run.warps, PTX=workspace.ptx, num_warps=run.warps,
        maxnreg=run.registers, launch_pdl=workspace.ptx >= 90,
    )  # fmt: skip
    *others, new = sinks.outputs()
    return (*others, OwnedRows.of(new, rows))
