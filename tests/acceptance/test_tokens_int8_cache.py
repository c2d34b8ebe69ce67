# SPDX-License-Identifier: Apache-2.0
"""Tokens and log probabilities over a KV cache in int8 equal those of transformers whose keys and values are quantized alike, over
tensor and pipeline parallel ranks, with chunked prompts, preemption and hits in the prefix cache; and the bytes of that cache are
those that the planner counts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from phalanx import LLM
from phalanx.config.model import ModelShape
from phalanx.kernels.reference import quantize_int8
from phalanx.layout import Layout
from phalanx.layout.cache import kv_dtype, token_bytes
from phalanx.layout.memory import stage_caches
from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import (
    ALL,
    BLOCK,
    NEW_TOKENS,
    SHARED,
    STEP_TOKENS,
    longest_request,
    params_of,
    prompts_of_all_lengths,
)

pytestmark = pytest.mark.usefixtures("forked_python")

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 3},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 13},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12},
}
OFF = 0.2
"""Of the mean distance of log probabilities from those over a cache in fp32: where ours and transformers' keys differ in the last
bit, one or its scale may be rounded to the next number."""


class Int8Cache(DynamicCache):
    """Holds keys and values as they are read from a cache in int8."""

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        key, value = (values.float() * scale.float() for values, scale in map(quantize_int8, (key_states, value_states)))
        read: tuple[Tensor, Tensor] = super().update(key, value, *rest, **options)
        return read


@dataclass
class Reference:
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    apart: float  # mean distance of the log probabilities from those over a cache in fp32


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=3, **CHECKPOINTS[family])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts, tokens, logprobs, distances = prompts_of_all_lengths(), [], [], list[Tensor]()
    for prompt in prompts:
        sequence = torch.tensor([prompt])
        for _ in range(NEW_TOKENS):
            sequence = torch.cat([sequence, scores(model, sequence, Int8Cache())[-1:].argmax(-1, keepdim=True)], dim=1)
        new, first = sequence[0, len(prompt) :], len(prompt) - 1
        read = scores(model, sequence, Int8Cache())[first:-1].gather(1, new[:, None])
        distances.append((read - scores(model, sequence, DynamicCache())[first:-1].gather(1, new[:, None])).abs())
        tokens.append(new.tolist())
        logprobs.append(read.squeeze(1).tolist())
    return Reference(folder, prompts, tokens, logprobs, float(torch.cat(distances).mean()))


@torch.inference_mode()
def scores(model: nn.Module, sequence: Tensor, cache: DynamicCache) -> Tensor:
    """Log probabilities [tokens, vocabulary] of a sequence [1, tokens]."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before transformers 5
    result: Tensor = model(sequence, **{name: cache}).logits[0].log_softmax(-1)
    return result


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=lambda n: str(n))
def test_tokens_equal_those_of_an_emulation(reference: Reference, tp: int, pp: int) -> None:
    params, longest = params_of(reference.tokens, logprobs=0), longest_request(reference.prompts)
    split, shape = Layout(tp=tp, pp=pp), ModelShape.from_folder(reference.folder)
    per_token = tuple(map(token_bytes, stage_caches(shape, kv_dtype("int8", "fp32"), "fp32", split)))
    blocks = -(-longest // BLOCK) * 3 // 2  # room for one request at its largest and a half
    with LLM(
        reference.folder, tensor_parallel_size=tp, pipeline_parallel_size=pp, device="cpu", kv_cache_dtype="int8",
        kv_block_size=BLOCK, max_num_tokens=STEP_TOKENS, max_batch_size=6, max_seq_len=longest,
        kv_cache_bytes=max(per_token) * BLOCK * blocks,
    ) as llm:  # fmt: skip
        assert llm.facts.num_blocks == blocks
        assert {rank.bytes["kv"] for rank in llm.facts.ranks} == {each * BLOCK * blocks for each in per_token}
        off: list[float] = []
        for again in ALL, SHARED:  # the second time, prompts hit blocks that the first left behind
            outputs = llm.generate(reference.prompts[again], params, use_tqdm=False)
            for output, tokens, logprobs in zip(outputs, reference.tokens[again], reference.logprobs[again], strict=True):
                assert output.outputs[0].token_ids == tokens
                off += [abs(each.logprob - expected) for each, expected in zip(output.outputs[0].logprobs, logprobs, strict=True)]
        assert sum(off) / len(off) < OFF * reference.apart
        stats = llm.stats()
    assert stats.preemptions > 0 or shape.windows[0] is not None  # with a window no request keeps many blocks
    assert stats.prefix_hits > 0
    assert stats.blocks_referenced == 0
