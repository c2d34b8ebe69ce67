# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of transformers, and an engine that is to give the same with everything in the way that an engine does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from phalanx import LLM, SamplingParams
from phalanx.engine.messages import Stats

Prompts = Sequence[Sequence[int]]


def reference_tokens(folder: Path, prompts: Prompts, count: int, **options: Any) -> list[list[int]]:
    """Greedy continuations of `count` tokens, in fp32. options: of transformers' from_pretrained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).eval()
    return [continued(model, prompt, count)[0, len(prompt) :].tolist() for prompt in prompts]


@torch.inference_mode()
def continued(model: nn.Module, prompt: Sequence[int], count: int) -> Tensor:
    """The prompt and its greedy continuation, [1, len(prompt) + count]."""
    sequence = torch.tensor([list(prompt)])
    for _ in range(count):
        sequence = torch.cat([sequence, model(sequence).logits[:, -1:].argmax(-1)], dim=1)
    return sequence


def params_of(expected: Sequence[Sequence[int]], **options: Any) -> SamplingParams:
    """Greedy, as many as the expected tokens, of which the stop token is none: requests that may stop early are admitted before
    there are blocks for all of them, and so they preempt each other."""
    never = next(token for token in range(3, 380) if not any(token in tokens for tokens in expected))
    return SamplingParams(temperature=0, max_tokens=len(expected[0]), ignore_eos=True, stop_token_ids=[never], **options)


def assert_tokens_twice(llm: LLM, prompts: Prompts, expected: Sequence[Sequence[int]]) -> Stats:
    """The second time, prompts hit blocks that the first left behind. Returns the engine's counters."""
    for _ in range(2):
        outputs = llm.generate([list(prompt) for prompt in prompts], params_of(expected), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    stats = llm.stats()
    assert stats.prefix_hits > 0
    assert stats.blocks_referenced == 0
    return stats
