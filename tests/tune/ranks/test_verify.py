# SPDX-License-Identifier: Apache-2.0
"""The verdict before timing: right outputs pass, each kind of wrong one fails."""

from __future__ import annotations

import pytest
import torch

from phalanx.tables.message import Fusion
from phalanx.tune.ranks import verify

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def cell(fusion, dtype=torch.bfloat16, tokens=17, hidden=128):
    return verify.cell(fusion, tokens, hidden, dtype, CPU, rank=1, world=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_sum_exactly(dtype):
    parts = [verify.rank_input(rank, 17, 1000, dtype, CPU).double() for rank in range(8)]
    assert torch.equal(sum(parts), cell_sum(dtype))
    assert max(part.abs().max() for part in parts) == 4
    assert any(torch.signbit(part[part == 0]).any() for part in parts)
    for a in range(8):
        assert not any(torch.equal(parts[a], parts[b]) for b in range(a))


def cell_sum(dtype):
    return verify.cell(Fusion.NONE, 17, 1000, dtype, CPU, rank=0, world=8).expected[0].double()


@pytest.mark.parametrize("fusion", Fusion)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_passes(fusion, dtype):
    sample = cell(fusion, dtype)
    assert verify.mismatch(fusion, tuple(t.clone() for t in sample.expected), sample.expected) is None


@pytest.mark.parametrize("fusion", Fusion)
def test_every_output_can_fail(fusion):
    sample = cell(fusion)
    for place, name in enumerate(verify._names(fusion)):
        for damage in (_unwritten, _shifted):
            outputs = [t.clone() for t in sample.expected]
            outputs[place] = damage(outputs[place])
            assert verify.mismatch(fusion, tuple(outputs), sample.expected).startswith(name), (name, damage)
    assert "outputs instead of" in verify.mismatch(fusion, sample.expected[1:], sample.expected)


def _unwritten(tensor):
    with verify.nan_filled():
        return torch.empty_like(tensor)


def _shifted(tensor):
    return tensor.view(torch.uint8).roll(8).view(tensor.dtype) if tensor.element_size() == 1 else tensor.roll(1)


@pytest.mark.parametrize("fusion", Fusion)
def test_a_missing_rank_is_seen(fusion):
    sample = cell(fusion)
    less = verify.cell(fusion, 17, 128, torch.bfloat16, CPU, rank=1, world=3)
    assert verify.mismatch(fusion, less.expected, sample.expected) is not None


def test_tolerances_can_fail():
    sample = cell(Fusion.RESIDUAL_RMS_NORM)
    norm, residual = sample.expected
    one = norm.clone()
    one[3, 5] *= 1 + 2.0**-8
    assert verify.mismatch(Fusion.RESIDUAL_RMS_NORM, (one, residual), sample.expected) is None
    one[3, 5] *= 1 + 2.0**-6
    assert "first [3, 5]" in verify.mismatch(Fusion.RESIDUAL_RMS_NORM, (one, residual), sample.expected)
    fp8 = Fusion.RESIDUAL_RMS_NORM_QUANT_FP8
    quantized, residual = cell(fp8).expected
    bits = quantized.view(torch.uint8).clone()
    bits[0, 0] ^= 1
    assert verify.mismatch(fp8, (bits.view(torch.float8_e4m3fn), residual), cell(fp8).expected) is None
    bits[:, ::2] ^= 1
    assert "differ by a step" in verify.mismatch(fp8, (bits.view(torch.float8_e4m3fn), residual), cell(fp8).expected)


def test_nan_filled_is_undone():
    with verify.nan_filled():
        assert torch.empty(64).isnan().all()
        assert not torch.zeros(64).any()
    assert not torch.are_deterministic_algorithms_enabled()
