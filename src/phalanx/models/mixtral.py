# SPDX-License-Identifier: Apache-2.0
"""Mixtral (arXiv 2401.04088): Mistral with experts in all layers."""

from __future__ import annotations

from phalanx.models.layers.moe import ExpertNames
from phalanx.models.mistral import Mistral


class Mixtral(Mistral):
    """Mistral's attention; an expert's w1 is its gate, w3 up, w2 down."""

    expert_names = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
