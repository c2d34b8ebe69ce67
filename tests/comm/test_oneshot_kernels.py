# SPDX-License-Identifier: Apache-2.0
"""One-shot and two-shot in Triton's interpreter, with the launches of `comm`: against the formula, with and without scales.

Nobody can wait there (`tests.support.kernels_signals`): every rank runs each call as many times as there are ranks. Then the last
run has found what the others sent.
That ranks wait as they should, `tests.comm.test_symmetric_gpu` shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.comm import oneshot, twoshot
from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.comm.symmetric import BOARD_PLACES, SymmetricWorkspace
from phalanx.kernels import reference
from phalanx.kernels.scaled_tensors import Unscaled
from tests.support.kernels_interpreted import interpret, let_loops_begin_anywhere

pytest.importorskip("triton")
import triton.language as tl

from tests.support.kernels_signals import replace_signals

pytestmark = pytest.mark.usefixtures("forked_python")

HALF = 1 << 11
"""Vectors in one half of a workspace."""


def without_waiting() -> None:
    from phalanx.comm import oneshot, twoshot

    plain = oneshot.finish_row

    def finish_row(total: Any, residual: Any, weight: Any, row: Any, *rest: Any) -> None:
        plain(total, residual, weight, tl.full((), row, tl.int32), *rest)  # in a loop the interpreter's row is an int of Python

    oneshot.finish_row = finish_row

    replace_signals(oneshot, twoshot)


def ranks(world: int, num_sms: int) -> list[SymmetricWorkspace]:
    memory = [torch.full((2 * HALF * 4,), -1, dtype=torch.int32) for _ in range(world)]
    board = [torch.zeros(BOARD_PLACES, 2, dtype=torch.int64) for _ in range(world)]
    addresses, epoch = tuple(part.data_ptr() for part in memory), torch.zeros(2, dtype=torch.int32)
    return [
        SymmetricWorkspace(rank, world, addresses, HALF, epoch, board[rank], num_sms, 0, tuple(memory)) for rank in range(world)
    ]


def by_rank(act: Any, workspaces: list[SymmetricWorkspace]) -> list[Any]:
    """What each rank's last run gives. Among two ranks the second run finds all: sums that a rank sent after it had all parts."""
    for _ in range(len(workspaces) - 1):
        for workspace in workspaces:
            act(workspace)
    return [act(workspace) for workspace in workspaces]


def contributions(world: int, tokens: int, hidden: int, dtype: torch.dtype, scales: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """What each rank gives, and what it stands for."""
    values = [(100 * torch.randn(tokens, hidden)).to(dtype) for _ in range(world)]
    if not scales:
        return list(values), values
    outputs = [Unscaled(part, torch.rand(tokens, 1), torch.rand(hidden)) for part in values]
    return list(outputs), [gemm_output.to_fp32().to(dtype) for gemm_output in outputs]


def check(world: int, tokens: int, hidden: int, dtype: torch.dtype, num_sms: int, *, scales: bool) -> None:
    inputs, parts = contributions(world, tokens, hidden, dtype, scales)
    wanted, workspaces = reference.all_reduce(parts), ranks(world, num_sms)
    what = f"{world} ranks {tokens}x{hidden} {dtype} {num_sms} SMs, scales {scales}"
    fusion = ResidualRmsNorm(torch.randn(tokens, hidden).to(dtype), torch.rand(hidden).to(dtype), 1e-5)
    for strategy in (oneshot, twoshot):
        sums = by_rank(lambda space, run=strategy: run.all_reduce(inputs[space.rank], space), workspaces)
        for output in sums:
            assert torch.equal(output, wanted), f"{strategy.__name__} {what}"
        pairs = by_rank(lambda space, run=strategy: run.all_reduce_norm(inputs[space.rank], fusion, space), workspaces)
        for norm, residual in pairs:
            assert torch.equal(residual, finish(wanted, fusion)[1]), f"{strategy.__name__} {what}"
            torch.testing.assert_close(norm, finish(wanted, fusion)[0], rtol=1e-2, atol=1e-5)


def main() -> None:
    let_loops_begin_anywhere()
    without_waiting()
    check(2, 3, 264, torch.bfloat16, 132, scales=False)
    check(2, 3, 264, torch.bfloat16, 132, scales=True)
    check(2, 9, 72, torch.float32, 1, scales=True)  # fewer programs than rows, some of which collect
    check(3, 2, 1032, torch.float16, 132, scales=True)  # rows in pieces


def test_in_the_interpreter() -> None:
    interpret([main])
