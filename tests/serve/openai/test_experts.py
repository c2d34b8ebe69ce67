# SPDX-License-Identifier: Apache-2.0
"""The routes of experts over a scripted engine: what /experts and /metrics say is what the engine sent."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from phalanx.engine.messages import ExpertStats, RankFacts
from phalanx.serve.openai.schema.responses import ErrorResponse, ExpertsResponse
from tests.support.serve_http_app import Scripted, live


def packed(counts: list) -> bytes:
    return zlib.compress(np.array(counts, dtype="<i8").tobytes())


TOKENS = [[[3, 1, 0, 0], [0, 0, 2, 2]], [[4, 4, 0, 0], [0, 0, 0, 0]]]  # [layers, ranks, experts]
STATS = ExpertStats(
    [1, 3], [[0, 2], [0, 2]], 4, packed(TOKENS), packed(TOKENS), 12.5, [[0, 1, 2, 3], [0, 1, 2, 3]], movable=True, moved=5,
    longest_move=0.004,
)  # fmt: skip


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with live(Scripted("x")) as server, server.client() as client:
        server.engine.experts = STATS
        server.engine.facts.ranks = [RankFacts(0, 0, "cpu", (0, 4), moe_layers=[1, 3])]
        yield client


def test_experts_of_each_layer(http: httpx.Client) -> None:
    body = ExpertsResponse.model_validate(http.get("/experts").json())
    (engine,) = body.engines
    assert (engine.experts, engine.recent_seconds, engine.moved, engine.longest_move_seconds) == (4, 12.5, 5, 0.004)
    assert [layer.layer for layer in engine.layers] == [1, 3]
    assert [layer.tokens for layer in engine.layers] == [[3, 1, 2, 2], [4, 4, 0, 0]]
    assert [layer.rank_tokens for layer in engine.layers] == [[4, 4], [8, 0]]
    assert engine.layers[0].ranks == [0, 2]


def test_metrics_by_expert_and_rank(http: httpx.Client) -> None:
    lines = http.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("phalanx:expert_")}
    assert values['phalanx:expert_tokens_total{engine="0",expert="2",layer="1",model_name="tiny"}'] == 2
    assert values['phalanx:expert_rank_tokens_total{engine="0",model_name="tiny",rank="0"}'] == 12
    assert values['phalanx:expert_imbalance{engine="0",model_name="tiny"}'] == pytest.approx(1.5)
    assert values['phalanx:expert_moves_total{engine="0",model_name="tiny"}'] == 5
    assert len([key for key in values if "expert_tokens_total" in key]) == 8


def test_a_rebalance_is_accepted(http: httpx.Client) -> None:
    answer = http.post("/experts/rebalance")
    assert answer.status_code == 202
    ExpertsResponse.model_validate(answer.json())


def test_a_model_without_experts() -> None:
    with live(Scripted("x")) as server, server.client() as client:
        assert client.get("/experts").json() == {"object": "experts", "engines": []}
        answer = client.post("/experts/rebalance")
        assert answer.status_code == 400
        assert "nothing to move" in ErrorResponse.model_validate(answer.json()).error.message
        assert "phalanx:expert_" not in client.get("/metrics").text
