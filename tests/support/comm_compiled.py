# SPDX-License-Identifier: Apache-2.0
"""Run the GPU strategies' launchers without a GPU: every kernel is compiled down to machine code, and none is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import BOARD_PLACES, SymmetricWorkspace, half_bytes
from phalanx.kernels.scaled_tensors import Unscaled

NUM_SMS = 132
DTYPES = {80: torch.float16, 90: torch.bfloat16, 100: torch.float32}
"""One for each SM, so that each dtype is compiled."""
Launched = tuple[str, tuple[int, ...], Any]
"""Kernel, grid, compiled."""


class _Driver:
    """What Triton asks of a driver to compile."""

    def __init__(self, sm: int, device: int) -> None:
        self.sm, self.device = sm, device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def only(sm: int, device: int | None = None) -> Iterator[list[Launched]]:
    """Inside, launches are compiled for this SM and listed. device: Triton keeps compiled kernels by device, so that
    another number finds none of those that were compiled before in this process."""
    launches: list[Launched] = []
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> Any:
        kernel = plain(self, *args, grid=grid, warmup=True, **fixed)
        launches.append((self.fn.__name__, grid, kernel))
        return kernel

    before = driver._active
    driver.set_active(_Driver(sm, sm if device is None else device))
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = plain
        driver._active = before


def workspace(world: int, sm: int, message_bytes: int = 64 << 20) -> SymmetricWorkspace:
    addresses = tuple(0x7F00_0000_0000 + rank * (1 << 32) for rank in range(world))
    epoch, board = torch.zeros(2, dtype=torch.int32), torch.zeros(BOARD_PLACES, 2, dtype=torch.int64)
    return SymmetricWorkspace(world - 1, world, addresses, half_bytes(world, message_bytes) // 16, epoch, board, NUM_SMS, sm)


def outputs_of(dtype: torch.dtype, quant: str, scale: torch.Tensor | None, keep_norm: bool) -> list[torch.dtype]:
    """The dtypes of what a fusion gives beside the new residual."""
    norm = [dtype] if quant == "none" or keep_norm else []
    quantized = [] if quant == "none" else [torch.float8_e4m3fn]
    return [*norm, *quantized, *([torch.float32] if quantized and scale is None else [])]


def fused(launch: Launched) -> int:
    """Multiplications that a launch's kernel does not round before it adds their product to something."""
    return int(launch[2].asm["ptx"].count("fma.rn.f32"))


def launches(
    strategy: Any,
    world: int,
    sm: int,
    sums: list[tuple[int, int]],
    norms: list[tuple[int, str, torch.Tensor | None]],
    *,
    scales: bool = False,
) -> list[Launched]:
    """What a strategy's module launches for sums of [tokens, hidden], then for sums of [tokens, 4096] with a norm (tokens, quant,
    scale). scales: of GEMM outputs whose scales it applies."""
    space, dtype = workspace(world, sm), DTYPES[sm]

    def as_input(x: torch.Tensor) -> torch.Tensor | Unscaled:
        return Unscaled(x, torch.ones(x.shape[0], 1), torch.ones(x.shape[1])) if scales else x

    with only(sm) as launched:
        for tokens, hidden in sums:
            x = torch.zeros(tokens, hidden, dtype=dtype)
            assert strategy.all_reduce(as_input(x), space).shape == x.shape
        for tokens, quant, scale in norms:
            x = torch.zeros(tokens, 4096, dtype=dtype)
            assert strategy.all_reduce_norm(as_input(x), ResidualRmsNorm(x, x[0], 1e-5, quant, scale), space)[-1].shape[0] == tokens
    return launched
