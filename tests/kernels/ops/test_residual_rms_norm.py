# SPDX-License-Identifier: Apache-2.0
"""The Triton norm and its quantizations against the oracle: here in Triton's interpreter, in a process of its own.

In 16-bit dtypes they are equal bit for bit; in fp32 the order in which the squares are added shows in the last bit.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from phalanx import kernels
from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.kernels import reference
from tests.support.kernels_interpreted import interpreted

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = ((1, 16), (3, 1008), (2, 2048))
QUANTS = (("none", None, False), ("fp8", 0.01, True), ("fp8", None, False), ("nvfp4", 0.003, True))


IN_FP32 = (False, True)
"""Whether the weight is in fp32."""


def inputs(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    maker = torch.Generator().manual_seed(hidden)
    x, residual = (torch.randn(tokens, hidden, generator=maker).to(dtype) for _ in range(2))
    if tokens > 2:
        x[0, 5], x[1], residual[1] = float("nan"), 0.0, 0.0  # a row without a number, a row of zeros
    return x, residual, (1 + 0.1 * torch.randn(hidden, generator=maker)).to(dtype)


def differences() -> dict[str, list[int]]:
    """Bytes that differ from the oracle, by case and output; NaN counts as equal to NaN."""
    from phalanx.kernels.ops.residual_rms_norm import residual_rms_norm

    results = {}
    for (name, dtype), (tokens, hidden), (quant, scale, keep), in_fp32 in itertools.product(
        DTYPES.items(), SHAPES, QUANTS, IN_FP32
    ):
        x, residual, weight = inputs(tokens, hidden, dtype)
        weight = weight.float() * 1.0001 if in_fp32 else weight
        scale_tensor = None if scale is None else torch.tensor(scale)
        ours = residual_rms_norm(x, residual, weight, 1e-5, quant=quant, scale=scale_tensor, keep_norm=keep)
        wanted = reference.residual_rms_norm_quant(x, residual, weight, 1e-5, quant=quant, scale=scale_tensor, keep_norm=keep)
        assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in wanted]
        apart = [_bytes_apart(a, b) for a, b in zip(ours, wanted, strict=True)]
        if dtype == torch.float32:
            apart = [0 if _a_few_last_bits(a, b) else n for a, b, n in zip(ours, wanted, apart, strict=True)]
        results[f"{name} {tokens}x{hidden} {quant} {scale} {keep} {in_fp32}"] = apart
    return results


def _bytes_apart(left: torch.Tensor, right: torch.Tensor) -> int:
    if left.is_floating_point():
        both = left.float().isnan() & right.float().isnan()
        left, right = left.float().masked_fill(both, 0.0), right.float().masked_fill(both, 0.0)
    return int((left.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)).sum())


def _a_few_last_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype == torch.float32:
        return torch.allclose(left, right, rtol=3e-7, atol=0, equal_nan=True)
    return _bytes_apart(left, right) <= left.numel() // 500


def test_equals_the_oracle_in_the_interpreter() -> None:
    results = json.loads(interpreted("tests.kernels.ops.test_residual_rms_norm"))
    assert len(results) == len(DTYPES) * len(SHAPES) * len(QUANTS) * len(IN_FP32)
    assert not {case: apart for case, apart in results.items() if any(apart)}


def test_the_public_function_takes_the_reference_off_a_gpu() -> None:
    x, residual, weight = inputs(2, 64, torch.bfloat16)
    ours = kernels.residual_rms_norm_quant(x, residual, weight, 1e-5)
    for left, right in zip(ours, reference.residual_rms_norm(x, residual, weight, 1e-5), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("quant", "scale", "keep"), QUANTS)
def test_a_fusion_finishes_with_its_outputs_in_order(quant: str, scale: float | None, keep: bool) -> None:
    x, residual, weight = inputs(2, 64, torch.bfloat16)
    scale_tensor = None if scale is None else torch.tensor(scale)
    outputs = finish(x, ResidualRmsNorm(residual, weight, 1e-5, quant, scale_tensor, keep))
    norm, new = reference.residual_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(outputs[-1], new)
    if quant == "none":
        assert torch.equal(outputs[0], norm)
        return
    if keep:
        assert torch.equal(outputs[0], norm)
    quantized, rest = outputs[int(keep)], outputs[int(keep) + 1 : -1]
    if quant == "fp8":
        assert len(rest) == (scale is None)
        unit = rest[0] if rest else scale_tensor
        assert (quantized.float() * unit - norm.float()).abs().max() <= norm.float().abs().max() / 16
    else:
        steps = rest[0].float().repeat_interleave(16, dim=1) * scale_tensor
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = torch.stack((quantized & 15, quantized >> 4), dim=-1).flatten(1).long()
        back = values[codes & 7] * torch.where(codes > 7, -1, 1) * steps
        assert (back - norm.float()).abs().max() <= norm.float().abs().max() / 4


def test_nvfp4_asks_for_its_scale() -> None:
    x, residual, weight = inputs(1, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="global scale"):
        reference.residual_rms_norm_quant(x, residual, weight, 1e-5, quant="nvfp4")


if __name__ == "__main__":
    print(json.dumps(differences()))
