# SPDX-License-Identifier: Apache-2.0
"""The kernels between processes: each process is one program of one rank, in Triton's interpreter, with shared memory for
workspaces and partial sums, and plain loads and stores in place of PTX. Bits equal the unfused kernel's, and every workspace is
clean again."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels_interpreted import interpreted, let_loops_begin_anywhere

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

HALF = 1 << 10  # vectors
NAN = float("nan")


@dataclass(frozen=True)
class Call:
    """rows x hidden; movers of the programs; scaled: x comes without its scales; gemm_rs: the first program of each rank has
    written it to the ranks that reduce its rows, on one rank long after the others; late: programs without a row begin long
    after. keep_norm: beside its quantization."""

    dtype: torch.dtype
    rows: int
    hidden: int
    quant: str
    movers: int
    scaled: bool = False
    spoiled: bool = False
    gemm_rs: bool = False
    late: bool = False
    keep_norm: bool = False


CALLS = (
    Call(torch.bfloat16, 1, 16, "fp8_token", 1),
    Call(torch.bfloat16, 5, 48, "none", 2),
    Call(torch.float16, 3, 272, "fp8_token", 2),
    Call(torch.bfloat16, 5, 80, "fp8_token", 1, scaled=True),
    Call(torch.float32, 2, 32, "fp8", 1),
    Call(torch.float32, 35, 16, "fp8_token", 2),
    Call(torch.bfloat16, 3, 64, "fp8_token", 2, spoiled=True),
    Call(torch.bfloat16, 3, 64, "none", 1, spoiled=True),
    Call(torch.bfloat16, 7, 80, "fp8_token", 2, gemm_rs=True),
    Call(torch.bfloat16, 9, 48, "none", 1, gemm_rs=True),
    Call(torch.float16, 3, 272, "fp8_token", 2),
    Call(torch.float32, 5, 32, "fp8", 2, gemm_rs=True),
    Call(torch.bfloat16, 6, 64, "fp8_token", 2, spoiled=True, gemm_rs=True),
    Call(torch.bfloat16, 3, 64, "none", 2, gemm_rs=True, late=True),
    Call(torch.bfloat16, 3, 64, "none", 2, gemm_rs=True),
    Call(torch.bfloat16, 5, 272, "fp8_token", 2, keep_norm=True),
    Call(torch.float16, 7, 80, "fp8", 1, scaled=True, keep_norm=True),
    Call(torch.float32, 5, 48, "fp8_token", 1, keep_norm=True),
    Call(torch.float32, 2, 32, "fp8", 2, keep_norm=True),
    Call(torch.bfloat16, 3, 64, "fp8_token", 2, spoiled=True, keep_norm=True),
    Call(torch.bfloat16, 3, 64, "fp8_token", 1),
    Call(torch.bfloat16, 3, 64, "fp8", 1, spoiled=True, keep_norm=True),
    Call(torch.bfloat16, 7, 80, "fp8_token", 2, gemm_rs=True, keep_norm=True),
    Call(torch.float16, 9, 48, "fp8", 1, gemm_rs=True, keep_norm=True),
    Call(torch.bfloat16, 6, 64, "fp8_token", 2, spoiled=True, gemm_rs=True, keep_norm=True),
    Call(torch.float32, 5, 32, "fp8_token", 1, gemm_rs=True, keep_norm=True),
    Call(torch.bfloat16, 5, 48, "none", 2),
)
BUFFER_BYTES = 1 << 12  # bytes; flags lie behind them
LATE = 0.6  # s: longer than a kernel takes here


def shared(shape: tuple[int, ...], dtype: torch.dtype, value: float = 0) -> Tensor:
    """Where every process forked from this one sees it, at the same address."""
    new = torch.full(shape, value, dtype=torch.float32).to(dtype) if dtype.itemsize == 1 else torch.full(shape, value, dtype=dtype)
    return new.share_memory_()


class Board:
    """What the programs of all ranks share in one run."""

    def __init__(self, world: int, programs: int) -> None:
        from phalanx.kernels.ops.residual_rms_norm import NormOutputs

        self.world, self.programs = world, programs
        self.halves = [shared((2 * HALF * 4,), torch.int32, -1) for _ in range(world)]
        self.partials = [shared((BUFFER_BYTES // 4 + 4 * world,), torch.int32) for _ in range(world)]
        self.written = shared((world,), torch.int32)
        self.done = shared((world, programs), torch.int32)
        self.parts: list[list[Any]] = []
        self.norm_outputs: list[list[NormOutputs]] = []
        self.residuals, self.weights = [], []
        for call in CALLS:
            size = (call.rows, call.hidden)
            self.parts.append([self._part(call, rank) for rank in range(world)])
            self.residuals.append(torch.randn(size).to(call.dtype))
            self.weights.append(torch.rand(call.hidden).to(call.dtype))
            norm_outputs = [NormOutputs(torch.empty(size, dtype=call.dtype), call.quant, call.keep_norm) for _ in range(world)]  # type: ignore[arg-type]
            for rank_outputs in norm_outputs:
                rank_outputs.residual.fill_(NAN)
                for out in rank_outputs.outputs():
                    out.share_memory_()
            self.norm_outputs.append(norm_outputs)
        self.scale = torch.tensor(0.02)

    def _part(self, call: Call, rank: int) -> Any:
        from phalanx.kernels.scaled_tensors import Unscaled

        x = torch.randn(call.rows, call.hidden).to(call.dtype)
        if call.spoiled:
            x.view(torch.int16)[rank % call.rows] = -1  # the sentinel, and a row that becomes it
            x[call.rows - 1, :4] = torch.tensor([-0.0, float("inf"), 1e-30, -float("inf")])
        rows, columns = torch.rand(call.rows, 1), torch.rand(call.hidden)
        return Unscaled(x, rows, columns) if call.scaled else x


def stand_in(number: list[int]) -> None:
    """Plain loads and stores for what speaks PTX; number: of the call."""
    import triton.language as tl

    from phalanx.comm import oneshot, twoshot
    from phalanx.comm.sequence_parallel import gemm_rs, rs_norm_ag

    word = tl.pointer_type(tl.int32)

    def push(address: Any, sealed: Any) -> None:
        for k in range(4):
            tl.store(address.to(word) + k, sealed[k], address != 0)

    def clear(address: Any) -> None:
        push(address, (address * 0 - 1,) * 4)

    def poll_words(address: Any) -> Any:
        while True:
            words = tl.load(address.to(word), address != 0, 0)
            if not (words.handle.data == -1).any():
                return words
            time.sleep(1e-3)

    def poll(addresses: Any, block: Any, warps: Any) -> Any:
        return tuple(poll_words(tl.where(address == 0, 0, address + 4 * k)) for address in addresses for k in range(4))

    def push_codes(base: Any, index: Any, mask: Any, codes: Any) -> None:
        kind = tl.pointer_type(codes.dtype)
        tl.store((base + index.to(tl.int64) * (codes.dtype.primitive_bitwidth // 8)).to(kind), codes, mask)

    def push_once(address: Any, value: Any) -> None:
        tl.store(address.to(word), value)

    def clear_word(address: Any) -> None:
        tl.store(address.to(word), address * 0 - 1, address != 0)

    def enter(call_index: Any, sm: Any) -> Any:
        return tl.full((), number[0], tl.int32)

    def raise_flag(address: Any, value: Any) -> None:
        tl.store(address.to(word), value + 1)

    def await_flag(address: Any, value: Any) -> None:
        while tl.load(address.to(word)).handle.data != (value + 1).handle.data:
            time.sleep(1e-3)

    for module in (rs_norm_ag, oneshot, twoshot):
        module.push, module.clear, module.poll = push, clear, poll  # type: ignore[assignment]
    rs_norm_ag.push_codes, rs_norm_ag.push_once, rs_norm_ag.poll_words, rs_norm_ag.clear_word = (
        push_codes,
        push_once,
        poll_words,
        clear_word,
    )
    gemm_rs.raise_flag, gemm_rs.await_flag = raise_flag, await_flag
    for kernel in (rs_norm_ag, gemm_rs):
        kernel.enter, kernel.draw_ticket, kernel.leave = (
            enter,
            lambda call_index, programs: 0,
            lambda call_index, programs, ticket: None,
        )


def write_partials(board: Board, rank: int, own: int, call_index: int) -> None:
    """The rank's first program writes its GEMM output of each rank's rows there. The others wait for it, as for the kernel
    before."""
    part, call = board.parts[call_index][rank], CALLS[call_index]
    chunk_rows = -(-call.rows // board.world)
    size = chunk_rows * call.hidden
    assert board.world * size * call.dtype.itemsize <= BUFFER_BYTES
    while own and int(board.written[rank]) <= call_index:
        time.sleep(1e-3)
    if own == 0:
        for step in range(1, board.world + 1):
            target = (rank + step) % board.world
            time.sleep(LATE * ((rank + call_index) % board.world == 0 and step == 1))
            sent = part[target * chunk_rows : (target + 1) * chunk_rows].flatten()
            there = board.partials[target][: BUFFER_BYTES // 4].view(call.dtype)
            there[rank * size : rank * size + sent.numel()] = sent
        board.written[rank] = call_index + 1


def program(board: Board, rank: int, own: int) -> None:
    """All calls of one program of one rank."""
    from triton.runtime import interpreter

    from phalanx.comm.sequence_parallel.gemm_rs import gemm_rs_norm_ag
    from phalanx.comm.sequence_parallel.rs_norm_ag import rs_norm_ag
    from phalanx.kernels.dtypes import DTYPE_NAMES
    from phalanx.kernels.scaled_tensors import Unscaled

    number = [0]
    stand_in(number)
    builder = interpreter.interpreter_builder
    place, size = builder.set_grid_idx, builder.set_grid_dim
    let_loops_begin_anywhere()
    interpreter.GridExecutor._restore_args_dev = lambda *_: None  # it writes tensors back that other processes have gone on writing
    builder.set_grid_idx = lambda *_: place(own, 0, 0)
    builder.set_grid_dim = lambda *_: size(board.programs, 1, 1)
    peers = tuple(half.data_ptr() for half in board.halves)
    flags = tuple(buffer.data_ptr() + BUFFER_BYTES for buffer in board.partials)
    for call_index, call in enumerate(CALLS):
        number[0] = call_index
        norm_outputs = board.norm_outputs[call_index][rank]
        values, rows, columns = Unscaled.parts(board.parts[call_index][rank])
        gathered = norm_outputs.quantized if norm_outputs.norm is None else norm_outputs.norm
        assert gathered is not None
        row = (
            board.residuals[call_index].view(torch.int32), board.weights[call_index].view(torch.int32),
            norm_outputs.pointers(0, call.rows), gathered.view(torch.int32), board.scale, peers,
        )  # fmt: skip
        sizes = (HALF, call.rows, call.hidden, min(call.movers, board.programs), 1e-5)
        constants = {
            "KIND": DTYPE_NAMES[call.dtype],
            "QUANT": call.quant,
            "KEEP_NORM": call.keep_norm,
            "RANK": rank,
            "WORLD": board.world,
            "BLOCK": 128,
            "TAKE": 64,
        }
        if call.gemm_rs:
            write_partials(board, rank, own, call_index)
            time.sleep(LATE * (call.late and own >= -(-call.rows // board.world)))
            gemm_rs_norm_ag[(1,)](board.partials[rank], *row, flags, board.scale, *sizes, **constants, WARPS=1, SM=0)
        else:
            rs_norm_ag[(1,)](
                values.view(torch.int32), rows, columns, *row, board.scale, *sizes, **constants, FLAT=32, WARPS=1, SM=0
            )
        board.done[rank, own] = call_index + 1
        while int(board.done[rank].min()) <= call_index:  # the next kernel of a rank begins when this one has ended
            time.sleep(1e-3)


def verify(board: Board) -> None:
    from phalanx.comm.sequence_parallel import rank_rows
    from phalanx.kernels import reference
    from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm
    from phalanx.kernels.scaled_tensors import Unscaled

    assert all(bool((half == -1).all()) for half in board.halves), "a workspace is not clean"
    for call_index, call in enumerate(CALLS):
        parts = [part.to_fp32().to(call.dtype) if isinstance(part, Unscaled) else part for part in board.parts[call_index]]
        quant, scale = ("none", None) if call.quant == "none" else ("fp8", board.scale if call.quant == "fp8" else None)
        wanted = residual_rms_norm(
            reference.all_reduce(parts), board.residuals[call_index], board.weights[call_index], 1e-5, quant=quant, scale=scale,
            keep_norm=call.keep_norm,
        )  # type: ignore[arg-type] # fmt: skip
        for rank in range(board.world):
            *outputs, residual = board.norm_outputs[call_index][rank].outputs()
            first = board.norm_outputs[call_index][0].outputs()
            for output, right, theirs in zip(outputs, wanted[:-1], first[:-1], strict=True):
                same(output, right, f"{call} on rank {rank}")
                assert torch.equal(output.view(torch.uint8), theirs.view(torch.uint8)), f"{call}: rank {rank} differs from rank 0"
            (local_rows,) = rank_rows(call.rows, call.rows, rank, board.world)
            same(
                residual[local_rows.start : local_rows.stop],
                wanted[-1][local_rows.start : local_rows.stop],
                f"{call}: residual of rank {rank}",
            )
            others = torch.cat((residual[: local_rows.start], residual[local_rows.stop :]))
            assert others.isnan().all(), "a rank wrote rows that it does not reduce"


def same(output: Tensor, right: Tensor, what: str) -> None:
    """Bit for bit, but for which NaN a NaN is."""
    nan = right.float().isnan()
    assert torch.equal(output.float().isnan(), nan), what
    bits = output.float().masked_fill(nan, 0).view(torch.int32)
    assert torch.equal(bits, right.float().masked_fill(nan, 0).view(torch.int32)), what


def check(world: int, programs: int) -> None:
    board = Board(world, programs)
    children = []
    for rank in range(world):
        for own in range(programs):
            child = os.fork()
            if child == 0:
                status = 1
                signal.alarm(900)
                try:
                    program(board, rank, own)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    verify(board)


def test_between_processes() -> None:
    assert interpreted("tests.comm.sequence_parallel.test_rs_norm_ag_kernels", "3", "2").strip() == "checked"


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    check(int(sys.argv[1]), int(sys.argv[2]))
    print("checked")
