# SPDX-License-Identifier: Apache-2.0
"""The reference ops against the definitions, and the ways in which they round."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx import kernels
from phalanx.kernels import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(3, 5, 16).to(dtype), torch.rand(16).to(dtype)
    exact = F.rms_norm(x.double(), (16,), weight.double(), 1e-5)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5).double(), exact, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
    )
    normed, total = reference.residual_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, kernels.rms_norm(x + residual, weight, 1e-5))
    assert normed.dtype == dtype


def test_silu_mul() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(kernels.silu_mul(torch.cat((gate, up), dim=1)), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("slots", [[5, 0, 11], [5, -1, 11, -1], [-1, 3, -1], [-1, -1], [-1, 0]])
def test_write_kv_writes_its_slots_and_nothing_else(slots: list[int]) -> None:
    key_cache, value_cache = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    key, value = torch.randn(len(slots), 2, 8), torch.randn(len(slots), 2, 8)
    expected = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // 4, slot % 4], expected[1][slot // 4, slot % 4] = key[token], value[token]
    kernels.write_kv(key, value, key_cache, value_cache, torch.tensor(slots))
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])
