# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of DeepSeek-V2, V3 and V3.2, GLM-4.7-Flash, GLM-5 and Mistral Small 4 equal transformers': real rank processes,
chunked prompts, a prefix cache that is hit, and preemptions, over tensor, expert and pipeline ranks; V3 in 16 bit and block-scaled
FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, SamplingParams
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.cache import token_bytes
from phalanx.layout.draft import network_caches
from phalanx.layout.memory import stage_caches
from phalanx.layout.mtp import Mtp
from tests.support.greedy_tokens import (
    BLOCK,
    NEW_TOKENS,
    STEP_TOKENS,
    References,
    assert_layout_gives,
    longest_request,
    prompts_of_all_lengths,
    reference_tokens,
    references_of,
)
from tests.support.models_deepseek import with_module

pytestmark = pytest.mark.usefixtures("forked_python")

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "v3": ("deepseek_v3", {}),
    "v3-fp8": ("deepseek_v3", {"hidden_size": 144, "moe_intermediate_size": 192, "kv_lora_rank": 136, "std": 0.1}),
    "glm-lite": ("glm4_moe_lite", {"v_head_dim": 24}),
    "v32": ("deepseek_v32", {}),
    "glm5-shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}),
    "mistral4": ("mistral4", {}),
}
LAYOUTS = {
    "v2": [(2, 2, 2)], "v2-lite": [(1, 1, 2)], "v3": [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)],
    "v3-fp8": [(2, 2, 1)], "glm-lite": [(2, 2, 1)], "mistral4": [(2, 1, 2)],
    "v32": [(1, 1, 1), (2, 1, 1), (1, 1, 2)], "glm5-shared": [(2, 2, 1)],
}  # fmt: skip
"""(tp, moe_ep, pp): of {1, 2}^3, each where moe_ep divides tp once."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references_of(tmp_path_factory.mktemp("deepseek"), CHECKPOINTS, 3)


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts])
def test_tokens_equal_transformers(references, name, layout):
    folder, expected = references[name]
    _, _, pp = layout
    cache_bytes = _cache_bytes(folder, pp, longest_request(prompts_of_all_lengths()))
    assert_layout_gives(expected, folder, layout, cache_bytes=cache_bytes)


def test_tokens_of_sparse_attention_with_drafts_equal_transformers(references):
    """Each draft chooses the keys of a position of its own."""
    folder, expected = references["v32"]
    prompts, params = prompts_of_all_lengths(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with LLM(
        folder, device="cpu", dtype="fp32", max_num_tokens=STEP_TOKENS, max_batch_size=3, max_seq_len=longest_request(prompts),
        speculative_config=drafts,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().draft_tokens > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.fixture(scope="module")
def with_modules(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Of sparse attention, with a module of multi-token prediction; GLM-5's stands behind a layer without an indexer."""
    parent, families = tmp_path_factory.mktemp("modules"), {"v32": "deepseek_v32", "glm5-shared": "glm_moe_dsa"}
    folders = {name: with_module(parent, family)[0] for name, family in families.items()}
    return {name: (folder, reference_tokens(folder, prompts_of_all_lengths(), NEW_TOKENS)) for name, folder in folders.items()}


MTP = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize(("name", "layout"), [("v32", (1, 1, 1)), ("v32", (1, 1, 2)), ("glm5-shared", (2, 1, 1))])
def test_tokens_of_sparse_attention_with_modules_drafts_equal_transformers(with_modules, name, layout):
    folder, expected = with_modules[name]
    longest = longest_request(prompts_of_all_lengths())
    stats = assert_layout_gives(
        expected, folder, layout, cache_bytes=_cache_bytes(folder, layout[2], longest, module=True), speculative_config=MTP
    )
    assert stats.draft_tokens > 0


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["v32", "glm5-shared"])
def test_tokens_on_a_gpu_with_modules_drafts_equal_transformers(with_modules, name):
    """Decode steps, steps with prompts, and the module's passes are captured."""
    folder, expected = with_modules[name]
    prompts, params = prompts_of_all_lengths(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        folder, device="cuda", dtype="fp32", max_seq_len=longest_request(prompts), max_num_tokens=64, max_batch_size=8,
        speculative_config=MTP,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().draft_tokens > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("name", ["v3", "glm-lite", "mistral4"])
def test_tokens_over_data_parallel_indices_equal_transformers(references, name):
    """Two groups of ranks, each with a cache, attention and shared experts of its own; the routed experts are split over both."""
    folder, expected = references[name]
    longest = longest_request(prompts_of_all_lengths())
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(
        folder, tensor_parallel_size=1, expert_parallel_size=2, device="cpu", dtype="fp32", kv_block_size=BLOCK,
        max_num_tokens=2 * STEP_TOKENS, max_batch_size=6, max_seq_len=longest,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts_of_all_lengths(), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["v2", "v2-lite", "v3", "glm-lite", "v32", "glm5-shared", "mistral4"])
def test_tokens_on_a_gpu_equal_transformers(tmp_path, name):
    """In fp32, by the kernels that a GPU runs: captured decode steps, latents, experts in groups."""
    folder, expected = references_of(tmp_path, {name: CHECKPOINTS[name]}, 3)[name]
    longest = longest_request(prompts_of_all_lengths())
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(folder, device="cuda", dtype="fp32", max_seq_len=longest, max_num_tokens=64, max_batch_size=8) as llm:
        outputs = llm.generate(prompts_of_all_lengths(), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def _cache_bytes(folder: Path, pp: int, longest: int, *, module: bool = False) -> int:
    """Room for one request at its largest and a half, on the rank with the most layers; each tensor-parallel rank has all of it.
    module: the last stage has one of multi-token prediction."""
    shape = ModelShape.from_folder(folder)
    stages = stage_caches(shape, "fp32", "fp32", Layout(pp=pp))
    if module:
        stages = (*stages[:-1], (*stages[-1], *network_caches(Mtp.of(shape), "fp32")))
    block = BLOCK * max(map(token_bytes, stages))
    return block * (3 * longest // (2 * BLOCK) + 1)
