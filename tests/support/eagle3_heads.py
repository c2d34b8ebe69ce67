# SPDX-License-Identifier: Apache-2.0
"""Tiny random EAGLE-3 heads in the published formats, and what they draft by plain torch, without a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, DRAFTED = 48, 80, 4, 2, 96
EPS = 1e-6


def write_head(
    folder: Path, form: str = "specforge", *, ids: Sequence[int] | None = (1, 2, 3), vocabulary: int = 384, hidden: int = HIDDEN,
    drafted: int = DRAFTED, embedding: bool = False, seed: int = 0, count: int = 3, **flags: Any,
) -> Path:  # fmt: skip
    """form: "specforge" (and SafeAILab's, whose ids are the default: None) or "speculators". count: of inner states."""
    layer: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1, "vocab_size": vocabulary, "max_position_embeddings": 64, "rms_norm_eps": EPS, "model_type": "llama",
        "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    config: dict[str, Any] = {"draft_vocab_size": drafted, **flags}
    if form == "speculators":
        config |= {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
        }  # fmt: skip
        config |= {} if ids is None else {"eagle_aux_hidden_state_layer_ids": list(ids)}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        config |= {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}}
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    def norm(size: int = hidden) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    of_head, first = hidden // HEADS, "layers.0" if form == "speculators" else "midlayer"
    attention = f"{first}.self_attn"
    targets = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
    tensors = {
        "fc.weight": weight(hidden, count * config.get("target_hidden_size", hidden)),
        f"{first}.hidden_norm.weight": norm(), f"{first}.input_layernorm.weight": norm(),
        f"{attention}.q_proj.weight": weight(HEADS * of_head, 2 * hidden),
        f"{attention}.k_proj.weight": weight(KV_HEADS * of_head, 2 * hidden),
        f"{attention}.v_proj.weight": weight(KV_HEADS * of_head, 2 * hidden), f"{attention}.o_proj.weight": weight(hidden, hidden),
        f"{first}.post_attention_layernorm.weight": norm(), f"{first}.mlp.gate_proj.weight": weight(INNER, hidden),
        f"{first}.mlp.up_proj.weight": weight(INNER, hidden), f"{first}.mlp.down_proj.weight": weight(hidden, INNER),
        "norm.weight": norm(), "lm_head.weight": weight(drafted, hidden), "d2t": targets - torch.arange(drafted),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, targets, True),
    }  # fmt: skip
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(count * hidden)
    if embedding:
        tensors["embed_tokens.weight"] = weight(vocabulary, hidden) * 3
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def reference_drafts(folder: Path, target: Path, tokens: Sequence[int], layers: Sequence[int], count: int) -> list[int]:
    """What the head drafts behind tokens. layers: before which it takes the target's states."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name.replace("midlayer", "layers.0"): value for name, value in load_file(folder / "model.safetensors").items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([list(tokens[:-1])]), output_hidden_states=True).hidden_states
        inner = torch.cat([states[layer][0] for layer in layers], -1)
        if config.get("norm_before_fc"):
            inner = _norm(inner, weights["input_norm.weight"])
        rows = list(inner @ weights["fc.weight"].T)
        table = weights.get("embed_tokens.weight", model.model.embed_tokens.weight)
        ids, drafts = list(tokens[1:]), list[int]()
        for _ in range(count):
            out = _layer(torch.stack(rows), table[torch.tensor(ids)], weights, config)[-1]
            normed = _norm(out, weights["norm.weight"])
            draft = int((weights["lm_head.weight"] @ normed).argmax())
            drafts.append(draft + int(weights["d2t"][draft]))
            ids.append(drafts[-1])
            rows.append(normed if config.get("norm_output") else out)
    return drafts


def _layer(states: Tensor, embedded: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    def of(name: str) -> Tensor:
        return weights[f"layers.0.{name}.weight"]

    normed = _norm(states, of("hidden_norm"))
    residual = normed if config.get("norm_before_residual") else states
    x = torch.cat([_norm(embedded, of("input_layernorm")), normed], -1)
    count, size = len(x), states.shape[1] // HEADS
    q, k, v = ((x @ of(f"self_attn.{part}_proj").T).view(count, -1, size).transpose(0, 1) for part in "qkv")
    angles = torch.outer(torch.arange(count).float(), 10000.0 ** -(torch.arange(0, size, 2).float() / size)).repeat(1, 2)
    q, k = (
        part * angles.cos() + torch.cat([-part[..., size // 2 :], part[..., : size // 2]], -1) * angles.sin() for part in (q, k)
    )
    attended = F.scaled_dot_product_attention(q, *(part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v)), is_causal=True)
    residual = residual + attended.transpose(0, 1).reshape(count, -1) @ of("self_attn.o_proj").T
    x = _norm(residual, of("post_attention_layernorm"))
    return residual + (F.silu(x @ of("mlp.gate_proj").T) * (x @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
