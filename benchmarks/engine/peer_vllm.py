# SPDX-License-Identifier: Apache-2.0
"""vLLM by the method of `phalanx bench`: the same shapes with dummy weights, prompts, options and samples, so that its figures can
stand beside ours. It runs in an environment that has vLLM; nothing else here needs it.

    python -m benchmarks.engine.peer_vllm --model qwen3-30b-a3b --dtype fp8 --kv_cache_dtype fp8 --out DIR
    python -m benchmarks.engine.peer_vllm --model gpt-oss-120b --dtype mxfp4 -w decode-1 -w decode-64 --out DIR

Dummy weights differ: vLLM draws its own, and with them its router sends nearly all tokens to the same few experts, so that a step
reads a part of the weights. `--routing uniform` draws experts, as `--expert_traffic 0` does ours: by vLLM's own simulation, in
place of its router's choice, and with an expert twice at times. A workload that fails is in the report with its error, and the
others run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from phalanx.bench import latency, shapes, throughput, workloads
from phalanx.bench.workloads import Workload

WORKLOADS = ("decode-1", "decode-64", "batch-512x1000x1000")
METHOD: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 512, "max_num_batched_tokens": 8192, "max_model_len": 4096,
    "enable_prefix_caching": False, "dtype": "bfloat16", "seed": 0,
}  # fmt: skip
"""Those of `phalanx.bench.offline.METHOD` under vLLM's names."""
ROUTING = {"uniform": "uniform_random", "router": ""}
"""Name -> what vLLM's VLLM_MOE_ROUTING_SIMULATION_STRATEGY calls it."""
MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "mixtral", "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3", "GptOssForCausalLM": "gpt_oss",
}  # fmt: skip
"""What transformers, by which vLLM reads a configuration, asks for beside the architecture."""
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shape as `phalanx bench shape` names it")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp8", "mxfp4"))
    parser.add_argument("--kv_cache_dtype", default="auto")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--routing", default="uniform", choices=tuple(ROUTING), help="of tokens to experts")
    parser.add_argument("-w", "--workload", action="append", type=workloads.parse, help=f"{', '.join(WORKLOADS)} if none is named")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="a further argument of vllm.LLM")
    parser.add_argument("--name", default="peer_vllm", help="of the file of figures")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    options = parser.parse_args(arguments)
    chosen = options.workload or [workloads.parse(name) for name in WORKLOADS]
    os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = ROUTING[options.routing]
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # vLLM imports it unasked where it compiles for Hopper
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(options.model, options.dtype, Path(folder))
        engine_options = {**METHOD, **engine_arguments(options), "model": folder}
        begin = time.perf_counter()
        engine = Vllm(engine_options)
        figures: dict[str, Any] = {"engine": f"vllm {engine.version}", "arguments": {**engine_options, "model": options.model}}
        figures |= {
            "routing": options.routing,
            "start_s": round(time.perf_counter() - begin, 1),
            "kv_tokens": engine.kv_tokens,
            "results": [],
        }
        print(f"{options.model}: started in {figures['start_s']} s, {engine.kv_tokens} KV tokens", flush=True)
        for workload in chosen:
            row = measured(engine, workload, config["vocab_size"])
            figures["results"].append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "samples_s"}), flush=True)
            harness.write(options.name, figures, options.out)  # what there is stays, whatever comes next
    return int(any("error" in row for row in figures["results"]))


def write_config(model: str, dtype: str, folder: Path) -> dict[str, Any]:
    """The shape's config.json as vLLM takes it, in `folder`. Raises KeyError for an architecture without a line in MODEL_TYPES."""
    path = shapes.write(model, folder) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config.setdefault("model_type", MODEL_TYPES[config["architectures"][0]])
    if dtype == "mxfp4":
        config["quantization_config"] = MXFP4
    elif dtype == "fp8":
        config.pop("quantization_config", None)
    path.write_text(json.dumps(config), encoding="utf-8")
    return config


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    more = {"tensor_parallel_size": options.tp_size, "kv_cache_dtype": options.kv_cache_dtype}
    if options.dtype != "bf16":
        more["quantization"] = options.dtype
    for option in options.option:
        name, _, value = option.partition("=")
        more[name] = json.loads(value)
    return more


class Vllm:
    """vLLM's LLM behind the one call that a measurement needs."""

    def __init__(self, engine_options: dict[str, Any]) -> None:
        import vllm

        self.version, self._params = vllm.__version__, vllm.SamplingParams
        self._llm = vllm.LLM(**engine_options)
        cache = self._llm.llm_engine.vllm_config.cache_config
        self.kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size

    def seconds_of(self, prompts: Sequence[Sequence[int]], output_len: int) -> float:
        """As `phalanx.bench.offline.seconds_of`. Raises ValueError where the engine gave another number of tokens."""
        params = self._params(max_tokens=output_len, temperature=0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        for output in outputs:
            if len(output.outputs[0].token_ids) != output_len:
                raise ValueError(f"{len(output.outputs[0].token_ids)} new tokens instead of {output_len}")
        return seconds


def measured(engine: Vllm, workload: Workload, vocab_size: int) -> dict[str, Any]:
    """One workload as `phalanx.bench.latency` and `.throughput` measure it, or its error."""
    row: dict[str, Any] = {"workload": workload.name, "requests": workload.requests}
    ids = workloads.prompts(workload, vocab_size, METHOD["seed"])
    try:
        if workload.kind == "decode":
            return row | _decode(engine, workload, ids)
        return row | _batch(engine, workload, ids)
    except Exception as error:  # whatever fails in another engine: the next workload may run
        return row | {"error": repr(error)}


def _decode(engine: Vllm, workload: Workload, ids: list[list[int]]) -> dict[str, Any]:
    first, complete = latency.samples(workload, ids, engine.seconds_of)
    seconds = latency.seconds_per_token(complete, first, workload.output_len)
    samples = {"first_token": first, "all_tokens": complete}
    return {"tpot_ms": seconds * 1e3, "prefill_s": min(first), "samples_s": samples}


def _batch(engine: Vllm, workload: Workload, ids: list[list[int]]) -> dict[str, Any]:
    throughput.warm_up(workload, ids, METHOD["max_num_batched_tokens"], engine.seconds_of)
    times = [engine.seconds_of(ids, workload.output_len) for _ in range(workload.repeats)]
    return {"seconds": min(times), "output_tok_s": workload.requests * workload.output_len / min(times), "samples_s": times}


if __name__ == "__main__":
    sys.exit(main())
