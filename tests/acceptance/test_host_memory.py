# SPDX-License-Identifier: Apache-2.0
"""Conversations whose KV cache does not fit the device: with host memory they are the same tokens, and prompts come back by copy.
Real rank processes; requests preempt each other, prompts are chunked, drafts are verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx import LLM
from phalanx.config.model import ModelShape
from phalanx.errors import EngineError
from phalanx.layout import Layout
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache
from phalanx.layout.memory import block_bytes, blocks_of_request, stage_caches
from tests.support import conversations
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import BLOCK, STEP_TOKENS

pytestmark = pytest.mark.usefixtures("forked_python")

USERS, TURNS, MORE, NEW = 6, 3, 9, 8
LONGEST, SLOTS = TURNS * (MORE + NEW), 400
NGRAM = json.dumps({
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "num_speculative_tokens_per_batch_size": [[1, 64, 3]],
})  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp 2, n-gram drafts": ("llama", {"tensor_parallel_size": 2, "speculative_config": NGRAM}),
    "pp 2, int8 with scales, a draft model": ("llama", {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8"}),
    "groups of layers with windows": ("gpt_oss", {"pipeline_parallel_size": 2}),
    "latents, indices with caches of their own": ("deepseek_v3", {"expert_parallel_size": 2}),
}


def converse(llm: LLM, *, salted: bool = False) -> list[list[int]]:
    """salted: nothing is found in the prefix cache."""
    return conversations.converse(llm, [[] for _ in range(USERS)], TURNS, MORE, NEW, "salt" if salted else None)


def sizes(folder: Path, options: dict[str, Any]) -> dict[str, int]:
    """Of one rank, a KV cache with room for hardly two conversations; and of the host, memory for SLOTS blocks on all ranks."""
    shape = ModelShape.from_folder(folder)
    layout = Layout(tp=options.get("tensor_parallel_size", 1), pp=options.get("pipeline_parallel_size", 1))
    kv = options.get("kv_cache_dtype", "fp32")
    blocks = [block_bytes(caches, BLOCK) for caches in stage_caches(shape, kv, "fp32", layout)]
    windows = group_windows(model_cache(shape))
    most = 2 * blocks_of_request(windows, LONGEST, BLOCK) - 2 * len(windows)
    ranks_of_stage = layout.tp * options.get("expert_parallel_size", 1)
    return {"kv_cache_bytes": max(blocks) * most, "kv_host_memory": SLOTS * sum(blocks) * ranks_of_stage}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_a_prefix_cache(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    folder = write_checkpoint(tmp_path / family, family, num_hidden_layers=3)
    memory = sizes(folder, options)
    if "a draft model" in case:  # the model itself, on the last stage: it takes as much memory again, and more
        draft: dict[str, Any] = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
        draft["num_speculative_tokens_per_batch_size"] = [[1, 4096, 2]]  # also where a busy machine makes them not worth it
        options = {**options, "speculative_config": json.dumps(draft)}
        memory = {name: 3 * size for name, size in memory.items()}
    with LLM(
        folder, device="cpu", dtype="fp32", kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS, max_batch_size=4, max_seq_len=LONGEST,
        **memory, **options,
    ) as llm:  # fmt: skip
        expected = converse(llm, salted=True)
        before = llm.stats()
        assert converse(llm) == expected
        stats = llm.stats()
        assert stats.host_hits > 0.1 * stats.prefix_queries / 2  # half of the queries were salted
        assert stats.prefix_hits >= stats.host_hits
        assert 0 < stats.host_used <= stats.host_saved
        assert stats.blocks_referenced == 0
        if "a draft model" in case:
            accepted = sum(stats.accepted_tokens) - sum(before.accepted_tokens)
            assert accepted > 0.9 * (stats.draft_tokens - before.draft_tokens) > 0, "its own keys and values come back, too"
        else:
            assert stats.host_total == SLOTS * options.get("expert_parallel_size", 1), "one budget for all ranks of the host"
        if "ngram" in options.get("speculative_config", ""):
            assert stats.draft_tokens > 0
            for _ in range(4):  # where a busy machine lets few requests run at once, none is preempted
                if not llm.stats().preemptions:
                    assert converse(llm) == expected
            assert llm.stats().preemptions > 0
            llm.sleep(2)
            llm.wake_up()
            assert llm.stats().host_used == 0, "what it had is gone, as that on the device"
            assert converse(llm) == expected
            kill_a_rank(llm)


def kill_a_rank(llm: LLM) -> None:
    ranks = [child for child in psutil.Process().children(recursive=True) if child.cmdline()[0].strip() == "phalanx rank 1"]
    ranks[-1].kill()
    with pytest.raises(EngineError, match="rank 1"):
        converse(llm)
