# SPDX-License-Identifier: Apache-2.0
"""What FP8 costs in quality: the demo model's next-token distributions in FP8 beside those in bf16, on the questions it was taught.

Each text is a question and its answer; every model reads the same tokens. Two sets of positions: those of the answers, of which the
model is sure, and those of the questions, of which it is not. Figures: how often the most likely token is the same (top-1), and the
Kullback-Leibler divergence KL(bf16 || other) in nats, its mean and its 99th percentile. fp32 shows how far bf16 itself is off.

Activations are quantized per token; "static" has one scale for each layer's input instead, from the largest value in these very
texts, which is the best that such scales can be here.

Runs on CPU too: there `fp8_gemm` quantizes activations and multiplies them as a GPU does, but sums in fp32.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from phalanx.comm.group import Solo
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.models import registry, weights
from phalanx.models.batch import Batch
from phalanx.models.cache import empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.layers.linear_methods.fp8 import Fp8
from phalanx.models.slices import LayerContext
from phalanx.serve.tokenizer import Tokenizer

BLOCK = 16
ROWS = 16  # texts of one forward

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "fp8 weights": {"quantization": ON_LOAD, "fp8_gemm": False},
    "fp8 weights and activations": {"quantization": ON_LOAD, "fp8_gemm": True},
    "fp8 weights and static activations": {"quantization": ON_LOAD, "fp8_gemm": True, "static": True},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 weights, activations and cache": {"quantization": ON_LOAD, "fp8_gemm": True, "kv_cache_dtype": "fp8"},
}


@dataclass(frozen=True)
class Text:
    """Token ids, and where the answer begins."""

    tokens: list[int]
    answer: int


@dataclass(frozen=True)
class Error:
    """Against the reference, over `positions`. KL in nats."""

    positions: int
    top1: float
    kl_mean: float
    kl_p99: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=0, help="at most so many; 0: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    errors = compare(texts(arguments.texts or None), torch.device(arguments.device))
    print(f"{'':38} {'answers: top-1':>15} {'mean KL':>10} {'p99 KL':>10} {'questions: top-1':>18} {'mean KL':>10} {'p99 KL':>10}")
    for name, by_part in errors.items():
        answers, questions = by_part["answers"], by_part["questions"]
        print(
            f"{name:38} {answers.top1:15.4f} {answers.kl_mean:10.6f} {answers.kl_p99:10.6f} {questions.top1:18.4f} "
            f"{questions.kl_mean:10.6f} {questions.kl_p99:10.6f}"
        )
    figures = {name: {part: asdict(error) for part, error in by_part.items()} for name, by_part in errors.items()}
    name = "fp8_error" if arguments.device == "cpu" else "fp8_error_gpu"
    path = harness.write(
        name, {"model": "demo", "reference": "bf16", "device": arguments.device, "against_bf16": figures}, arguments.out
    )
    print(f"written: {path.name}")
    return 0


def texts(most: int | None = None) -> list[Text]:
    """One for each answer that the demo model was taught."""
    from scripts.demo_model import corpus

    tokenizer = Tokenizer.load(locate("demo"))
    token_texts = []
    for questions, answer in corpus.entries()[:most]:
        prompt = tokenizer.encode_chat([{"role": "user", "content": questions[0]}])
        token_texts.append(Text(prompt + tokenizer.encode(answer, add_special_tokens=False), len(prompt)))
    return token_texts


def compare(read: list[Text], device: torch.device) -> dict[str, dict[str, Error]]:
    """Variant -> "answers" and "questions" -> its error against bf16."""
    exact = logits(read, device, dtype=torch.bfloat16)
    errors = {}
    for name, options in VARIANTS.items():
        other = logits(read, device, **{"dtype": torch.bfloat16, **options})
        # The token at a position is foretold one position before it.
        parts = {"answers": [slice(t.answer - 1, -1) for t in read], "questions": [slice(0, t.answer - 1) for t in read]}
        errors[name] = {
            part: error(_picked(exact, where), _picked(other, where)) for part, where in parts.items()
        }  # fmt: skip
    return errors


def _picked(by_text: list[Tensor], where: list[slice]) -> Tensor:
    return torch.cat([one[here] for one, here in zip(by_text, where, strict=True)])


def error(exact: Tensor, other: Tensor) -> Error:
    """exact, other: logits [positions, vocabulary]."""
    reference, logprobs = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    divergence = (reference.exp() * (reference - logprobs)).sum(-1)
    agrees = exact.argmax(-1) == other.argmax(-1)
    return Error(len(exact), float(agrees.double().mean()), float(divergence.mean()), float(divergence.quantile(0.99)))


@torch.inference_mode()
def logits(
    read: list[Text], device: torch.device, *, dtype: torch.dtype, static: bool = False, **options: Any
) -> list[Tensor]:  # fmt: skip
    """Of each text, [tokens, vocabulary] fp32, from a model built with these options."""
    model = loaded(device, dtype, **options)
    if static:
        for name, largest in largest_inputs(read, device, dtype).items():
            quantizer: Any = model.get_submodule(name).method.input_quantizer
            quantizer.scale = largest / torch.finfo(torch.float8_e4m3fn).max  # as its norm knows it, too
    return run(model, read, device, dtype)


def loaded(device: torch.device, dtype: torch.dtype, **options: Any) -> Decoder:
    folder = locate("demo")
    shape = ModelShape.from_folder(folder)
    model = registry.build(shape, range(shape.num_layers), LayerContext(Solo(), dtype, device, **options))
    weights.load(model, folder)
    return model


def largest_inputs(read: list[Text], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of each linear layer with weights in FP8, fp32 (), by its name."""
    model, largest_of = loaded(device, dtype, quantization=ON_LOAD, fp8_gemm=False), dict[str, Tensor]()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "method", None), Fp8):

            def note(_: Any, inputs: tuple[Any, ...], name: str = name) -> None:
                largest = inputs[0].float().abs().max()
                largest_of[name] = torch.maximum(largest_of[name], largest) if name in largest_of else largest

            module.register_forward_pre_hook(note)
    run(model, read, device, dtype)
    return largest_of


def run(model: Decoder, read: list[Text], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shape, logit_rows = model.shape, list[Tensor]()
    for at in range(0, len(read), ROWS):
        batch, blocks = prefill([text.tokens for text in read[at : at + ROWS]], device)
        batch.attention = select_backend(device, dtype, shape.head_dim).plan(batch)
        caches = empty_caches(model.declared_caches(), blocks, BLOCK, device)
        logit_rows += torch.split(model(batch, caches), [len(text.tokens) for text in read[at : at + ROWS]])
    return logit_rows


def prefill(rows: list[list[int]], device: torch.device) -> tuple[Batch, int]:
    """All tokens of all rows in one forward, and how many KV blocks it needs."""
    starts, positions, slots, tables, blocks = [0], [], [], [], 0
    for row in rows:
        needed = -(-len(row) // BLOCK)
        tables.append(list(range(blocks, blocks + needed)))
        slots += range(blocks * BLOCK, blocks * BLOCK + len(row))
        positions += range(len(row))
        starts.append(starts[-1] + len(row))
        blocks += needed
    width, lengths = max(map(len, tables)), [len(row) for row in rows]
    padded = [table + [0] * (width - len(table)) for table in tables]

    def sent(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = Batch(
        token_ids=sent([token for row in rows for token in row]), positions=sent(positions), kv_slots=sent(slots),
        query_starts=sent(starts, torch.int32), kv_lengths=sent(lengths, torch.int32),
        block_tables=sent(padded, torch.int32), block_tables_cpu=np.array(padded, dtype=np.int32),
        logit_rows=torch.arange(starts[-1], device=device), query_starts_cpu=starts, kv_lengths_cpu=lengths,
    )  # fmt: skip
    return batch, blocks


if __name__ == "__main__":
    sys.exit(main())
