# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes that propose drafts, by a network or by prompt lookup, give the tokens of one rank that proposes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.eagle3_heads import write_head
from tests.support.worker_served import served

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("proposers")
    return {family: write_checkpoint(parent / family, family) for family in ("llama", "mixtral", "gpt_oss")}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, Any]:
    return {family: served(folder)[0] for family, folder in folders.items()}


@pytest.mark.parametrize("embedding", [False, True], ids=["shared", "own"])
def test_a_head_changes_no_answer(folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, embedding: bool) -> None:
    """On two ranks of a stage, and on the last of two stages, with the target's embedding; there with its own, too."""
    head = write_head(tmp_path, ids=[0, 1, 2], embedding=embedding)
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    stages = {"pipeline_parallel_size": 2}
    shared: list[dict[str, Any]] = [{"tensor_parallel_size": 2}, {**stages, "returns": True}]
    for sizes in [{**stages, "returns": False}] if embedding else shared:
        answers, stats = served(folders["llama"], config, **sizes)
        assert answers == plain["llama"]
        assert stats.draft_tokens > 100


@pytest.mark.parametrize(
    ("family", "draft", "sizes"),
    [
        ("llama", "mixtral", {"tensor_parallel_size": 2}),
        ("llama", "llama", {"pipeline_parallel_size": 2, "returns": True}),
        ("mixtral", "mixtral", {"expert_parallel_size": 2, "indices": 2}),
        ("gpt_oss", "gpt_oss", {}),
    ],
    ids=["tp2", "pp2", "ep2", "windows"],
)
def test_a_draft_model_changes_no_answer(
    folders: dict[str, Path], plain: dict[str, Any], family: str, draft: str, sizes: dict[str, Any]
) -> None:
    config = {"method": "draft_model", "model": str(folders[draft]), "num_speculative_tokens": 3}
    answers, stats = served(folders[family], config, **sizes)
    assert answers == plain[family]
    assert stats.draft_tokens > 100
    accepted = sum(stats.accepted_tokens) / stats.draft_tokens  # half of the requests have a bias, which the draft model has not
    assert accepted > 0.05 if draft == family else accepted < 0.02, accepted


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2, "returns": True}),
        ("llama", {"pipeline_parallel_size": 2, "returns": False}),
        ("mixtral", {"expert_parallel_size": 2, "indices": 2}),
    ],
    ids=["one", "tp2", "pp2 returns", "pp2", "ep2"],
)
def test_prompt_lookup_changes_no_answer(
    folders: dict[str, Path], plain: dict[str, Any], family: str, sizes: dict[str, Any]
) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    answers, stats = served(folders[family], config, **sizes)
    assert answers == plain[family]
    assert stats.drafts > 20
    assert stats.draft_tokens >= sum(stats.accepted_tokens) > 40
