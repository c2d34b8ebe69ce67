# SPDX-License-Identifier: Apache-2.0
"""What weights in 4 bits and in int8 cost in quality, and whether that is what the format costs: a trained model's next-token
distributions from quantized checkpoints beside those of its 16-bit weights, twice. Once by this engine, which reads the packed
files; once by transformers in fp32, with the weights as compressed-tensors decompresses them, or, where the scheme quantizes
activations too, with the format's formula: y = (x_q W_q^T) s_x s_w, the sums of integers exact. Both columns must be equal to 1e-4
nats. (With weights and activations dequantized before an fp32 product, a value on the other side of a half in one layer moves many
in the next ones, so that the noise of rounding is another.)

Weights are rounded to nearest and packed by compressed-tensors. Every model reads the same tokens, pages of this repository's
documentation. Figures over all positions: the mean Kullback-Leibler divergence KL(16 bit || quantized) in nats, and how often the
most likely token is the same (top-1).

--gguf: the checkpoint as GGUF, see `kv_cache_error`; or --model: a folder as the engine reads it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import harness
from benchmarks.models.kv_cache_error import arguments_of, divergence, from_gguf, loaded, logits, rows_of

TOLERANCE = 1e-4
"""Nats between the two columns."""
_INTEGER = {"type": "int", "dynamic": False}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4, groups of 64": (
        "pack-quantized", {**_INTEGER, "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": True}, None
    ),
    "int4, groups of 32, zeros": (
        "pack-quantized", {**_INTEGER, "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None
    ),
    "int8, activations in int8": (
        "int-quantized", {**_INTEGER, "num_bits": 8, "strategy": "channel", "symmetric": True},
        {"type": "int", "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True},
    ),
}  # fmt: skip
"""Name -> format, weights and input_activations of a scheme of compressed-tensors."""


def main() -> int:
    arguments = arguments_of(__doc__, 512)
    with tempfile.TemporaryDirectory() as scratch:
        plain = arguments.model or from_gguf(arguments.gguf, Path(scratch, "plain"))
        rows = rows_of(plain, arguments.row)
        figures = compare(plain, rows, Path(scratch), torch.device(arguments.device))
    print(f"{'':28} {'engine: KL':>12} {'top-1':>8} {'reference: KL':>14} {'top-1':>8} {'apart':>10}")
    for name, one in figures.items():
        engine, reference = one["engine"], one["reference"]
        print(
            f"{name:28} {engine['kl_mean']:12.6f} {engine['top1']:8.4f} {reference['kl_mean']:14.6f} {reference['top1']:8.4f} "
            f"{one['apart']:10.2e}"
        )
    facts = {
        "model": (arguments.gguf or arguments.model).name, "device": arguments.device, "rows": [len(row) for row in rows],
        "tolerance": TOLERANCE, "against_16_bit": figures,
    }  # fmt: skip
    print(f"written: {harness.write('quantized_error', facts, arguments.out).name}")
    return 0 if all(one["apart"] <= TOLERANCE for one in figures.values()) else 1


def compare(plain: Path, rows: list[list[int]], scratch: Path, device: torch.device) -> dict[str, dict[str, Any]]:
    """Form -> its figures by the engine and by the reference, and how far apart their divergences are."""
    exact = {"engine": by_engine(plain, rows, device), "reference": by_reference(plain, rows)}
    figures: dict[str, dict[str, Any]] = {}
    for name, (form, weights, inputs) in FORMS.items():
        stored, meant = Path(scratch, "stored"), Path(scratch, "meant")
        rewrite(plain, stored, meant, form, weights, inputs)
        read = {"engine": by_engine(stored, rows, device), "reference": by_reference(meant, rows, stored if inputs else None)}
        one: dict[str, Any] = {who: _error(exact[who], read[who]) for who in read}
        figures[name] = {**one, "apart": abs(one["engine"]["kl_mean"] - one["reference"]["kl_mean"])}
        for folder in (stored, meant):
            shutil.rmtree(folder)
    return figures


def _error(exact: list[Tensor], other: list[Tensor]) -> dict[str, float]:
    apart = torch.cat([divergence(*pair) for pair in zip(exact, other, strict=True)])
    agrees = torch.cat([one.argmax(-1) == two.argmax(-1) for one, two in zip(exact, other, strict=True)])
    return {"positions": len(apart), "kl_mean": float(apart.mean()), "top1": float(agrees.double().mean())}


def rewrite(plain: Path, stored: Path, meant: Path, form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> None:
    """Write the checkpoint as compressed-tensors packs it, and one in fp32 with what that decompresses to."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    packed, widened = {}, {}
    for name, values in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            packed[name], widened[name] = values, values.float()
            continue
        tensors = {"weight": values.float(), **_scales(values.float(), weights)}
        compressed = compressor.compress(dict(tensors), scheme)
        packed |= {f"{layer}.{end}": each.contiguous() for end, each in compressed.items()}
        widened[name] = compressor.decompress(dict(compressed), scheme)["weight"].float().contiguous()
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    declared = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }  # fmt: skip
    for folder, contents, more in ((stored, packed, {"quantization_config": declared}), (meant, widened, {})):
        shutil.copytree(plain, folder)
        save_file(contents, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")


def _scales(values: Tensor, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Of the range of each group or row, rounded to nearest."""
    groups = values.unflatten(1, (-1, weights["group_size"])) if weights["strategy"] == "group" else values.unsqueeze(1)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    levels = 2 ** weights["num_bits"]
    if weights["symmetric"]:
        return {"weight_scale": torch.maximum(-low, high) * 2 / (levels - 1)}
    scale = (high - low) / (levels - 1)
    zero = (-levels // 2 - torch.round(low / scale)).clamp(-levels // 2, levels // 2 - 1)
    return {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}


@torch.inference_mode()
def by_engine(folder: Path, rows: list[list[int]], device: torch.device) -> list[Tensor]:
    """The logits of each row."""
    model = loaded(folder, device)
    return [logits(model, row, "fp32").cpu() for row in rows]


@torch.inference_mode()
def by_reference(folder: Path, rows: list[list[int]], in_int8: Path | None = None) -> list[Tensor]:
    """The same by transformers on the CPU. in_int8: the checkpoint of which layers multiply integers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    if in_int8 is not None:
        tensors = load_file(in_int8 / "model.safetensors")
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.forward = partial(_of_integers, tensors[f"{name}.weight"].double(), tensors[f"{name}.weight_scale"].float())
    return [model(torch.tensor([row])).logits[0] for row in rows]


def _of_integers(weight: Tensor, weight_scale: Tensor, x: Tensor) -> Tensor:
    """x [..., in], each token's largest magnitude 127 steps, times weight [out, in] with a scale [out, 1] for each row."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    sums = torch.round(x / scale).double() @ weight.t()
    return sums.float() * (scale * weight_scale.reshape(-1))


if __name__ == "__main__":
    sys.exit(main())
