# SPDX-License-Identifier: Apache-2.0
"""What an engine says of its experts, as the body of /experts and as the series of /metrics."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.engine.messages import ExpertStats
from phalanx.layout.expert_placement import imbalance
from phalanx.metrics import ExpertCounters


def document(engines: Sequence[ExpertStats]) -> dict[str, Any]:
    """The body of /experts."""
    return {"object": "experts", "engines": [_engine(number, stats) for number, stats in enumerate(engines) if stats.layers]}


def _engine(number: int, stats: ExpertStats) -> dict[str, Any]:
    tokens, recent = unpacked(stats, stats.tokens), unpacked(stats, stats.recent)
    layers = [
        {
            "layer": layer, "ranks": stats.ranks[i], "placement": stats.placement[i], "tokens": tokens[i].sum(0).tolist(),
            "recent_tokens": recent[i].sum(0).tolist(), "rank_tokens": tokens[i].sum(1).tolist(),
            "recent_rank_tokens": recent[i].sum(1).tolist(),
        }
        for i, layer in enumerate(stats.layers)
    ]  # fmt: skip
    return {
        "engine": number, "experts": stats.experts, "recent_seconds": round(stats.seconds, 3), "layers_left": stats.layers_left,
        "moved": stats.moved, "longest_move_seconds": stats.longest_move, "layers": layers,
    }  # fmt: skip


def counters(stats: ExpertStats) -> ExpertCounters:
    """What /metrics shows of an engine's experts."""
    tokens, recent = unpacked(stats, stats.tokens), unpacked(stats, stats.recent)
    by_expert = {
        (str(layer), str(expert)): count
        for layer, counts in zip(stats.layers, tokens.sum(1).tolist(), strict=True)
        for expert, count in enumerate(counts)
    }
    by_rank: dict[str, int] = {}
    for ranks, sums in zip(stats.ranks, tokens.sum(2).tolist(), strict=True):
        for rank, count in zip(ranks, sums, strict=True):
            by_rank[str(rank)] = by_rank.get(str(rank), 0) + count
    layers = [imbalance(sums) for sums in recent.sum(2).tolist()]
    return ExpertCounters(by_expert, by_rank, sum(layers) / len(layers) if layers else 1.0, stats.moved, stats.longest_move)


def unpacked(stats: ExpertStats, counts: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[layers, ranks, experts]"""
    spread = len(stats.ranks[0]) if stats.ranks else 1
    values = np.frombuffer(zlib.decompress(counts), dtype="<i8") if counts else np.zeros(0, dtype=np.int64)
    return values.reshape(len(stats.layers), spread, stats.experts)
