# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of DeepSeek equal transformers' where the tokens of latents are divided over ranks: real rank processes, chunked
prompts, a prefix cache that is hit, preemptions, drafts; and the cache holds as many times more tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, SamplingParams
from phalanx.config.model import ModelShape
from phalanx.engine.messages import DECODE_GRAPH, MIXED_GRAPH
from phalanx.layout import Layout
from phalanx.layout.cache import token_bytes
from phalanx.layout.families import layer_cache
from phalanx.layout.memory import block_bytes, stage_caches
from tests.support.greedy_tokens import (
    BLOCK,
    NEW_TOKENS,
    STEP_TOKENS,
    References,
    assert_layout_gives,
    assert_tokens_twice,
    longest_request,
    prompts_of_all_lengths,
    references_of,
)
from tests.support.models_deepseek import with_module

pytestmark = pytest.mark.usefixtures("forked_python")

NGRAM = {"speculative_config": json.dumps({
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "num_speculative_tokens_per_batch_size": [[1, 64, 3]],
})}  # fmt: skip
"""What followed the last token where it occurred before; it is verified whatever that costs."""
CASES: dict[str, tuple[str, tuple[int, int, int], int, dict[str, Any]]] = {
    "tp 2, by single tokens": ("v3", (2, 1, 1), 2, {"kv_block_size": 1}),
    "tp 4, two halves, experts split": ("v3", (4, 2, 1), 2, {"self_check": True}),
    "tp 4, four parts": ("v2", (4, 1, 1), 4, {"kv_block_size": 1}),
    "pp 2, drafts": ("v3", (2, 1, 2), 2, NGRAM),
}
"""Checkpoint, (tp, moe_ep, pp), dcp and options."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    families = {"v2": ("deepseek_v2", {}), "v3": ("deepseek_v3", {})}
    return references_of(tmp_path_factory.mktemp("deepseek"), families, 3)


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_transformers(references: References, case: str) -> None:
    name, layout, dcp, options = CASES[case]
    folder, expected = references[name]
    own_block = options.get("kv_block_size", BLOCK // 2)
    stats = assert_layout_gives(
        expected, folder, layout, cache_bytes=_cache_bytes(folder, layout, dcp, own_block), decode_context_parallel_size=dcp,
        **({"kv_block_size": own_block} | options),
    )  # fmt: skip
    assert (stats.draft_tokens > 0) == ("drafts" in case)


@pytest.mark.gpu2
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_tokens_on_two_gpus_equal_transformers(references: References, name: str) -> None:
    """In fp32, by the kernels that a GPU runs, in captured steps; the reference path of the start's check agrees."""
    folder, expected = references[name]
    with LLM(
        folder, tensor_parallel_size=2, decode_context_parallel_size=2, device="cuda", dtype="fp32", max_num_tokens=64,
        max_seq_len=longest_request(prompts_of_all_lengths()), max_batch_size=8, kv_block_size=BLOCK, self_check=True, **NGRAM,
    ) as llm:  # fmt: skip
        assert all(rank.attention.startswith("triton latent") for rank in llm.facts.ranks)
        assert_tokens_twice(llm, prompts_of_all_lengths(), expected)
        assert reported_soon(lambda: sum(llm.stats().ran.get(f"{kind}/steps", 0) for kind in (DECODE_GRAPH, MIXED_GRAPH)) > 0)


def reported_soon(condition: Callable[[], bool]) -> bool:
    """Whether it holds within some heartbeats: ranks report with these how steps ran."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def _cache_bytes(folder: Path, layout: tuple[int, int, int], dcp: int, own_block: int) -> int:
    """On each rank, room for its part of one request at its largest and a half. own_block: a rank's tokens of a block."""
    tp, moe_ep, pp = layout
    stages = stage_caches(ModelShape.from_folder(folder), "fp32", "fp32", Layout(tp=tp, moe_ep=moe_ep, pp=pp, dcp=dcp))
    block = max(block_bytes(caches, own_block * dcp) for caches in stages)
    return block * (3 * longest_request(prompts_of_all_lengths()) // (2 * own_block * dcp) + 1)


def test_drafts_of_the_module_host_memory_and_groups_with_caches_of_their_own(tmp_path: Path) -> None:
    """The module of multi-token prediction has a cache of its own, of which each rank holds all."""
    folder, _ = with_module(tmp_path, "deepseek_v3")
    prompts = prompts_of_all_lengths()
    sizes: dict[str, Any] = {
        "device": "cpu", "dtype": "fp32", "max_num_tokens": 2 * STEP_TOKENS, "max_batch_size": 6,
        "max_seq_len": longest_request(prompts),
    }  # fmt: skip
    with LLM(folder, **sizes) as llm:
        alone = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True), use_tqdm=False)
        expected = [output.outputs[0].token_ids for output in alone]
    draft = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    layout = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "decode_context_parallel_size": 2}
    shape, own_block = ModelShape.from_folder(folder), 2
    block = 2 * own_block * token_bytes([layer_cache(shape, 0, "fp32")])
    blocks = 3 * sizes["max_seq_len"] // (2 * 2 * own_block) + 1
    with LLM(
        folder, **sizes, **layout, kv_block_size=own_block, kv_cache_bytes=blocks * (shape.num_layers * block // 2 + block),
        kv_host_memory=1 << 22, speculative_config=draft,
    ) as llm:  # fmt: skip
        assert llm.facts.kv_tokens == 2 * blocks * 2 * own_block
        stats = assert_tokens_twice(llm, prompts, expected)
    assert stats.draft_tokens > 0
    assert stats.host_saved > 0
