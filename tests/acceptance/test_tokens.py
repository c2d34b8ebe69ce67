# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens and log probabilities equal transformers', over every layout, with everything in the way that an engine does.

One engine per family and layout: real rank processes over gloo. Its cache is small enough that requests are preempted, its steps
short enough that prompts are chunked, and the prompts share beginnings, so that the prefix cache is hit; the tests assert that
each happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from phalanx import LLM
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import ALL, BLOCK, NEW_TOKENS, SHARED, STEP_TOKENS, continued, params_of, prompts_of_all_lengths

pytestmark = pytest.mark.usefixtures("forked_python")

# Every layout once, each family over several ranks.
LAYOUTS = {
    "llama": [(1, 1), (2, 1), (1, 2), (4, 2)],
    "mistral": [(2, 2)],
    "qwen2": [(2, 2)],
    "qwen3": [(4, 1)],
}
CASES = [(family, *layout) for family, layouts in LAYOUTS.items() for layout in layouts]
ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Odd head counts: 12 query heads over 3 KV heads leave 1.5 KV heads to each of two ranks, 0.75 to each of four.
CHECKPOINTS = {
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 3, "rope_parameters": {"rope_theta": 5000.0, **ROPE}},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 13, "tie_word_embeddings": True},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True},
}


@dataclass
class Reference:
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


@pytest.fixture(scope="module")
def reference(request, tmp_path_factory) -> Reference:
    family = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=3, **CHECKPOINTS[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts, tokens, logprobs = prompts_of_all_lengths(), [], []
    for prompt in prompts:
        sequence = continued(model, prompt, NEW_TOKENS)
        with torch.inference_mode():
            scores = model(sequence).logits[0].log_softmax(-1)
        new = sequence[0, len(prompt) :].tolist()
        tokens.append(new)
        logprobs.append([scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(new)])
    return Reference(folder, prompts, tokens, logprobs)


@pytest.mark.parametrize(("reference", "tp", "pp"), CASES, indirect=["reference"])
def test_tokens_equal_transformers(reference, tp, pp):
    longest = max(len(prompt) for prompt in reference.prompts) + NEW_TOKENS
    params = params_of(reference.tokens, logprobs=0)
    with LLM(
        reference.folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu",
        kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS, max_batch_size=6, max_seq_len=longest,
        kv_cache_bytes=_cache_bytes(reference, tp, pp, longest),
    ) as llm:  # fmt: skip
        # The second time, prompts hit blocks that the first left behind. Where requests arrive so slowly that few run at once
        # (on a busy machine), none is preempted, and they come again.
        for number, again in enumerate((ALL, SHARED, *[ALL] * 4)):
            if number >= 2 and llm.stats().preemptions:
                break
            outputs = llm.generate(reference.prompts[again], params, use_tqdm=False)
            for output, tokens, logprobs in zip(outputs, reference.tokens[again], reference.logprobs[again], strict=True):
                completion = output.outputs[0]
                assert completion.token_ids == tokens
                assert [entry.logprob for entry in completion.logprobs] == pytest.approx(logprobs, abs=1e-4)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.blocks_referenced == 0


def _cache_bytes(reference: Reference, tp: int, pp: int, longest: int) -> int:
    """Room for one request at its largest and a half, on the rank with the most layers. A window bounds what a request keeps: there
    is room for hardly more than one, as few are at their largest at once."""
    from phalanx.config.model import ModelShape, load_config
    from phalanx.layout.shard import heads

    shape = ModelShape.from_config(load_config(reference.folder))
    kv_heads = len(heads(shape.num_heads, shape.num_kv_heads, tp, 0).kv)
    block = 2 * kv_heads * shape.head_dim * 4 * BLOCK * -(-shape.num_layers // pp)
    (window,) = group_windows(model_cache(shape))
    if window is not None:
        return block * ((window + STEP_TOKENS) // BLOCK + 3)
    return block * (3 * longest // (2 * BLOCK) + 1)
