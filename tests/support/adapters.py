# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as peft writes them, made by its format's specification; and the model into which one is merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PEFT = "base_model.model."
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model", "r": 4, "lora_alpha": 8,
    "lora_dropout": 0.05, "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "layers_to_transform": None,
}  # fmt: skip


def write_adapter(
    folder: Path, model: Path, *, modules: Sequence[str] = SEVEN, seed: int = 0, size: float = 0.4, **config: Any
) -> Path:
    """An adapter of every layer's modules with these ends, random, of the model in a folder. Returns its folder.

    config: fields of adapter_config.json. size: of the elements of B times A, so that the adapter changes what the model says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {**CONFIG, "target_modules": list(modules), **config}
    chance, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules and weight.dim() == 2:
            rank = rank_of(values, module)
            a, b = (torch.randn(shape, generator=chance) for shape in ((rank, weight.shape[1]), (weight.shape[0], rank)))
            tensors[f"{PEFT}{module}.lora_A.weight"] = a / weight.shape[1] ** 0.5
            tensors[f"{PEFT}{module}.lora_B.weight"] = b * size / scale_of(values, module) / rank**0.5
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def rank_of(config: Mapping[str, Any], module: str) -> int:
    return next((rank for key, rank in config["rank_pattern"].items() if re.match(rf"(.*\.)?({key})$", module)), config["r"])


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """The factor of B A, as peft computes it."""
    patterns = config["alpha_pattern"].items()
    alpha = next((alpha for key, alpha in patterns if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
    rank = rank_of(config, module)
    return alpha / rank**0.5 if config["use_rslora"] else alpha / rank


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with W + scale * B A in the place of each adapted W, in a folder of its own, which is returned."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PEFT).removesuffix(".lora_A.weight")
            b = factors[name.replace("lora_A", "lora_B")]
            weight = weights[f"{module}.weight"]
            weights[f"{module}.weight"] = (weight.double() + scale_of(config, module) * (b.double() @ a.double())).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
