# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with weights of 4-bit integers, each beside the plain one that it stands for: packed as the formats' specifications
say, value by value and without the reader's code.

    stored, meant = rewrite(plain, tmp_path, "packed 32")

`meant` holds the dequantized weights in fp32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantized_checkpoints import declare

IGNORED = "model.layers.1.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of eight that each nibble of a word has, from the lowest on."""

Encoded = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer by the ends of their names, and the weight that they mean in fp32."""


@dataclass(frozen=True)
class Form:
    """How a checkpoint stores a layer. group: -1 for all of a row. order: "none", "shuffled" (act order), "listed" (a list of
    neighbours)."""

    config: dict[str, Any]
    encode: Callable[[Form, Tensor, str], Encoded]
    group: int
    symmetric: bool = True
    order: str = "none"
    stored_zero: int = 0
    """What is added to a zero before it is stored."""
    bits: int = 4
    extra: dict[str, Any] = field(default_factory=dict)


def quantize(form: Form, weight: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """weight [out, in] -> codes 0..15, or 0..255, [out, in], scales fp16 [out, groups], zeros [out, groups], groups [in], what it
    means."""
    out, columns = weight.shape
    group = columns if form.group == -1 else form.group
    index = torch.arange(columns) // group
    if form.order == "shuffled":  # layers of one input have one order, as the Hessian of their input gives it
        seed = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 3, "up": 3, "down": 4}[name.split(".")[-1].removesuffix("_proj")]
        index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    count = int(index.max()) + 1
    codes, meant = torch.empty(out, columns, dtype=torch.int64), torch.empty(out, columns)
    scales, zeros = torch.empty(out, count), torch.full((out, count), 1 << form.bits - 1)
    most = (1 << form.bits) - 1
    for each in range(count):
        values = weight[:, index == each]
        if form.symmetric:
            scales[:, each] = values.abs().amax(-1) / (most / 2)
        else:
            low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
            scales[:, each] = (high - low) / most
            zeros[:, each] = torch.round(-low / scales[:, each]).clamp(1, most).to(torch.int64)
        scale, zero = scales[:, each].half().float().unsqueeze(-1), zeros[:, each].unsqueeze(-1)
        codes[:, index == each] = (torch.round(values / scale) + zero).clamp(0, most).to(torch.int64)
        meant[:, index == each] = (codes[:, index == each] - zero) * scale
    return codes, scales.half(), zeros, index, meant


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """values of 4 bits [rows, 8 n], or of 8 [rows, 4 n] -> int32 [rows, n]: part i of a word is value order[i] of it. Short rows
    end in zeros."""
    rows, columns = values.shape
    each = 32 // bits
    padded = torch.zeros(rows, -(-columns // each) * each, dtype=torch.int64)
    padded[:, :columns] = values
    total = torch.zeros(rows, padded.shape[1] // each, dtype=torch.int64)
    for part, column in enumerate(order[:each]):
        total += padded[:, column::each] << bits * part
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def packed(form: Form, weight: Tensor, name: str) -> Encoded:
    codes, scales, zeros, index, meant = quantize(form, weight, name)
    tensors = {"weight_packed": words(codes, bits=form.bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not form.symmetric:
        tensors["weight_zero_point"] = words(zeros.t(), bits=form.bits).t()
    if form.order == "shuffled":
        tensors["weight_g_idx"] = index.to(torch.int32)
    return tensors, meant


def awq(form: Form, weight: Tensor, name: str) -> Encoded:
    codes, scales, zeros, _, meant = quantize(form, weight, name)
    qweight, qzeros = words(codes.t(), AWQ_ORDER), words(zeros.t(), AWQ_ORDER)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t()}, meant


def gptq(form: Form, weight: Tensor, name: str) -> Encoded:
    codes, scales, zeros, index, meant = quantize(form, weight, name)
    tensors = {
        "qweight": words(codes, bits=form.bits).t(),
        "qzeros": words((zeros + form.stored_zero).t() & (1 << form.bits) - 1, bits=form.bits), "scales": scales.t(),
    }  # fmt: skip
    if form.order != "none":
        tensors["g_idx"] = index.to(torch.int32)
    return tensors, meant


def compressed(group: int, *, symmetric: bool = True, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "observer": "minmax", "block_structure": None}
    args |= {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": {**args, **weights}, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", IGNORED],
        "config_groups": {"group_0": scheme}, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


_AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["layers.1.mlp.down_proj"],
}  # fmt: skip
_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False, "damp_percent": 0.01,
    "dynamic": {rf"-:.*{IGNORED}": {}},
}  # fmt: skip

FORMS = {
    "packed 32": Form(compressed(32), packed, 32),
    "packed 64 with zeros": Form(compressed(64, symmetric=False), packed, 64, symmetric=False),
    "packed 128 static order": Form(compressed(128, actorder="static"), packed, 128),
    "packed channel": Form(compressed(-1), packed, -1),
    "packed channel with zeros": Form(compressed(-1, symmetric=False), packed, -1, symmetric=False),
    "packed act order": Form(compressed(32, actorder="group"), packed, 32, order="shuffled"),
    "awq": Form(_AWQ, awq, 64, symmetric=False),
    "gptq": Form(_GPTQ, gptq, 32, order="listed", stored_zero=-1),
    "gptq that stores 8 (T2)": Form(_GPTQ, gptq, 32),
    "gptq with zeros": Form({**_GPTQ, "sym": False}, gptq, 32, symmetric=False, order="listed", stored_zero=-1),
    "gptq_v2 with zeros (T1)": Form(
        {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, gptq, 32, symmetric=False, order="listed"
    ),
    "gptq desc_act (T3)": Form(
        {**_GPTQ, "sym": False, "desc_act": True}, gptq, 32, symmetric=False, order="shuffled", stored_zero=-1
    ),
    "packed 8 bit": Form(compressed(128, num_bits=8), packed, 128, bits=8),
    "packed 8 bit channel with zeros": Form(compressed(-1, symmetric=False, num_bits=8), packed, -1, symmetric=False, bits=8),
    "gptq 8 bit": Form({**_GPTQ, "bits": 8}, gptq, 32, order="listed", stored_zero=-1, bits=8),
    "gptq 8 bit desc_act": Form(
        {**_GPTQ, "bits": 8, "sym": False, "desc_act": True}, gptq, 32, symmetric=False, order="shuffled", stored_zero=-1, bits=8
    ),
    "gptq channel": Form({**_GPTQ, "group_size": -1, "desc_act": True}, gptq, -1, order="listed", stored_zero=-1),
}  # fmt: skip


def rewrite(plain: Path, folder: Path, form: Form) -> tuple[Path, Path]:
    """Write the checkpoint `plain` in a form, and the plain one that it stands for; returns both folders."""
    stored, meant = Path(shutil.copytree(plain, folder / "stored")), Path(shutil.copytree(plain, folder / "meant"))
    quantized, widened = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        widened[name] = tensor.float()
        if layer.endswith("_proj") and layer != IGNORED:
            tensors, widened[name] = form.encode(form, tensor.float(), layer)
            quantized |= {f"{layer}.{end}": each for end, each in tensors.items()}
        else:
            quantized[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in quantized.items()}, stored / "model.safetensors", {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in widened.items()}, meant / "model.safetensors", {"format": "pt"})
    declare(stored, form.config)
    return stored, meant
