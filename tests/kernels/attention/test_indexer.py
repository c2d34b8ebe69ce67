# SPDX-License-Identifier: Apache-2.0
"""The keys of sparse attention: what is stored is read back, scores are the formula's, and the best ones are exact."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.kernels.attention import indexer


@pytest.mark.parametrize("fp8", [False, True])
def test_keys_are_read_back_and_padding_stores_nothing(fp8: bool) -> None:
    keys = (
        torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1e4])[:, None, None]
    )
    cache = torch.zeros(4, 2, 1, 16, dtype=torch.float8_e4m3fn if fp8 else torch.float32)
    scales = torch.full((4, 2, 1, 1), 7.0) if fp8 else None
    slots = torch.tensor([3, 0, 6, -1, 5])
    indexer.store_index_keys(keys, cache, scales, slots)
    kept = slots >= 0
    read = indexer.read_index_keys(cache, scales, slots[kept])
    error = (read - keys[kept, 0]).abs().amax(-1) / keys[kept, 0].abs().amax(-1)
    assert error.max() < (0.04 if fp8 else 1e-7)
    untouched = indexer.read_index_keys(cache, scales, torch.tensor([1, 2, 4, 7]))
    assert not untouched.any()
    assert scales is None or (scales.view(-1)[[1, 2, 4, 7]] == 7.0).all()


@pytest.mark.parametrize("nbytes", [1, 256 << 20])
def test_scores_are_the_formulas(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SCORES_BYTES", nbytes)
    generator = torch.Generator().manual_seed(2)
    query, weights, keys = (torch.randn(shape, generator=generator) for shape in ((2, 3, 5, 8), (2, 3, 5), (2, 7, 8)))
    scores = indexer.index_scores(query, weights, keys)
    for row in range(2):
        for token in range(3):
            for key in range(7):
                dots = [float(query[row, token, head] @ keys[row, key]) for head in range(5)]
                expected = sum(float(weights[row, token, head]) * max(dot, 0.0) for head, dot in enumerate(dots))
                assert math.isclose(scores[row, token, key], expected, rel_tol=1e-4, abs_tol=1e-5)


def test_the_best_are_exact_and_the_earlier_of_equal_ones_is_taken() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(40, 300, generator=generator).mul_(2).round_().div_(2)  # many are equal, zeros of both signs among them
    scores[:, 250:] = -math.inf
    for count in (1, 8, 100, 250):
        best = indexer.best_keys(scores, count)
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(dim=-1).values
        assert torch.equal(best, expected)
