# SPDX-License-Identifier: Apache-2.0
"""Drafts change no token of models with layers of the gated delta rule or of Mamba-2, whose state a rejected draft must not change:
by prompt lookup, a draft model and their own module of multi-token prediction, over ranks, pipeline stages and data-parallel
indices, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.models_deepseek import with_module
from tests.support.worker_served import served

pytestmark = pytest.mark.usefixtures("forked_python")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("recurrent")
    folders = {family: with_module(parent, family)[0] for family in ("qwen3_next", "qwen3_5")}
    return folders | {family: write_checkpoint(parent / family, family) for family in ("llama", "granite_hybrid", "nemotron_h")}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, Any]:
    return {family: served(folder)[0] for family, folder in folders.items() if family != "llama"}


@pytest.mark.parametrize(
    ("family", "config", "sizes"),
    [
        ("qwen3_next", NGRAM, {"tensor_parallel_size": 2}),
        ("qwen3_next", NGRAM, {"pipeline_parallel_size": 2, "returns": True}),
        ("qwen3_next", NGRAM, {"expert_parallel_size": 2, "indices": 2}),
        ("qwen3_next", MTP, {"tensor_parallel_size": 2}),
        ("qwen3_5", MTP, {"pipeline_parallel_size": 2, "returns": False}),
        ("qwen3_5", {"method": "draft_model", "num_speculative_tokens": 2}, {}),
        ("granite_hybrid", NGRAM, {"tensor_parallel_size": 2}),
        ("granite_hybrid", {"method": "draft_model", "num_speculative_tokens": 2}, {}),
        ("nemotron_h", NGRAM, {"pipeline_parallel_size": 2, "returns": True}),
        ("nemotron_h", NGRAM, {"expert_parallel_size": 2, "indices": 2}),
    ],
    ids=[
        "lookup, tp2",
        "lookup, pp2",
        "lookup, ep2",
        "mtp, tp2",
        "mtp, pp2",
        "draft model",
        "granite, lookup, tp2",
        "granite, draft model",
        "nemotron, lookup, pp2",
        "nemotron, lookup, ep2",
    ],
)
def test_drafts_change_no_answer(
    folders: dict[str, Path], plain: dict[str, Any], family: str, config: dict[str, Any], sizes: dict[str, Any]
) -> None:
    if config["method"] == "draft_model":
        config = {**config, "model": str(folders["llama"])}
    answers, stats = served(folders[family], config, **sizes)
    assert answers == plain[family]
    assert stats.draft_tokens > 100
    if config is NGRAM:
        assert 0 < sum(stats.accepted_tokens) < stats.draft_tokens
