# SPDX-License-Identifier: Apache-2.0
"""A gpt-oss checkpoint in MXFP4, as released ones are on disk, beside the one that its values mean, in fp32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}


def rewrite(plain: Path, root: Path) -> tuple[Path, Path]:
    """(the stored checkpoint, the meant one): the experts' weights of `plain` are replaced by random blocks, with scales that
    differ from block to block. transformers' own conversion says what they mean."""
    stored, meant = root / "stored", root / "meant"
    for folder in (stored, meant):
        shutil.copytree(plain, folder)
    config = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    weights = load_file(plain / "model.safetensors")
    packed = dict(weights)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        count, inputs, out = weights[name].shape
        blocks = torch.randint(0, 256, (count, out, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 127, (count, out, inputs // 32), generator=generator, dtype=torch.uint8)
        del packed[name]
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert weights[name].shape == (count, inputs, out)
    save_file(packed, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, meant / "model.safetensors", metadata={"format": "pt"})
    return stored, meant
