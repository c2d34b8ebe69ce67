# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of models whose layers keep a state (Qwen3-Next, Qwen3.5, Granite 4, Nemotron-H) equal transformers': real rank
processes, chunked prompts and preemptions in their middle, slots that others have left, over tensor, expert, data-parallel and
pipeline ranks; in FP8; and as a text tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.config.model import ModelShape
from phalanx.errors import LayoutError
from phalanx.layout import Layout
from phalanx.layout.cache import default_snapshots, request_bytes, token_bytes
from phalanx.layout.memory import stage_caches
from phalanx.planner import search, subject
from tests.support.checkpoints import write_checkpoint
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

pytestmark = pytest.mark.usefixtures("forked_python")

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("qwen3_next", {}),
    "next-fp8": ("qwen3_next", {"hidden_size": 144, "moe_intermediate_size": 192, "std": 0.1}),
    "3.5": ("qwen3_5", {"tie_word_embeddings": True}),
    "3.5-moe": ("qwen3_5_moe", {"stacked": True}),
    "3.5-tower": ("qwen3_5_vl", {}),
    "granite": ("granite_hybrid", {}),
    "granite-fp8": ("granite_hybrid", {"hidden_size": 128, "mamba_d_head": 32, "num_local_experts": 0, "std": 0.1}),
    "nemotron": ("nemotron_h", {}),
    "nemotron-fp8": ("nemotron_h", {"hidden_size": 144, "moe_intermediate_size": 192, "std": 0.1}),
}
LAYOUTS = {
    "next": [(1, 1, 1), (2, 2, 2)], "next-fp8": [(2, 1, 1)], "3.5": [(2, 1, 2)], "3.5-moe": [(2, 2, 1)], "3.5-tower": [(1, 1, 2)],
    "granite": [(2, 2, 2)], "granite-fp8": [(2, 1, 1)], "nemotron": [(2, 2, 2)], "nemotron-fp8": [(2, 1, 1)],
}  # fmt: skip
"""(tp, moe_ep, pp)"""
SLOTS = 6
STATES = SLOTS + default_snapshots(SLOTS)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return references_of(tmp_path_factory.mktemp("recurrent"), CHECKPOINTS, 4, "in_proj_ba")


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in LAYOUTS.items() for layout in layouts])
def test_tokens_equal_transformers(references, name, layout):
    folder, expected = references[name]
    tp, _, pp = layout
    shape = ModelShape.from_folder(folder)
    blocks = longest_request(prompts_of_all_lengths()) * 3 // (2 * BLOCK) + 1
    caches = stage_caches(shape, "fp32", "fp32", Layout(pp=pp, tp=tp))
    room = max(blocks * BLOCK * token_bytes(stage) + STATES * request_bytes(stage) for stage in caches)
    assert_layout_gives(expected, folder, layout, cache_bytes=room, hits=False)  # prompts too short for a state to be kept


def test_tokens_over_data_parallel_indices_equal_transformers(references):
    folder, expected = references["next"]
    with started(folder, device="cpu", dtype="fp32", expert_parallel_size=2, max_num_tokens=2 * STEP_TOKENS) as llm:
        assert generated(llm) == expected


@pytest.mark.parametrize(("family", "layout", "drafts"), [
    ("qwen3_next", (1, 1, 2, 1), 3), ("qwen3_next", (2, 2, 1, 2), 0), ("granite_hybrid", (2, 1, 1, 1), 0),
])  # fmt: skip
def test_a_prefix_hit_goes_on_from_the_state_of_the_prefix(tmp_path, family, layout, drafts):
    """Turns of a conversation, and prompts that begin alike, of which the second shows where they part. layout: (tp, moe_ep, dp,
    pp)"""
    lookup = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1}
    folder = write_checkpoint(tmp_path / family, family, num_hidden_layers=4, max_position_embeddings=1024)
    tp, moe_ep, dp, pp = layout
    generator = torch.Generator().manual_seed(5)
    system, *messages = (torch.randint(3, 380, (length,), generator=generator).tolist() for length in (600, 30, 37, 41, 45))
    turns = [system + messages[0]]
    turns.append(turns[0] + [7, 8, 9] + messages[1])
    prompts = [*turns, *(system + message for message in messages[2:]), turns[1]]
    expected = reference_tokens(folder, prompts, 6)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(
        folder, device="cpu", dtype="fp32", max_num_tokens=256 * dp, max_batch_size=4 * dp, max_seq_len=900, state_snapshots=4 * dp,
        tensor_parallel_size=tp, moe_expert_parallel_size=moe_ep, expert_parallel_size=dp, pipeline_parallel_size=pp,
        speculative_config=lookup if drafts else None,
    ) as llm:  # fmt: skip
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        behind_turn, behind_system = 624, 592  # whole blocks of 16 tokens
        hits = [output.num_cached_tokens for output in outputs]
        assert hits == [0, behind_turn, 0, behind_system, behind_turn]
        together = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in together] == expected
        assert (llm.stats().draft_tokens > 0) == (drafts > 0)


def test_a_context_of_5000_tokens_equals_transformers(tmp_path):
    """In chunks of 448 tokens, which end within chunks of the rule."""
    folder = write_checkpoint(tmp_path / "long", "qwen3_5", max_position_embeddings=8192)
    prompt = torch.randint(3, 380, (5000,), generator=torch.Generator().manual_seed(9)).tolist()
    (expected,) = reference_tokens(folder, [prompt], 2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(folder, device="cpu", dtype="fp32", max_num_tokens=448, max_batch_size=2, max_seq_len=5100) as llm:
        assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["next", "3.5", "3.5-moe", "granite", "nemotron"])
def test_tokens_on_a_gpu_equal_transformers(references, name):
    """In fp32, by the kernels that a GPU runs, in captured steps."""
    folder, expected = references[name]
    with started(folder, device="cuda", dtype="fp32", max_num_tokens=64) as llm:
        assert generated(llm) == expected


def test_what_cannot_run_is_refused_by_name(references):
    folder, _ = references["3.5"]
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=3 does not divide"):
        LLM(folder, device="cpu", tensor_parallel_size=3)


@pytest.mark.parametrize(("name", "state"), [
    ("qwen3-next-80b-a3b", 79_036_416 // 2),
    # 36 layers: of 128 heads, a matrix of 128 x 64 and 3 inputs of 64 before; of a group, which both ranks have, 3 of B and C
    ("granite-4.0-h-small", 36 * (64 * (128 * 64 + 3 * 64) + 3 * 2 * 128) * 4),
    ("nemotron-3-nano-30b-a3b", 23 * (32 * (128 * 64 + 3 * 64) + 4 * 3 * 2 * 128) * 4),  # 64 heads of 8 groups
])  # fmt: skip
def test_it_is_planned(name, state):
    """Of a request, each of tp ranks has the state of its heads."""
    shape = subject.shape_for(name)
    machine, _ = subject.machine_for("H200", gpus_per_node=2)
    plans = search.search(shape, machine, search.PlanRequest(dtype="bf16", isl=1024, osl=256)).plans
    (plan,) = (plan for plan in plans if plan.layout.name == "tp 2 pp 1")
    assert plan.bytes["request_state"] == (plan.max_batch_size * 3 // 2) * state
    assert plan.ms_per_token.label == "estimated"


def started(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder, kv_block_size=BLOCK, max_batch_size=SLOTS, max_seq_len=longest_request(prompts_of_all_lengths()), **options
    )  # fmt: skip


def generated(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts_of_all_lengths(), params, use_tqdm=False)]
