# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of the families that are lines of traits equal transformers', over tensor, pipeline and expert parallelism: real
rank processes over gloo, with chunked prompts and hits of the prefix cache. `tests/models/test_registry.py` compares their logits
over more layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import (
    BLOCK,
    NEW_TOKENS,
    STEP_TOKENS,
    assert_tokens_twice,
    longest_request,
    params_of,
    prompts_of_all_lengths,
    reference_tokens,
)

pytestmark = pytest.mark.usefixtures("forked_python")

SHORT = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.3, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 7.0],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
ODD_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "minimax_m2": ODD_HEADS,
    # max_seq_len is below the context before the extension, which is below max_position_embeddings.
    "phi3": {"hidden_size": 64, "rope_parameters": SHORT, "original_max_position_embeddings": 64},
    "olmo3": {**ODD_HEADS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma2": ODD_HEADS,
    "gemma3": {**ODD_HEADS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4": {**ODD_HEADS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "gemma4_moe": {**ODD_HEADS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "gemma4_e": {
        **ODD_HEADS,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "cohere2": {**ODD_HEADS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ernie4_5": ODD_HEADS,
    "ernie4_5_moe": ODD_HEADS,
    "ernie4_5_vl": {},
    "llama4": {**ODD_HEADS, "interleave_moe_layer_step": 1},
    "ministral3": ODD_HEADS,
    "cohere": {**ODD_HEADS, "use_qk_norm": True},
    "hy_v3": ODD_HEADS,
}
CASES = [  # (tp, ep, moe_ep, pp)
    ("glm4_moe", (2, 1, 2, 1)), ("glm4_moe", (1, 2, 1, 1)), ("minimax_m2", (2, 2, 1, 1)),
    ("hy_v3", (1, 2, 1, 1)), ("ernie4_5_moe", (2, 2, 1, 1)), ("ernie4_5_vl", (4, 1, 2, 1)),
    ("ernie4_5_vl", (1, 2, 1, 1)),
    ("llama4", (2, 1, 2, 1)), ("llama4", (1, 2, 1, 1)), ("llama4", (2, 1, 1, 2)),
    ("ministral3", (2, 1, 1, 2)), ("cohere", (2, 1, 1, 2)),
    *((family, (2, 1, 1, 2)) for family in ("phi3", "olmo3", "gemma3", "gemma4", "gemma4_e", "cohere2")),
    ("gemma4_moe", (2, 1, 2, 2)), ("gemma4_moe", (1, 2, 1, 1)),
]  # fmt: skip

Reference = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    @functools.cache
    def of(family: str) -> Reference:
        folder = tmp_path_factory.mktemp(family)
        write_checkpoint(folder, family, **{"num_hidden_layers": 3, **CHECKPOINTS[family]})
        return folder, reference_tokens(folder, prompts_of_all_lengths(), NEW_TOKENS)

    return of


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_tokens_equal_transformers(reference, family, layout):
    tp, ep, moe_ep, pp = layout
    folder, expected = reference(family)
    prompts = prompts_of_all_lengths()
    with LLM(
        folder, tensor_parallel_size=tp, expert_parallel_size=ep, moe_expert_parallel_size=moe_ep, pipeline_parallel_size=pp,
        device="cpu", dtype="fp32", kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS, max_batch_size=6,
        max_seq_len=longest_request(prompts),
    ) as llm:  # fmt: skip
        assert_tokens_twice(llm, prompts, expected)


@pytest.mark.gpu1
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_tokens_on_a_gpu_equal_transformers(reference, family):
    """In fp32, by the kernels of the GPU, in CUDA graphs where the attention has them."""
    folder, expected = reference(family)
    prompts = prompts_of_all_lengths()
    with LLM(folder, dtype="fp32", max_num_tokens=64, max_batch_size=6, max_seq_len=longest_request(prompts)) as llm:
        outputs = llm.generate(prompts, params_of(expected), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
