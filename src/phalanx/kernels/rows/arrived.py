# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.

"""Rows with owners, where copy engines carry what goes between ranks: what is left for multiprocessors to do.

    total = round(x[0] + ... + x[world - 1])       of its owner's rows, in fp32, in rank order, rounded once
    then what `residual_rms_norm` does with it     bit for bit

Who sends copies data first and the number of the turn behind it, into the receiver's flags. Who waits reads his flags until they
hold the number, which is his own as well: every rank takes the same turns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.allreduce_oneshot import sum_in_rank_order
from phalanx.kernels.residual_rms_norm import finish_row
from phalanx.kernels.signals import slot
from phalanx.kernels.vectors import load, rounded

# Whoever sees the number sees what was copied before it.
_AWAIT = tl.constexpr("""{
  .reg .pred %again;
AWAIT:
  ld.acquire.sys.global.b32 $0, [$1];
  setp.ne.b32 %again, $0, $2;
  @%again bra AWAIT;
}""")


@triton.jit
def _await_all(flags, number, RANK: tl.constexpr, WORLD: tl.constexpr, PTX: tl.constexpr):
    """Until every peer's flag (int32 pointer, one a rank) holds the number. The interpreter runs one rank at a time: no wait."""
    if PTX > 0:
        for step in tl.static_range(1, WORLD):
            tl.inline_asm_elementwise(
                _AWAIT, "=&r,l,r", [flags + (RANK + step) % WORLD, number], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.debug_barrier()  # what is read next, by any thread, was copied


@triton.jit(do_not_specialize=["first", "hidden"])
def arrived_norm(
    x, parts, flags, turn, residual, weight, sinks, scale, first, share, hidden, eps,
    KIND: tl.constexpr, QUANT: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Row first + program of the sum over ranks, once all peers have sent theirs: residual, norm and quantization.

    x, residual: int32 pointers to [rows, hidden], this rank's; parts: to what peers sent of its rows, by `slot`, `share` vectors
    apart; flags: int32, by rank; turn: int32; sinks: pointers (norm, new residual, quantized, scales) as `finish_row` takes them,
    to [rows, hidden] as well; BLOCK: vectors that hold a row.
    """
    pitch = hidden // (4 if KIND == "fp32" else 8)
    column = tl.arange(0, BLOCK)
    mask = column < pitch
    factors = load(weight, column, mask, PTX)
    local = tl.program_id(0)
    row = first + local
    place = row.to(tl.int64) * pitch + column
    own = load(x, place, mask, PTX)
    old = load(residual, place, mask, PTX)
    _await_all(flags, tl.load(turn), RANK, WORLD, PTX)
    words = ()
    for source in tl.static_range(WORLD - 1):
        words = words + load(parts, source * share.to(tl.int64) + local * pitch + column, mask, PTX)
    total = rounded(sum_in_rank_order(own, words, KIND, RANK, WORLD), KIND, PTX)
    finish_row(total, old, factors, row, column, mask, sinks, scale, hidden, eps, KIND, QUANT, False, BLOCK, PTX)


@triton.jit
def end_turn(flags, turn, RANK: tl.constexpr, WORLD: tl.constexpr, PTX: tl.constexpr):
    """Once all peers have handed out their rows, this turn is over: one program of one warp."""
    number = tl.load(turn)
    _await_all(flags, number, RANK, WORLD, PTX)
    tl.store(turn, number + 1)


__all__ = ["arrived_norm", "end_turn", "slot"]
