# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of Mixtral and Qwen3-MoE equal transformers' over (tp, ep, pp) in {1, 2}^3, with both meanings of ep: attention
data-parallel over expert_parallel_size groups, and experts inside the tensor-parallel group. Real rank processes over gloo, with
requests that come late and preempt each other, and data-parallel indices that have none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx import LLM, SamplingParams
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import assert_tokens_twice, params_of, reference_tokens

pytestmark = pytest.mark.usefixtures("forked_python")

CASES = [  # (tp, ep, moe_ep, pp)
    ("mixtral", (1, 1, 1, 1)), ("mixtral", (2, 2, 1, 2)), ("mixtral", (2, 1, 2, 2)), ("qwen3_moe", (1, 2, 1, 1)),
]  # fmt: skip
NEW_TOKENS, BLOCK, STEP_TOKENS, MAX_LENGTH = 12, 4, 32, 60
TOKENS_IN_CACHE = 76  # on each data-parallel index: one request at its longest, and a half

Reference = tuple[Path, list[list[int]], list[list[int]]]


def prompts_of() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 380, (17,), generator=generator).tolist()
    own = [torch.randint(3, 380, (length,), generator=generator).tolist() for length in (1, 5, 17, 40)]
    return [*own, shared + own[1], shared + own[2], shared]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    root, prompts = tmp_path_factory.mktemp("experts"), prompts_of()
    references = {}
    for family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        folder = write_checkpoint(root / family, family, num_hidden_layers=3)
        references[family] = folder, prompts, reference_tokens(folder, prompts, NEW_TOKENS)
    # Of equal scores the first experts win here, and any elsewhere, so all experts are alike: those of the first data-parallel
    # index get all tokens, and those of the other none.
    folder = write_checkpoint(root / "skewed", "mixtral", num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(".gate.weight"):
            weights[name].zero_()
        elif ".experts." in name:
            weights[name] = weights[re.sub(r"experts\.\d", "experts.0", name)].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    references["skewed"] = folder, prompts, reference_tokens(folder, prompts, NEW_TOKENS)
    return references


def engine(folder: Path, *, tp: int, ep: int = 1, moe_ep: int = 1, pp: int = 1, **options: object) -> LLM:
    return LLM(
        folder, tensor_parallel_size=tp, expert_parallel_size=ep, moe_expert_parallel_size=moe_ep, pipeline_parallel_size=pp,
        device="cpu", kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS, max_batch_size=6,
        max_seq_len=MAX_LENGTH, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_tokens_equal_transformers(references, family, layout):
    tp, ep, moe_ep, pp = layout
    folder, prompts, expected = references[family]
    with engine(folder, tp=tp, ep=ep, moe_ep=moe_ep, pp=pp, kv_cache_bytes=_cache_bytes(folder, tp, pp)) as llm:
        assert_tokens_twice(llm, prompts, expected)
        alone = llm.generate(prompts[2:3], params_of(expected), use_tqdm=False)  # the other data-parallel indices have no tokens
        assert alone[0].outputs[0].token_ids == expected[2]
        assert llm.stats().blocks_referenced == 0


@pytest.mark.parametrize(
    ("checkpoint", "tp", "ep", "exchange"),
    [
        ("skewed", 2, 2, "ALL_GATHER"),
        ("skewed", 1, 2, "ALL_TO_ALL"),
        ("qwen3_moe", 2, 4, "ALL_TO_ALL"),
        ("skewed", 1, 2, "ONE_SIDED"),
        ("qwen3_moe", 1, 4, "AUTO"),
        ("deepseek_v3", 2, 2, "ALL_GATHER"),  # latent attention, dense layers and shared experts, of each index's own tokens
    ],
)
def test_either_exchange_with_experts_that_get_nothing_and_all(references, checkpoint, tp, ep, exchange):
    folder, prompts, expected = references[checkpoint]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with engine(folder, tp=tp, ep=ep, expert_exchange=exchange) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_the_guides_mixtral_on_eight_ranks(tmp_path):
    """`LLM("mixtral...", tensor_parallel_size=4, expert_parallel_size=2, dtype="fp8")`: 8 experts over 2 groups of 4 ranks. On the
    4 ranks of tensor_parallel_size=4 alone each expert has the same slices, and so the same scales."""
    folder = write_checkpoint(tmp_path, "mixtral", num_local_experts=8, num_attention_heads=8, num_key_value_heads=4)
    prompts, params = prompts_of(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    outputs = []
    for ep in (1, 2):
        with engine(folder, tp=4, ep=ep, dtype="fp8") as llm:
            outputs.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
    for one, two in zip(*outputs, strict=True):
        assert one.token_ids == two.token_ids
        assert [entry.logprob for entry in two.logprobs] == pytest.approx([entry.logprob for entry in one.logprobs], abs=1e-3)


def _cache_bytes(folder: Path, tp: int, pp: int) -> int:
    from phalanx.config.model import ModelShape, load_config
    from phalanx.layout.shard import heads

    shape = ModelShape.from_config(load_config(folder))
    kv_heads = len(heads(shape.num_heads, shape.num_kv_heads, tp, 0).kv)
    return 2 * kv_heads * shape.head_dim * 4 * TOKENS_IN_CACHE * -(-shape.num_layers // pp)
