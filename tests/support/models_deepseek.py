# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of DeepSeek, with the logits of transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.checkpoints import write_checkpoint
from tests.support.models_logits import logits_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {"rms_norm_eps": 0.05}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v3": ("deepseek_v3", {}),
    "v3-stacked-one-group": ("deepseek_v3", {
        "stacked": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None, "rope_interleave": False,
        "first_k_dense_replace": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
}  # fmt: skip


@functools.cache
def written(case: str, root: Path) -> tuple[Path, list[Tensor], list[Tensor]]:
    """(folder, token ids per sequence, transformers' logits per sequence)."""
    family, overrides = CASES[case]
    folder = write_checkpoint(root / case, family, num_hidden_layers=3, **overrides)
    return folder, *logits_of(folder)
