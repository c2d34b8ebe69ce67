# SPDX-License-Identifier: Apache-2.0
"""FP8 stays near bf16 on the demo model: the bound that benchmarks/models/fp8_error.py reports against."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import harness
from benchmarks.models import fp8_error


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, fp8_error.Error]]:
    return fp8_error.compare(fp8_error.texts(60), torch.device("cpu"))


@pytest.mark.parametrize("variant", fp8_error.VARIANTS)
def test_answers_are_the_same_and_questions_near(variant: str, measured: dict[str, dict[str, fp8_error.Error]]) -> None:
    answers, questions = measured[variant]["answers"], measured[variant]["questions"]
    assert answers.positions > 500
    assert answers.top1 >= 0.999
    assert answers.kl_mean <= 1e-4
    assert questions.top1 >= 0.95
    assert questions.kl_mean <= 0.03


def test_the_figures_are_not_zero(measured: dict[str, dict[str, fp8_error.Error]]) -> None:
    """Each step of FP8 is seen: weights alone are nearer than weights with activations."""
    means = [measured[name]["questions"].kl_mean for name in ("fp32", "fp8 weights", "fp8 weights and activations")]
    assert 0 < means[0] < means[1] < means[2]


def test_the_report_on_record_covers_every_variant() -> None:
    kept = json.loads((harness.RESULTS / "fp8_error.json").read_text(encoding="utf-8"))["against_bf16"]
    assert set(kept) == set(fp8_error.VARIANTS)
    assert all(parts["answers"]["top1"] >= 0.999 for parts in kept.values())
