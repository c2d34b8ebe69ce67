# SPDX-License-Identifier: Apache-2.0
"""The divergence of two runs, by the kind of step."""

from __future__ import annotations

import pytest
import torch

from phalanx.worker.self_check.compare import agreement

LOGITS = torch.randn(30, 50, generator=torch.Generator().manual_seed(1)) * 3


def test_equal_runs_agree() -> None:
    result = agreement([("a", LOGITS), ("", LOGITS[:0])], [("a", LOGITS), ("", LOGITS[:0])])
    assert (result.positions, result.kl, result.top1, result.finite) == (30, 0.0, 1.0, True)
    assert result.within(0.0)


def test_the_worst_kind_of_step_decides() -> None:
    """By torch's own divergence; a tenth of the positions would hide in a mean over all."""
    own = LOGITS[:3].flip(-1)
    result = agreement([("prompt", LOGITS), ("decode", own)], [("prompt", LOGITS), ("decode", LOGITS[:3])])
    expected, divergent = LOGITS[:3].double().log_softmax(-1), own.double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(divergent, expected, log_target=True, reduction="batchmean")
    assert result.worst == "decode"
    assert result.worst_kl == pytest.approx(float(kl))
    assert result.kl == pytest.approx(float(kl) * 3 / 33)
    assert 30 / 33 <= result.top1 < 1
    assert not result.within(result.worst_kl * 0.99)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_within_no_bound(value: float) -> None:
    broken = LOGITS.clone()
    broken[3, 4] = value
    for own, reference in ((broken, LOGITS), (LOGITS, broken), (broken, broken)):
        assert not agreement([("a", own)], [("a", reference)]).within(1e9)
