# SPDX-License-Identifier: Apache-2.0
"""The planner's sizes of graphs are those that the engine captures."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from phalanx.config.model import ModelShape
from phalanx.plan import footprint, graphs
from phalanx.plan.families import known, shape_of
from phalanx.plan.footprint import Split
from phalanx.plan.weight_tensors import active_layer_bytes
from phalanx.worker import graph_buffers


def test_the_engine_captures_these_sizes():
    assert graph_buffers.graph_sizes is graphs.graph_sizes
    rows, tokens = graphs.graph_sizes(100, 50_000)
    assert [size.tokens for size in rows][-1] == 100
    assert [size.tokens for size in tokens][-1] == graphs.MIXED_GRAPH_TOKENS[-1]
    assert all(size.prefill_rows == 0 for size in rows)
    assert all(0 < size.prefill_rows <= max(graphs.MAX_PREFILL_ROWS, size.tokens // 64) for size in tokens)


def test_layers_of_many_bytes_gain_nothing_from_graphs_of_many_tokens():
    assert graphs.max_graph_tokens(855e6) < graphs.max_graph_tokens(214e6)
    assert graphs.max_graph_tokens(600e6) == 1000
    assert graphs.max_graph_tokens(600e6, has_experts=True) == 1500
    assert graphs.max_graph_tokens(1e6) == graphs.MIXED_GRAPH_TOKENS[-1]
    assert graphs.max_graph_tokens(1e6, dp=2) == graphs.EXCHANGED_GRAPH_TOKENS


def test_the_planner_sets_memory_aside_for_graphs_of_many_tokens():
    """A graph's activations are beside those of eager steps; experts that a token does not reach do not count."""
    few, more = (shape_of(known(name)) for name in ("llama-3-70b", "qwen3-30b-a3b"))
    tokens = footprint.max_graph_tokens(more, "fp8", Split(2))
    assert footprint.max_graph_tokens(few, "fp8", Split(2)) < footprint.FEW_GRAPH_TOKENS < 8192 < tokens
    small, large = (footprint.graph_bytes(more, "fp8", Split(2), 512, most) for most in (2048, 8192))
    sizes = [len(graphs.graph_sizes(512, most)[1]) for most in (2048, 8192)]
    more_graphs = (sizes[1] - sizes[0]) * footprint.GRAPH_BYTES
    outputs = 6144 * 8 * 2048 * 2  # of so many tokens more, with 8 experts each
    assert large - small == pytest.approx(more_graphs + footprint.document()["memory"][footprint.GRAPH_PAIR] * outputs, rel=1e-6)
    assert footprint.graph_bytes(few, "fp8", Split(2), 512, 2048) == footprint.graph_bytes(few, "fp8", Split(2), 512, 8192)
    assert footprint.max_graph_tokens(shape_of(known("deepseek-v2")), "fp8", Split(2)) == graphs.LATENT_GRAPH_TOKENS


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v2"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_planner_and_engine_capture_the_same_sizes(model, tp):
    shape = ModelShape.from_config(known(model))
    one_byte = torch.empty(1, dtype=torch.float8_e4m3fn, device="meta")
    engine = SimpleNamespace(
        layers=[SimpleNamespace(parameters=lambda: [one_byte])], shape=shape,
        context=SimpleNamespace(dtype=torch.bfloat16, group=SimpleNamespace(size=tp), dp=SimpleNamespace(size=1)),
    )  # fmt: skip
    planned = footprint.max_graph_tokens(shape_of(known(model)), "fp8", Split(tp))
    assert graph_buffers.max_graph_tokens(engine) == pytest.approx(planned, rel=0.05)  # slices are padded


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
