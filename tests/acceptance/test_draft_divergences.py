# SPDX-License-Identifier: Apache-2.0
"""The check of `tests.gpu.draft_divergences`: it passes on a CPU, and can fail."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.gpu.draft_divergences import LOOKUP, Text, run, verdict

pytestmark = pytest.mark.usefixtures("forked_python")


def text(*tokens: int, noise: float = 0.0, margin: float = 0.05) -> Text:
    return Text(tokens, [-1.0 + noise] * len(tokens), [margin] * len(tokens))


ALONE = [text(1, 2, 3)] * 10
ROWS = [text(1, 2, 3, noise=0.03)] * 9 + [text(1, 4, 4, noise=0.03)]


def test_as_many_divergences_at_near_ties_pass() -> None:
    result = verdict(ALONE, ROWS, [text(1, 2, 9), *ALONE[1:]])
    assert (result["divergences of rows"], result["divergences of drafts"], result["passed"]) == (1, 1, True)
    assert result["bound"] == pytest.approx(0.06)


def test_more_divergences_fail() -> None:
    assert not verdict(ALONE, ROWS, [text(1, 2, 9)] * 9 + ALONE[:1])["passed"]
    assert not verdict(ALONE, ALONE, [text(1, 2, 9), *ALONE[1:]])["passed"], "where rows have none"


def test_a_divergence_at_a_clear_choice_fails() -> None:
    alone = [text(1, 2, 3, margin=0.5), *ALONE[1:]]
    assert not verdict(alone, ROWS, [text(1, 2, 9), *ALONE[1:]])["passed"]


def test_in_fp32_drafts_change_nothing() -> None:
    arguments = Namespace(model="demo", device="cpu", prompts=3, tokens=40, tp_size=1, speculative_config=LOOKUP)
    result = run(arguments, "fp32")
    assert result["passed"]
    assert result["divergences of drafts"] == 0
    assert result["draft_tokens"] > 20
