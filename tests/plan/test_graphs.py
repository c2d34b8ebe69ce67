# SPDX-License-Identifier: Apache-2.0
"""The planner's sizes of graphs are those that the engine captures."""

from __future__ import annotations

import itertools

import pytest

from phalanx.config.model import ModelShape
from phalanx.plan import footprint, graphs
from phalanx.plan.families import known, shape_of
from phalanx.plan.footprint import Split
from phalanx.plan.weight_tensors import active_layer_bytes
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


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("llama-3-70b", Split()), ("llama-3-70b", Split(4)),
        *itertools.product(
            ("mixtral-8x7b", "qwen3-235b-a22b"), (Split(), Split(4), Split(4, moe_ep=4), Split(2, ep=2))
        ),
    ],
    ids=str,
)  # fmt: skip
def test_planner_and_engine_count_the_same_bytes_of_a_token(model, split):
    """But for what a rank's slices have of scales and norms."""
    shape = shape_of(known(model))
    of_rank = footprint.active_layer_bytes(shape, 0, "fp8", split)
    assert active_layer_bytes(ModelShape.from_config(known(model)), "fp8") / split.tp == pytest.approx(of_rank, rel=0.02)
    part = of_rank / (footprint.layer_weight_bytes(shape, 0, "fp8", split) * split.ep)
    assert part == 1.0 if shape.experts is None else part < 0.3
