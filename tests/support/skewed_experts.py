# SPDX-License-Identifier: Apache-2.0
"""A small Mixtral whose router prefers two experts that one rank has, and what transformers says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import write_checkpoint
from tests.support.greedy_tokens import continued

EXPERTS, TOP_K, LAYERS = 8, 2, 3


@dataclass(frozen=True)
class Skewed:
    """tokens: greedy continuations of the prompts. counts [layers][experts]: pairs of a token and one of its experts, in all
    positions but the last of each sequence."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    counts: list[list[int]]


def write(folder: Path, *, new_tokens: int, prompts: int = 6) -> Skewed:
    write_checkpoint(
        folder, "mixtral", num_hidden_layers=LAYERS, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, intermediate_size=64
    )
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(".gate.weight")]:
        weights[name][0] *= 6.0
        weights[name][1] = -weights[name][0]  # one of the two is always among a token's experts
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 380, (9 + 4 * number,), generator=generator).tolist() for number in range(prompts)]
    counts, tokens = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64), []
    with torch.inference_mode():
        for prompt in ids:
            sequence = continued(model, prompt, new_tokens)
            tokens.append(sequence[0, len(prompt) :].tolist())
            for layer, logits in enumerate(model(sequence[:, :-1], output_router_logits=True).router_logits):
                counts[layer] += torch.bincount(logits.topk(TOP_K).indices.flatten(), minlength=EXPERTS)
    return Skewed(folder, ids, tokens, counts.tolist())
