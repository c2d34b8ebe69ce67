# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of DeepSeek, with the logits of transformers."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import write_checkpoint
from tests.support.models_logits import logits_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {"rms_norm_eps": 0.05}),
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v3": ("deepseek_v3", {}),
    "v3-stacked-one-group": ("deepseek_v3", {
        "stacked": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None, "rope_interleave": False,
        "first_k_dense_replace": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "glm-lite": ("glm4_moe_lite", {"n_group": 2, "topk_group": 1, "qk_nope_head_dim": 8, "v_head_dim": 16}),
    "glm-lite-stacked": ("glm4_moe_lite", {
        "stacked": True, "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False, "tie_word_embeddings": True,
    }),
    "v32": ("deepseek_v32", {}),
    "glm5": ("glm_moe_dsa", {}),
    "glm5-shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"], "index_topk": 5}),
    "mistral4": ("mistral4", {}),
    "mistral4-dense-first": ("mistral4", {"first_k_dense_replace": 1, "norm_topk_prob": False, "q_lora_rank": None}),
}  # fmt: skip


@functools.cache
def written(case: str, root: Path) -> tuple[Path, list[Tensor], list[Tensor]]:
    """(folder, token ids per sequence, transformers' logits per sequence)."""
    family, overrides = CASES[case]
    folder = write_checkpoint(root / case, family, num_hidden_layers=3, **overrides)
    return folder, *logits_of(folder)


MTP_LAYERS = 2


def with_module(parent: Path, family: str) -> tuple[Path, Path]:
    """A checkpoint with a module of multi-token prediction, and the one of transformers whose last layer is the module's."""
    qwen = family.startswith("qwen")
    traits: dict[str, Any] = {"num_hidden_layers": MTP_LAYERS + 1}
    if family == "glm_moe_dsa":
        traits["indexer_types"] = ["full", "shared", "full"]
    if qwen:
        traits["layer_types"] = ["linear_attention", "full_attention", "full_attention"]
    complete = write_checkpoint(parent / f"{family}_complete", family, **traits)
    folder = write_checkpoint(parent / family, family, **traits)
    config = json.loads((folder / "config.json").read_text())
    by_layer = {name: config[name][:-1] for name in ("layer_types", "indexer_types") if name in config}
    config |= {"num_hidden_layers": MTP_LAYERS, **by_layer}
    if not qwen:
        config["num_nextn_predict_layers"] = 1
    config.pop("mlp_layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    generator, prefix = torch.Generator().manual_seed(4), f"model.layers.{MTP_LAYERS}."
    before, *norms, joined = module_names(family)
    tensors = load_file(folder / "model.safetensors")
    if qwen:
        tensors = {name.replace(prefix, "mtp.layers.0."): value for name, value in tensors.items()}
    hidden = config["hidden_size"]
    for name in norms:
        tensors[f"{before}{name}.weight"] = torch.rand(hidden, generator=generator) + 0.5
    tensors[f"{before}{joined}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.3
    if not qwen:
        tensors[f"{before}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{before}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, complete


def module_names(family: str) -> tuple[str, ...]:
    """What stands before the module's names; its norms of the embedding, of the state and of the output; and what joins the first
    two."""
    if family.startswith("qwen"):
        return "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"
    return f"model.layers.{MTP_LAYERS}.", "enorm", "hnorm", "shared_head.norm", "eh_proj"
