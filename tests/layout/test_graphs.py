# SPDX-License-Identifier: Apache-2.0
"""The planner's sizes of graphs are those that the engine captures."""

from __future__ import annotations

import itertools

import pytest

from phalanx.config.model import ModelShape
from phalanx.layout import Layout, graphs
from phalanx.layout.families import known
from phalanx.layout.weights import active_layer_bytes, layer_bytes
from phalanx.planner import footprint
from phalanx.worker import graph_buffers


def test_the_engine_captures_these_sizes():
    assert graph_buffers.graph_sizes is graphs.graph_sizes
    rows, tokens = graphs.graph_sizes(100, 50_000)
    assert [size.tokens for size in rows][-1] == 100
    assert [size.tokens for size in tokens][-1] == graphs.MIXED_GRAPH_TOKENS[-1]
    assert all(size.prefill_rows == 0 for size in rows)
    assert all(0 < size.prefill_rows <= max(graphs.MAX_PREFILL_ROWS, size.tokens // 64) for size in tokens)


@pytest.mark.parametrize(
    ("model", "dtype", "layout", "tokens"),
    [
        ("llama-3-70b", "bf16", Layout(), 350), ("llama-3-70b", "fp8", Layout(), 700), ("llama-3-70b", "fp8", Layout(tp=4), 2802),
        ("mixtral-8x7b", "fp8", Layout(), 2280), ("qwen3-30b-a3b", "fp8", Layout(), 15706),
        ("qwen3-30b-a3b", "fp8", Layout(dp=2), graphs.EXCHANGED_GRAPH_TOKENS),
        ("deepseek-v2", "fp8", Layout(tp=2), graphs.LATENT_GRAPH_TOKENS),
    ],
)  # fmt: skip
def test_layers_of_many_bytes_gain_nothing_from_graphs_of_many_tokens(model, dtype, layout, tokens):
    assert graphs.max_graph_tokens(ModelShape.from_config(known(model)), dtype, layout) == tokens


def test_the_planner_sets_memory_aside_for_graphs_of_many_tokens():
    """A graph's activations are beside those of eager steps; experts that a token does not reach do not count."""
    few, more = (ModelShape.from_config(known(name)) for name in ("llama-3-70b", "qwen3-30b-a3b"))
    tokens = graphs.max_graph_tokens(more, "fp8", Layout(tp=2))
    assert graphs.max_graph_tokens(few, "fp8", Layout(tp=2)) < footprint.FEW_GRAPH_TOKENS < 8192 < tokens
    small, large = (footprint.graph_bytes(more, "fp8", Layout(tp=2), 512, most) for most in (2048, 8192))
    sizes = [len(graphs.graph_sizes(512, most)[1]) for most in (2048, 8192)]
    more_graphs = (sizes[1] - sizes[0]) * footprint.GRAPH_BYTES
    outputs = 6144 * 8 * 2048 * 2  # of so many tokens more, with 8 experts each
    assert large - small == pytest.approx(more_graphs + footprint.document()["memory"][footprint.GRAPH_PAIR] * outputs, rel=1e-6)
    assert footprint.graph_bytes(few, "fp8", Layout(tp=2), 512, 2048) == footprint.graph_bytes(few, "fp8", Layout(tp=2), 512, 8192)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-70b", Layout()), ("llama-3-70b", Layout(tp=4)),
        *itertools.product(
            ("mixtral-8x7b", "qwen3-235b-a22b"), (Layout(), Layout(tp=4), Layout(tp=4, moe_ep=4), Layout(tp=2, dp=2))
        ),
    ],
    ids=str,
)  # fmt: skip
def test_of_routed_experts_those_that_a_token_reaches_count(model, layout):
    shape = ModelShape.from_config(known(model))
    part = active_layer_bytes(shape, 0, "fp8", layout) / (layer_bytes(shape, 0, "fp8", layout) * layout.dp)
    assert part == 1.0 if shape.experts is None else part < 0.3
