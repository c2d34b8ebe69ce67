# SPDX-License-Identifier: Apache-2.0
"""How many copies of experts fit. How fields of config.json are read: test_model.py."""

from __future__ import annotations

import pytest

from phalanx.config.experts import require_places
from phalanx.errors import LayoutError


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "message"),
    [
        (8, 4, 2, "^redundant_experts=2 is not possible with 8 experts over 4 ranks; .*use a multiple of 4, at most 24"),
        (8, 4, 28, "multiple of 4, at most 24"),
        (8, 1, 1, "leave it out: all experts are on one rank"),
        (9, 2, 0, "^9 experts cannot be divided evenly among 2 ranks"),
    ],
)
def test_impossible_numbers_name_the_possible_ones(experts: int, ranks: int, redundant: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        require_places(experts, ranks, redundant)


def test_copies_up_to_all_experts_on_each_rank_fit() -> None:
    for redundant in (0, 4, 24):
        require_places(8, 4, redundant)
