# SPDX-License-Identifier: Apache-2.0
"""The planner's sizes of graphs are those that the engine captures."""

from __future__ import annotations

from phalanx.engine.ranks import places
from phalanx.plan import graphs


def test_the_engine_captures_these_sizes():
    assert places.sizes is graphs.sizes
    rows, tokens = graphs.sizes(100, 5000)
    assert [size.tokens for size in rows][-1] == 100
    assert [size.tokens for size in tokens][-1] == graphs.STEP_TOKENS[-1]
    assert all(size.prompts == 0 for size in rows)
    assert all(0 < size.prompts <= graphs.MOST_PROMPTS for size in tokens)


def test_layers_of_many_bytes_gain_nothing_from_graphs_of_many_tokens():
    assert graphs.worth_padding(855e6) < graphs.worth_padding(214e6)
    assert graphs.worth_padding(600e6) == 1000
