# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of transformers, and an engine that is to give the same with everything in the way that an engine does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from phalanx import LLM, SamplingParams
from phalanx.engine.messages import Stats
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import rewrite_by_128

Prompts = Sequence[Sequence[int]]
ALL, SHARED = slice(None), slice(-3, None)
"""Of the prompts: all of them, and those that begin with the same tokens."""
NEW_TOKENS, BLOCK, STEP_TOKENS = 12, 4, 16


def prompts_of_all_lengths() -> list[list[int]]:
    """Shorter and longer than a block and a step; the last three begin with the same tokens."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, 380, (28,), generator=generator).tolist()
    lengths = [1, 5, 17, 33, 46]
    own = [torch.randint(3, 380, (length,), generator=generator).tolist() for length in lengths]
    return [*own, shared + own[1], shared + own[2], shared]


def reference_tokens(folder: Path, prompts: Prompts, count: int, **options: Any) -> list[list[int]]:
    """Greedy continuations of `count` tokens, in fp32. options: of transformers' from_pretrained."""
    wrapped = "text_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).eval()
    return [continued(model, prompt, count)[0, len(prompt) :].tolist() for prompt in prompts]


References = dict[str, tuple[Path, list[list[int]]]]
"""Name -> (folder, greedy tokens of each of `prompts_of_all_lengths`)."""


def references_of(root: Path, checkpoints: Mapping[str, tuple[str, dict[str, Any]]], layers: int, *ignored: str) -> References:
    """checkpoints: name -> family and fields, see `write_checkpoint`. One whose name ends with "-fp8" is in FP8, in blocks of 128 x
    128, but for the `ignored` modules."""
    expected = {}
    for name, (family, overrides) in checkpoints.items():
        folder = plain = write_checkpoint(root / name, family, num_hidden_layers=layers, **overrides)
        if name.endswith("-fp8"):
            (root / f"{name}-rewritten").mkdir()
            folder, plain = rewrite_by_128(plain, root / f"{name}-rewritten", *ignored)
        expected[name] = folder, reference_tokens(plain, prompts_of_all_lengths(), NEW_TOKENS)
    return expected


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


def assert_tokens_twice(llm: LLM, prompts: Prompts, expected: Sequence[Sequence[int]], *, hits: bool = True) -> Stats:
    """The second time, prompts hit blocks that the first left behind (hits). Returns the engine's counters."""
    for again in ALL, SHARED:
        outputs = llm.generate([list(prompt) for prompt in prompts[again]], params_of(expected), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected[again]
    stats = llm.stats()
    assert stats.prefix_hits > 0 or not hits
    assert stats.blocks_referenced == 0
    return stats


def assert_layout_gives(
    expected: Sequence[Sequence[int]], folder: Path, layout: tuple[int, int, int], *, cache_bytes: int, hits: bool = True,
    **options: Any,
) -> Stats:  # fmt: skip
    """layout: (tp, moe_ep, pp) on CPU, in fp32. cache_bytes: so few that requests preempt each other. hits: of the prefix cache.
    options: more of the engine's."""
    tp, moe_ep, pp = layout
    prompts = prompts_of_all_lengths()
    with LLM(
        folder, tensor_parallel_size=tp, moe_expert_parallel_size=moe_ep, pipeline_parallel_size=pp, device="cpu", dtype="fp32",
        max_num_tokens=STEP_TOKENS, max_batch_size=6, max_seq_len=longest_request(prompts), kv_cache_bytes=cache_bytes,
        **({"kv_block_size": BLOCK} | options),
    ) as llm:  # fmt: skip
        stats = assert_tokens_twice(llm, prompts, expected, hits=hits)
    assert stats.preemptions > 0
    return stats


def longest_request(prompts: Prompts) -> int:
    """Tokens of the longest prompt and its continuation."""
    return max(map(len, prompts)) + NEW_TOKENS
