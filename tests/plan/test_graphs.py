# SPDX-License-Identifier: Apache-2.0
"""The planner's sizes of graphs are those that the engine captures."""

from __future__ import annotations

from phalanx.plan import graphs
from phalanx.worker import graph_buffers


def test_the_engine_captures_these_sizes():
    assert graph_buffers.graph_sizes is graphs.graph_sizes
    rows, tokens = graphs.graph_sizes(100, 5000)
    assert [size.tokens for size in rows][-1] == 100
    assert [size.tokens for size in tokens][-1] == graphs.MIXED_GRAPH_TOKENS[-1]
    assert all(size.prefill_rows == 0 for size in rows)
    assert all(0 < size.prefill_rows <= graphs.MAX_PREFILL_ROWS for size in tokens)


def test_layers_of_many_bytes_gain_nothing_from_graphs_of_many_tokens():
    assert graphs.max_graph_tokens(855e6) < graphs.max_graph_tokens(214e6)
    assert graphs.max_graph_tokens(600e6) == 1000
