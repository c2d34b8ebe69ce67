# SPDX-License-Identifier: Apache-2.0
"""GEMMs in FP8 against the formula."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from phalanx import kernels
from phalanx.kernels import reference
from phalanx.kernels.capabilities import has_fp8_gemm, has_fp8_kernels
from phalanx.kernels.gemm.scaled_mm import quant_gemm, scaled_mm_into, unscaled_mm
from phalanx.kernels.scaled_tensors import FP8, Quantized, Unscaled


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_rows_and_columns(static: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 32), torch.randn(48, 32)
    quantized = Quantized(*kernels.quantize_fp8(x, torch.tensor(0.01) if static else None))
    stored, scale = kernels.quantize_fp8(weight)
    out = kernels.scaled_mm(quantized, stored, scale.squeeze(-1), dtype=dtype)
    expected = (quantized.values.double() * quantized.scale.double()) @ (stored.double() * scale.double()).t()
    assert out.dtype == dtype
    assert quantized.shape == (5, 32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    torch.testing.assert_close(expected, x.double() @ weight.double().t(), rtol=0, atol=1.5)


@pytest.mark.parametrize("begin", [0, 5, 15])
def test_dequantize_by_block_begins_within_one(begin: int) -> None:
    stored, scale = torch.randn(3, 40).to(FP8), torch.rand(3, 4)
    finished_fp32 = kernels.dequantize(stored, scale, torch.float32, block=16, begin=begin)
    for column in range(40):
        assert torch.equal(finished_fp32[:, column], stored[:, column].float() * scale[:, (begin + column) // 16])


@pytest.mark.parametrize("scale", [None, torch.tensor(0.02)])
def test_silu_mul_quant_is_silu_mul_then_quant(scale: torch.Tensor | None) -> None:
    gate_up = torch.randn(7, 64)
    for gemm_output in (gate_up, Unscaled(gate_up * 1e3, torch.rand(7, 1) / 500, torch.rand(64))):
        fused = kernels.silu_mul_quant_fp8(gemm_output, scale)
        values, output = reference.quantize_fp8(reference.silu_mul(gemm_output), scale)
        assert torch.equal(fused.values.float(), values.float())
        assert torch.equal(fused.scale, output)


def test_sums_stand_for_the_product() -> None:
    unscaled = Unscaled(torch.randn(3, 8), torch.rand(3, 1), torch.rand(8))
    by_hand = torch.stack([unscaled.values[t] * unscaled.rows[t, 0] * unscaled.columns for t in range(3)])
    assert torch.equal(unscaled.to_fp32(), by_hand)
    assert torch.equal(unscaled.view(3, 2, 4).to_fp32(), by_hand.view(3, 2, 4))
    torch.testing.assert_close(reference.silu_mul(unscaled), reference.silu_mul(by_hand))


def test_on_cpu_products_come_finished() -> None:
    stored, scale = kernels.quantize_fp8(torch.randn(48, 32))
    x = Quantized(*kernels.quantize_fp8(torch.randn(5, 32)))
    output = unscaled_mm(x, stored, scale.flatten(), dtype=torch.bfloat16)
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, kernels.scaled_mm(x, stored, scale.flatten(), dtype=torch.bfloat16))


def test_a_cpu_has_no_fp8_gemm() -> None:
    assert not has_fp8_gemm(torch.device("cpu"))


def on_gpu(tokens: int, inputs: int, out: int, *, static: bool) -> tuple[Quantized, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weight, its scales, the GEMM's output in fp32)."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    if not has_fp8_gemm(device):
        pytest.skip("this GPU has no FP8 GEMM")
    x, weight = torch.randn(tokens, inputs, device=device), torch.randn(out, inputs, device=device)
    quantized = Quantized(*kernels.quantize_fp8(x, torch.tensor(0.01, device=device) if static else None))
    stored, scale = kernels.quantize_fp8(weight)
    scale = scale.squeeze(-1)
    return quantized, stored, scale, reference.scaled_mm(quantized.values, quantized.scale, stored, scale, torch.float32)


TOKENS = [1, 2, 17, 64, 300, 1025]


@pytest.mark.gpu1
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("inputs", "out"), [(336, 208), (7168, 8192), (8192, 2560), (2048, 1280), (16384, 64), (17408, 64), (26624, 64)]
)
def test_on_gpu(static: bool, dtype: torch.dtype, tokens: int, inputs: int, out: int) -> None:
    x, weight, scale, expected = on_gpu(tokens, inputs, out, static=static)
    output = kernels.scaled_mm(x, weight, scale, dtype=dtype)
    assert output.dtype == dtype
    # The tensor cores add FP8 products with 14 bits: a sum of 26,624 terms was off by 3.3 percent of such sums' standard deviation.
    # A block of 64 terms that is left out would move it by 4.9 percent.
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=4e-2 * inputs**0.5)
    assert (output.float() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.gpu1
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cuts", [(0, 600, 1200), (0, 601, 1203), (0, 3, 1201)])
def test_pieces_on_gpu(static: bool, cuts: tuple[int, ...]) -> None:
    """That begin at any row: cuBLAS asks for scales on 16 bytes."""
    x, weight, scale, expected = on_gpu(cuts[-1], 1024, 2560, static=static)
    output = torch.full((cuts[-1], 2560), float("nan"), dtype=torch.bfloat16, device="cuda")
    scaled_mm_into(x, weight, scale, [(slice(first, last), output[first:last]) for first, last in pairwise(cuts)])
    assert (output.float() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.gpu1
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_readers_scale_on_gpu(static: bool, dtype: torch.dtype, tokens: int) -> None:
    """What reads a GEMM output gives the same, of the unscaled and of the finished one, but for roundings."""
    x, weight, scale, expected = on_gpu(tokens, 1024, 2560, static=static)
    gemm_output = unscaled_mm(x, weight, scale, dtype=dtype)
    here = has_fp8_kernels(torch.device("cuda")) and dtype == torch.bfloat16 and 1 < tokens <= 1024
    assert isinstance(gemm_output, Unscaled) == here
    finished_fp32 = gemm_output.to_fp32() if isinstance(gemm_output, Unscaled) else gemm_output.float()
    assert (finished_fp32 - expected).norm() < 5e-3 * expected.norm()

    step = 3e-2  # a few roundings to bf16, which GEMMs in fp16 take too
    gated = reference.silu_mul(expected)
    assert (kernels.silu_mul(gemm_output).float() - gated).norm() < step * gated.norm()
    for static_scale in (None, torch.tensor(40.0, device="cuda")):  # 40 * 448 is beyond all of these: nothing saturates
        inner, finished = (
            kernels.silu_mul_quant_fp8(gemm_output, static_scale),
            kernels.silu_mul_quant_fp8(expected.to(dtype), static_scale),
        )
        torch.testing.assert_close(inner.scale, finished.scale, rtol=step, atol=0)
        assert (inner.values.float() * inner.scale - gated).norm() < 0.05 * gated.norm()
        assert (inner.values.float() == finished.values.float()).float().mean() > 0.8

    angles, slots = torch.rand(tokens, 64, device="cuda") * 7, torch.arange(tokens, device="cuda")
    caches = [[torch.zeros(-(-tokens // 16), 16, 2, 128, dtype=dtype, device="cuda") for _ in range(2)] for _ in range(2)]
    query = kernels.rope_store(gemm_output.view(tokens, 20, 128), angles.cos(), angles.sin(), *caches[0], slots, 16)
    wanted = reference.rope_store(expected.to(dtype).view(tokens, 20, 128), angles.cos(), angles.sin(), *caches[1], slots, 16)
    for output, want in zip((query, *caches[0]), (wanted, *caches[1]), strict=True):
        assert (output.float() - want.float()).norm() < step * want.float().norm()


@pytest.mark.parametrize("scale", [None, torch.tensor(0.02)])
def test_quantizing_mm_is_quantize_then_product(scale: torch.Tensor | None) -> None:
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    stored, columns = kernels.quantize_fp8(weight)
    wanted = kernels.scaled_mm(Quantized(*kernels.quantize_fp8(x, scale)), stored, columns.flatten(), dtype=torch.float32)
    assert torch.equal(quant_gemm(x, scale, stored, columns.flatten(), dtype=torch.float32), wanted)


@pytest.mark.gpu1
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("inputs", [2048, 3584, 8192])
def test_one_row_quantized_by_its_product_on_gpu(static: bool, inputs: int) -> None:
    device = torch.device("cuda")
    if not has_fp8_gemm(device):
        pytest.skip("this GPU has no FP8 GEMM")
    torch.manual_seed(inputs)
    x = torch.randn(1, inputs, device=device, dtype=torch.bfloat16)
    stored, columns = kernels.quantize_fp8(torch.randn(2048, inputs, device=device))
    scale = torch.tensor(0.01, device=device) if static else None
    wanted = kernels.scaled_mm(Quantized(*kernels.quantize_fp8(x, scale)), stored, columns.flatten(), dtype=x.dtype)
    assert torch.equal(quant_gemm(x, scale, stored, columns.flatten(), dtype=x.dtype), wanted)
