# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on GPUs: shapes of Llama, 8B in bf16 if nothing else is named, with dummy weights, through the whole engine.

1. plain: milliseconds per token without speculation, and with speculation that verifies nothing: what its bookkeeping costs.
2. depths: steps that verify k drafts, 0 to 7, at synthetic acceptance of so many tokens a row: milliseconds per step and per token.
3. adaptive: the engine chooses k, at synthetic rates of 0, 0.3, 0.5, 0.7 and 0.9: tokens per second beside none.
4. ngram: prompt lookup on output that repeats (two tokens, by a bias, whose sampling is slower) and on output as it comes.
5. eagle3: a random EAGLE-3 head of the shape's layers, k = 7: one request at synthetic rows of 3.3, 3.9 and 4.8 tokens; and as many
   requests as are named at a rate of 0.7 for each draft, with the depth that the engine chooses; beside none.
6. tokens: greedy tokens in fp32 with prompt lookup beside those without: how many requests differ, and from which token on.

    python -m benchmarks.engine.speculation --out DIR [--parts plain,depths,adaptive,ngram,tokens] [--requests 1,8,32]
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

from benchmarks import harness
from phalanx import LLM, SamplingParams
from phalanx.bench import shapes

PROMPT, TOKENS, REPEATS, VOCABULARY = 128, 256, 3, 32000
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--parts", default="plain,depths,adaptive,ngram,tokens")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--kv_cache_dtype", default="auto")
    parser.add_argument("--name", default="engine_speculation", help="of the file of figures")
    parser.add_argument("--depths", default="0,1,2,3,4,5,7")
    parser.add_argument("--length", type=float, default=2.0, help="tokens of a row in `depths`, on average, at most k + 1")
    args = parser.parse_args()
    requests, figures = [int(count) for count in args.requests.split(",")], dict[str, Any]()
    with tempfile.TemporaryDirectory() as parent:
        engine = {"dtype": args.dtype, "tensor_parallel_size": args.tp_size, "kv_cache_dtype": args.kv_cache_dtype}
        bench = Bench(shapes.write(args.shape, Path(parent) / "model"), requests, engine)
        for part in args.parts.split(","):
            match part:
                case "plain":
                    figures["plain"] = {"none": bench.run(None), "verifies nothing": bench.run(fixed(7, 0))}
                case "depths":
                    figures["depths"] = {
                        k: bench.run(synthetic(max(k, 1), k, min(args.length, k + 1))) for k in map(int, args.depths.split(","))
                    }
                case "adaptive":
                    figures["adaptive"] = {"none": bench.run(None, more=(64, 256))}
                    for rate in (0.0, 0.3, 0.5, 0.7, 0.9):
                        config = {**NGRAM, "num_speculative_tokens": 7, "rejection_sample_method": "synthetic"}
                        figures["adaptive"][rate] = bench.run({**config, "synthetic_acceptance_rates": [rate] * 7}, more=(64, 256))
                case "ngram":
                    bias = {7: 90.0, 9: 90.0}
                    figures["ngram"] = {
                        f"{text}, {name}": bench.run(config, bias=value)
                        for text, value in (("repeats", bias), ("as it comes", None))
                        for name, config in (("none", None), ("ngram", {**NGRAM, "num_speculative_tokens": 5}))
                    }
                case "eagle3":
                    head: dict[str, Any] = {"method": "eagle3", "model": str(write_head(args.shape, Path(parent) / "head"))}
                    figures["eagle3"] = {"none": bench.run(None, only=(1, *requests))}
                    head |= {"num_speculative_tokens": 7, "rejection_sample_method": "synthetic"}
                    always = {**head, "num_speculative_tokens_per_batch_size": [[1, 4096, 7]]}
                    for length in (3.3, 3.9, 4.8):
                        figures["eagle3"][length] = bench.run({**always, "synthetic_acceptance_length": length}, only=(1,))
                    chosen = {**head, "synthetic_acceptance_rates": [0.7] * 7}
                    figures["eagle3"]["rate 0.7"] = bench.run(chosen, only=requests)
                case "tokens":
                    figures["tokens"] = bench.differences()
    print(f"written: {harness.write(args.name, figures, args.out)}")
    return 0


def write_head(shape: str, folder: Path) -> Path:
    """The config.json of a head with layers like the model's, and the usual 32,000 tokens to draft: all that dummy weights need."""
    config = shapes.config_of(shape)
    assert config is not None
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
        "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
    )  # fmt: skip
    layer = {name: config[name] for name in names if name in config}
    folder.mkdir()
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, "num_hidden_layers": 1, **layer}
    (folder / "config.json").write_text(json.dumps(head), encoding="utf-8")
    return folder


def fixed(most: int, k: int) -> dict[str, Any]:
    """Always k drafts."""
    return {**NGRAM, "num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": [[1, 4096, k]]}


def synthetic(most: int, k: int, length: float) -> dict[str, Any]:
    return {**fixed(most, k), "rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


class Bench:
    def __init__(self, folder: Path, requests: Sequence[int], engine: dict[str, Any]) -> None:
        self._folder, self._requests, self._engine = folder, requests, engine

    def llm(self, config: dict[str, Any] | None, **options: Any) -> LLM:
        return LLM(
            str(self._folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            max_batch_size=256, max_num_tokens=8192, max_seq_len=4096, speculative_config=config, **{**self._engine, **options},
        )  # fmt: skip

    def run(
        self, config: dict[str, Any] | None, *, bias: dict[int, float] | None = None, more: Sequence[int] = (),
        only: Sequence[int] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Of each number of requests: milliseconds per step and per token of a request, tokens per second, accepted drafts."""
        results = {}
        begin = time.monotonic()
        with self.llm(config) as llm:
            start = time.monotonic() - begin
            for count in only or (*self._requests, *more):
                generate(llm, count, 32, bias)
                runs = []
                for _ in range(REPEATS):
                    before, began = llm.stats(), time.perf_counter()
                    generate(llm, count, 1, bias)
                    first, between = time.perf_counter() - began, llm.stats()
                    began = time.perf_counter()
                    generate(llm, count, TOKENS, bias)
                    seconds, after = time.perf_counter() - began - first, llm.stats()
                    steps = after.steps - between.steps - (between.steps - before.steps)
                    accepted = sum(after.accepted_tokens) - sum(between.accepted_tokens)
                    runs.append({
                        "ms_per_step": 1e3 * seconds / steps, "ms_per_token": 1e3 * seconds / (TOKENS - 1),
                        "tokens_per_s": count * (TOKENS - 1) / seconds, "accepted": accepted, "steps": steps,
                    })  # fmt: skip
                results[count] = {name: round(statistics.median(each[name] for each in runs), 4) for name in runs[0]}
                print(config, count, results[count], flush=True)
        return {"start_seconds": round(start, 1), **results}

    def differences(self) -> dict[str, Any]:
        """Of requests one after the other, so that without drafts a step has one row."""
        outputs = {}
        for name, config in (("none", None), ("ngram", fixed(4, 4))):
            with self.llm(config, dtype="fp32") as llm:
                outputs[name] = [generate(llm, 1, 200, None, seed)[0] for seed in range(8)]
                stats = llm.stats()
        firsts = [
            next((place for place, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), None)
            for pair in zip(*outputs.values(), strict=True)
        ]
        print("first differing tokens:", firsts, flush=True)
        return {"first_difference": firsts, "drafts": stats.draft_tokens, "accepted": stats.accepted_tokens}


def generate(llm: LLM, count: int, tokens: int, bias: dict[int, float] | None, seed: int = 0) -> list[list[int]]:
    prompts = [[3 + (17 * i + 31 * j + 101 * seed) % (VOCABULARY - 3) for j in range(PROMPT)] for i in range(count)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, logit_bias=bias, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


if __name__ == "__main__":
    sys.exit(main())
