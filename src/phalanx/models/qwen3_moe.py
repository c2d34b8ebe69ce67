# SPDX-License-Identifier: Apache-2.0
"""Qwen3 with experts (arXiv 2505.09388), in all layers but those that config.json names dense."""

from __future__ import annotations

from phalanx.models.layers.moe import ExpertNames
from phalanx.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3's attention; one MLP or many."""

    expert_names = ExpertNames("mlp")
