# SPDX-License-Identifier: Apache-2.0
"""GEMMs and attention whose tokens do not depend on each other: in Triton's interpreter against the formula, compiled without a
GPU, and on a GPU bit for bit among different numbers of tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from phalanx.kernels.attention.dispatch import prefill_attention
from phalanx.kernels.batch_invariant import BLOCK_TILING, TILINGS, Tiling, batch_invariant_gemm
from phalanx.kernels.scaled_tensors import FP8
from tests.support.kernels_compiled import compiled_as, spilled
from tests.support.kernels_interpreted import interpret

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")


def drawn(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """x, weight, bias; with scales of both in FP8."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, inputs, device=device), torch.randn(outputs, inputs, device=device)
    bias = torch.randn(outputs, device=device)
    if dtype != FP8:
        return x.to(dtype), weight.to(dtype), bias.to(dtype)
    scales = torch.rand(tokens, 1, device=device) + 0.5, torch.rand(outputs, device=device) + 0.5
    return x.to(dtype), weight.to(dtype), bias.to(torch.bfloat16), *scales


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    total = x.double() @ weight.double().t()
    if scales:
        total = total * scales[0].double() * scales[1].double()
    return total + bias.double()


def check_against_the_formula() -> None:
    """Whole tiles and not, of tokens, outputs and inputs."""
    for dtype in (torch.bfloat16, torch.float16, FP8):
        for tokens, outputs, inputs in ((1, 32, 64), (5, 40, 48), (37, 64, 144)):
            x, weight, bias, *scales = drawn(tokens, outputs, inputs, dtype)
            wanted = product(x, weight, bias, *scales)
            together = torch.full((tokens, outputs + 8), 7.0, dtype=bias.dtype)
            out = together[:, :outputs]
            result = batch_invariant_gemm(
                x, weight, bias, scales=(scales[0], scales[1]) if scales else None, out=out, tiling=Tiling(16, 16, 64, 4, 2)
            )
            assert result is out
            assert (out.double() - wanted).norm() < 5e-3 * wanted.norm()
            assert (together[:, outputs:] == 7.0).all()
    assert batch_invariant_gemm(torch.empty(0, 64), torch.randn(32, 64)).shape == (0, 32)


CHECKS = [check_against_the_formula]


def test_in_the_interpreter() -> None:
    interpret(CHECKS)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_compiled(arch: int, tiling: Tiling) -> None:
    from phalanx.kernels.batch_invariant import _batch_invariant_gemm

    kinds = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    kinds |= dict.fromkeys(("tokens", "outputs", "inputs", "x_pitch", "out_pitch"), "i32")
    constants: dict[str, Any] = {
        "x_scale": None, "weight_scale": None, "TOKENS": tiling.tokens, "ROWS": tiling.rows, "COLUMNS": tiling.bytes // 2,
        "FULL": True, "SM": arch,
    }  # fmt: skip
    result = compiled_as(
        _batch_invariant_gemm, kinds, constants, arch, aligned=[name for name in kinds if name != "tokens"],
        num_warps=tiling.warps, num_stages=tiling.stages if arch >= 90 else 2,
    )  # fmt: skip
    assert len(result.asm["cubin"]) > 0
    assert arch < 90 or not spilled(result)


@pytest.mark.gpu1
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1024, 14336), (6144, 2064), (96, 256)])
def test_the_same_bits_among_any_tokens_on_a_gpu(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x, weight, bias, *scales = drawn(2100, outputs, inputs, dtype, "cuda")
    wanted, together = product(x, weight, bias, *scales), None
    parts = ((0, 2100), (0, 1), (7, 8), (3, 60), (100, 190), (0, 1024), (1, 1100), (2098, 2100))
    for (first, last), tiling in ((part, tiling) for part in parts for tiling in (None, *TILINGS)):
        pair = (scales[0][first:last], scales[1]) if scales else None
        out = batch_invariant_gemm(x[first:last], weight, bias, scales=pair, dtype=bias.dtype, tiling=tiling)
        together = out if together is None else together
        assert (out.double() - wanted[first:last]).norm() < 6e-3 * wanted[first:last].norm()
        assert torch.equal(out, together[first:last]), (first, last, tiling)


@pytest.mark.gpu1
@pytest.mark.parametrize("begin", [0, 32])
def test_the_same_bits_in_blocks_on_a_gpu(begin: int) -> None:
    from phalanx.kernels.gemm.block_gemm import per_token_group_quant_fp8
    from phalanx.kernels.gemm.block_scaled_gemm import block_scaled_gemm

    torch.manual_seed(0)
    x, weight = torch.randn(700, 1024, device="cuda").bfloat16(), torch.randn(512, 1024, device="cuda").to(FP8)
    scale = torch.rand(512, (begin + 1024 + 127) // 128, device="cuda")

    def multiplied(some: torch.Tensor) -> torch.Tensor:
        values, x_scale = per_token_group_quant_fp8(some.contiguous(), begin)
        return block_scaled_gemm(values, x_scale, weight, scale, dtype=torch.bfloat16, begin=begin, tiling=BLOCK_TILING)

    together = multiplied(x)
    for first, last in ((0, 1), (7, 8), (3, 60), (100, 190), (1, 600)):
        assert torch.equal(multiplied(x[first:last]), together[first:last]), (first, last)


@pytest.mark.gpu1
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8])
def test_the_same_attention_however_a_prompt_is_cut_on_a_gpu(window: int | None, cache: torch.dtype) -> None:
    """Of 900 tokens in one row, in pieces, and one by one."""
    torch.manual_seed(0)
    length, block = 900, 16
    query = torch.randn(length, 8, 128, device="cuda").bfloat16()
    key, value = (torch.randn(64, block, 2, 128, device="cuda").to(cache) for _ in range(2))
    tables = torch.randperm(64, device="cuda", dtype=torch.int32)[None]

    def attended(cuts: list[int]) -> torch.Tensor:
        parts = []
        for first, last in pairwise(cuts):
            starts, lengths = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, last - first], [last]))
            parts.append(
                prefill_attention(
                    query[first:last], key, value, tables, None, starts, lengths, scale=0.09, window=window, batch_invariant=True
                )
            )
        return torch.cat(parts)

    together = attended([0, length])
    for cuts in ([0, 1, 64, 65, 333, 640, 899, length], [0, 400, *range(401, 500), length]):
        assert torch.equal(attended(cuts), together), cuts[:5]
