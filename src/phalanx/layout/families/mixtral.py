# SPDX-License-Identifier: Apache-2.0
"""Mixtral (arXiv 2401.04088) and MiniMax-M2: attention, and in each layer a router over experts w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from collections.abc import Iterator

import phalanx.layout.families.dense as dense
from phalanx.config.model import ModelShape
from phalanx.layout.families.declare import WeightTensor


def layer(shape: ModelShape, index: int) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer, by the names that checkpoints have on disk."""
    prefix = f"model.layers.{index}"
    yield from dense.attention(shape, prefix)
    yield from dense.sparse_moe(shape, prefix, "block_sparse_moe", ("w1", "w3", "w2"), "e_score_correction_bias")
