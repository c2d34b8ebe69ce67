# SPDX-License-Identifier: Apache-2.0
"""Verification before timing: small integers, whose sums are exact in every dtype, against `kernels.reference`.

Sum and new residual must be equal to the last bit. A norm may differ by one rounding, and a few quantized values by one step:
kernels add the squares of a row in another order than plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.sequence_parallel import ShardedResidual, rank_rows
from phalanx.kernels import reference
from phalanx.tables.message import Fusion

if TYPE_CHECKING:
    from phalanx.tune.ranks.layer import RowParallelLayer

EPS = 1e-5
MAX_DIFFERENT = 0.01
"""The fraction of quantized values that may differ by a step."""
_ONE_ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Cell:
    """A cell's tensors on one rank: x [T, H], the arguments of the fusion, and the expected outputs. layer: where the cell contains
    a GEMM, the layer whose input x [T, in] is."""

    x: Tensor
    fusion: ResidualRmsNorm | None
    expected: tuple[Tensor, ...]
    layer: RowParallelLayer | None = None


def rank_input(rank: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rank's integers -4 .. 4, [tokens, hidden]: ranks, rows and neighbours differ, and there are zeros of both signs."""
    rows = torch.arange(tokens, device=device, dtype=torch.int32)[:, None]
    columns = torch.arange(hidden, device=device, dtype=torch.int32)[None, :]
    values = ((rows * 5 + columns * 7 + rank * 11 + (rows * columns) % 13) % 9 - 4).to(dtype)
    return torch.where((values == 0) & ((columns + rank) % 2 == 0), torch.tensor(-0.0, dtype=dtype, device=device), values)


def cell(fusion: Fusion, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, *, rank: int, world: int) -> Cell:
    """Every rank can compute the integers of all ranks, so the expected outputs need no collective."""
    total = reference.all_reduce([rank_input(r, tokens, hidden, dtype, device) for r in range(world)])
    x = rank_input(rank, tokens, hidden, dtype, device)
    if fusion is Fusion.NONE:
        return Cell(x, None, (total,))
    plain = arguments(fusion, tokens, hidden, dtype, device, world)
    return Cell(x, plain, expected(total, plain))


def arguments(
    fusion: Fusion, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, world: int
) -> ResidualRmsNorm:  # fmt: skip
    """Of a fusion, for a cell of `world` ranks."""
    residual = rank_input(world, tokens, hidden, dtype, device)
    weight = 1 + torch.arange(hidden, device=device).remainder(8).to(dtype) / 8
    scale = None
    if fusion.quant != "none" and not fusion.token_scale:
        scale = torch.tensor(0.05, dtype=torch.float32, device=device)
    return ResidualRmsNorm(residual, weight, EPS, fusion.quant, scale, fusion.keeps_norm)  # type: ignore[arg-type]


def expected(total: Tensor, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
    """What a fusion gives of the sum `total`."""
    return reference.residual_rms_norm_quant(
        total, fusion.residual, fusion.weight, fusion.eps, quant=fusion.quant, scale=fusion.scale, keep_norm=fusion.keep_norm
    )  # fmt: skip


@contextmanager
def nan_filled() -> Iterator[None]:
    """Inside, torch fills new memory with NaN (integers with their maximum), so that unwritten outputs are detected."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # Not torch.use_deterministic_algorithms: that loads the compiler, which takes seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


def mismatch(
    fusion: Fusion, outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], rank: int = 0, world: int = 1
) -> str | None:  # fmt: skip
    """None where the outputs are right; else what is wrong, as text. Of a sharded residual, the rows of `rank` must be."""
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs instead of {len(expected)}"
    names = _names(fusion)
    for name, output, wanted in zip(names, outputs, expected, strict=True):
        if isinstance(output, ShardedResidual):
            own = [row for rows in rank_rows(len(wanted), output.chunk_rows, rank, world) for row in rows]
            output, wanted = output.local[own], wanted[own]
        if output.dtype != wanted.dtype or output.numel() != wanted.numel():
            return f"{name} is {output.dtype} {tuple(output.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
        wrong = _different(name, output.reshape(wanted.shape), wanted)
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def _names(fusion: Fusion) -> list[str]:
    if fusion is Fusion.NONE:
        return ["sum"]
    norm = ["norm"] if fusion.quant == "none" or fusion.keeps_norm else []
    quantized = [] if fusion.quant == "none" else [fusion.quant]
    scales = ["scales"] if fusion.token_scale else ["block scales"] if fusion.quant == "nvfp4" else []
    return [*norm, *quantized, *scales, "residual"]


def _different(name: str, output: Tensor, want: Tensor) -> str | None:
    if name in ("sum", "residual"):
        bad = output != want
        return None if not bool(bad.any()) else f"{int(bad.sum())} of {bad.numel()} differ, {_first(bad, output, want)}"
    if name == "nvfp4":
        output, want = _fp4(output), _fp4(want)
        step = torch.where(want.abs() >= 4, 2.0, 1.0)
    elif output.dtype == torch.float8_e4m3fn:
        output, want = output.float(), want.float()
        step = torch.clamp(want.abs() * 2.0**-3, min=2.0**-9)
    else:
        step = want.float().abs() * _ONE_ROUNDING[want.dtype]
        output, want = output.float(), want.float()
    distance = (output - want).abs()
    bad = ~(distance <= step * 1.001)  # true for NaN
    if bool(bad.any()):
        return f"{int(bad.sum())} of {bad.numel()} are off by more than a step, {_first(bad, output, want)}"
    fraction = float((distance > 0).float().mean())
    if name in ("fp8", "nvfp4") and fraction > MAX_DIFFERENT:
        return f"{fraction:.1%} differ by a step, more than {MAX_DIFFERENT:.0%}"
    return None


def _first(bad: Tensor, output: Tensor, want: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"first {list(index)}: {float(output[index])} instead of {float(want[index])}"


def _fp4(packed: Tensor) -> Tensor:
    """Values of e2m1 pairs in uint8 [..., n]: fp32 [..., 2 n]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    return torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)
