# SPDX-License-Identifier: Apache-2.0
"""Which layers are alike: what is computed for one of them holds for all."""

from __future__ import annotations

import pytest

from phalanx.layout.weights import kind_of
from phalanx.planner import subject


@pytest.mark.parametrize(
    ("name", "kinds"), [("llama-3-70b", {0: 80}), ("mixtral-8x7b", {0: 32}), ("deepseek-v2-lite", {0: 1, 1: 26})]
)
def test_layers_that_differ_by_their_names_are_alike(name, kinds):
    """Also where their experts are stored as one tensor, which has a name of its own."""
    layers = kind_of(subject.shape_for(name))
    assert {first: layers.count(first) for first in layers} == kinds
