# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on one GPU: Llama-3-8B shapes in bf16 with dummy weights, through the whole engine, with random adapters of all
seven modules.

1. without: an engine without adapters.
2. none: an engine with room for eight, and no request that has one.
3. one: each request has the first adapter. 4. eight: the requests have eight in turn.

Milliseconds per token of 1, 8 and 64 requests, seconds to the first token of a prompt of 2,048, and from the first request for an
adapter that is in host memory to its first token, beside that of a request without one.

    python -m benchmarks.engine.adapters --out DIR [--rank 16] [--shape llama-3-8b]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import harness
from phalanx import LLM, SamplingParams
from phalanx.bench import shapes
from phalanx.config.model import ModelShape

ADAPTERS, PROMPT, LONG_PROMPT, TOKENS, REPEATS, VOCABULARY = 8, 128, 2048, 128, 3, 32000
REQUESTS = (1, 8, 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--shape", default="llama-3-8b")
    args = parser.parse_args()
    figures: dict[str, Any] = {"rank": args.rank}
    with tempfile.TemporaryDirectory() as parent:
        model = shapes.write(args.shape, Path(parent) / "model")
        folders = [write_adapter(Path(parent) / str(number), model, args.rank, number) for number in range(ADAPTERS)]
        with engine(model, 0, args.rank) as llm:
            figures["without"] = measured(llm, [None])
        with engine(model, ADAPTERS, args.rank) as llm:
            begin = time.perf_counter()
            for number, folder in enumerate(folders):
                llm.load_adapter(str(number), folder)
            figures["load_seconds"] = round((time.perf_counter() - begin) / ADAPTERS, 4)
            figures["first_token_ms"], figures["first_token_without_ms"] = first_tokens(llm)
            figures["none"] = measured(llm, [None])
            figures["one"] = measured(llm, ["0"])
            figures["eight"] = measured(llm, [str(number) for number in range(ADAPTERS)])
    for name in ("none", "one", "eight"):
        ratios = {key: round(value / figures["without"][key], 3) for key, value in figures[name].items()}
        print(f"{name}: {ratios} of without", flush=True)
    print(f"written: {harness.write('engine_adapters', figures, args.out)}")
    return 0


def engine(model: Path, slots: int, rank: int) -> LLM:
    return LLM(
        str(model), dtype="bf16", load_format="dummy", skip_tokenizer_init=True, kv_cache_dtype="fp8", enable_prefix_caching=False,
        max_batch_size=64, max_num_tokens=4096, max_seq_len=4096, max_loras=slots, max_lora_rank=rank,
    )  # fmt: skip


def measured(llm: LLM, names: Sequence[str | None]) -> dict[str, float]:
    """Medians. names: of the requests' adapters, in turn."""
    result = {}
    for count in REQUESTS:
        generate(llm, count, 16, names)
        runs = []
        for _ in range(REPEATS):
            first = generate(llm, count, 1, names)
            runs.append(1e3 * (generate(llm, count, TOKENS, names) - first) / (TOKENS - 1))
        result[f"{count} requests, ms per token"] = round(statistics.median(runs), 4)
    generate(llm, 1, 1, names, LONG_PROMPT)
    prompts = [generate(llm, 1, 1, names, LONG_PROMPT) for _ in range(2 * REPEATS)]
    result["prompt of 2048, s"] = round(statistics.median(prompts), 5)
    print(names, result, flush=True)
    return result


def first_tokens(llm: LLM) -> tuple[list[float], float]:
    """Milliseconds: of each adapter's first request, with its way into a slot; and the median of requests without an adapter."""
    without = [generate(llm, 1, 1, [None]) for _ in range(1 + ADAPTERS)][1:]
    adapted = [round(1e3 * generate(llm, 1, 1, [str(number)]), 2) for number in range(ADAPTERS)]
    return adapted, round(1e3 * statistics.median(without), 2)


def generate(llm: LLM, count: int, tokens: int, names: Sequence[str | None], length: int = PROMPT) -> float:
    """Seconds."""
    prompts = [[3 + (17 * i + 31 * j) % (VOCABULARY - 3) for j in range(length)] for i in range(count)]
    params = [
        SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False, adapter=names[number % len(names)]
        ) for number in range(count)
    ]  # fmt: skip
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """A random one in bf16, as peft writes it."""
    shape, chance, tensors = ModelShape.from_folder(model), torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    hidden, query, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner = shape.intermediate_size
    modules = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(shape.num_layers):
        for module, (outputs, inputs) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (torch.randn(rank, inputs, generator=chance) / inputs**0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = (0.1 * torch.randn(outputs, rank, generator=chance)).bfloat16()
    folder.mkdir()
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


if __name__ == "__main__":
    sys.exit(main())
