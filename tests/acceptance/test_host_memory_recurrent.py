# SPDX-License-Identifier: Apache-2.0
"""Conversations with models whose layers keep a state of each request, and whose KV blocks and states do not fit the device: with
host memory they are the same tokens, and hits go on from a state that came back. Real rank processes; requests preempt each other,
drafts are verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.cache import request_bytes
from phalanx.layout.memory import block_bytes, stage_caches
from tests.support import conversations
from tests.support.checkpoints import write_checkpoint

pytestmark = pytest.mark.usefixtures("forked_python")

USERS, TURNS, SYSTEM, MORE, NEW, BLOCK = 4, 2, 560, 40, 40, 16
LONGEST, SLOTS = SYSTEM + TURNS * (MORE + NEW), 4
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta rule, tp 2, n-gram drafts": ("qwen3_next", {"tensor_parallel_size": 2, "speculative_config": NGRAM}),
    "Mamba-2, pp 2": ("granite_hybrid", {"pipeline_parallel_size": 2}),
    "gated delta rule, indices with states of their own": ("qwen3_next", {"expert_parallel_size": 2}),
}


def converse(llm: LLM, round_: str, *, salted: bool = False) -> list[list[int]]:
    """Each has a long beginning of its own, so that a state is kept. salted: nothing is found in the prefix cache."""
    begun = [[3 + (17 * user + 7 * n * n) % 370 for n in range(SYSTEM)] for user in range(USERS)]
    return conversations.converse(llm, begun, TURNS, MORE, NEW, round_ if salted else None)


def sizes(folder: Path, options: dict[str, Any]) -> dict[str, int]:
    """Of one rank, a KV cache with room for two prompts of the last turn but not for both answers, and for one state beside those
    of slots; and of the host, memory for all."""
    layout = Layout(tp=options.get("tensor_parallel_size", 1), pp=options.get("pipeline_parallel_size", 1))
    shape = ModelShape.from_folder(folder).with_drafts(3 if "speculative_config" in options else 0)
    stages = stage_caches(shape, "fp32", "fp32", layout)
    blocks, states = ([count(stage) for stage in stages] for count in (lambda each: block_bytes(each, BLOCK), request_bytes))
    most, ranks = 2 * -(-(LONGEST - NEW) // BLOCK) + 1, layout.tp * options.get("expert_parallel_size", 1)
    room = max(block * most + (SLOTS + 1) * state for block, state in zip(blocks, states, strict=True))
    return {
        "kv_cache_bytes": room,
        "kv_host_memory": 4 * USERS * ranks * (sum(blocks) * (4096 // BLOCK) + sum(states)),
    }


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_a_prefix_cache(case: str, tmp_path: Path) -> None:
    check(*CASES[case], tmp_path, "cpu")


@pytest.mark.gpu1
@pytest.mark.parametrize(("family", "options"), [("qwen3_next", {"speculative_config": NGRAM}), ("granite_hybrid", {})])
def test_tokens_on_a_gpu_are_those_without_a_prefix_cache(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In fp32, in captured steps, with copies on streams of their own."""
    check(family, options, tmp_path, "cuda")


def check(family: str, options: dict[str, Any], tmp_path: Path, device: str) -> None:
    """Two rounds of the conversations have the tokens that they have without hits."""
    folder = write_checkpoint(tmp_path / family, family, num_hidden_layers=4, max_position_embeddings=1024)
    indices = options.get("expert_parallel_size", 1)
    with LLM(
        folder, device=device, dtype="fp32", kv_block_size=BLOCK, max_num_tokens=256 * indices, max_batch_size=SLOTS * indices,
        max_seq_len=LONGEST, state_snapshots=indices, **sizes(folder, options), **options,
    ) as llm:  # fmt: skip
        expected = converse(llm, "first", salted=True)
        queries = llm.stats().prefix_queries
        assert converse(llm, "plain") == expected
        assert converse(llm, "again") == expected
        stats = llm.stats()
        assert stats.host_states == 4 * USERS * indices
        assert 0 < stats.host_states_used <= stats.host_states
        assert stats.prefix_hits >= stats.host_hits > 0.3 * (stats.prefix_queries - queries), "states gave way before"
        assert (stats.draft_tokens > 0) == ("speculative_config" in options)
        assert stats.blocks_referenced == 0
        assert indices > 1 or device == "cuda" or stats.preemptions > 0
        if "speculative_config" in options:
            llm.sleep(2)
            llm.wake_up()
            assert (llm.stats().host_used, llm.stats().host_states_used) == (0, 0), "of other weights, for all that is known"
            assert converse(llm, "awake") == expected
            assert converse(llm, "awake") == expected
