# SPDX-License-Identifier: Apache-2.0
"""The fast path against the plain one on the same GPUs at the same dtype: graphs, fused kernels and fused collectives must give the
greedy tokens that eager steps with NCCL give, wherever the top two logits differ by more than the plain path's own noise.

That noise is twice the largest difference of any chosen token's log probability between two ways in which the plain path itself
computes it: decoded in a batch, and read back as prompts, one at a time. So the fast path has no say in its own bound.

A job (checkpoint, dtype, KV dtype, tp, pp) starts both engines, one after the other, on GPUs of its own; jobs run beside each
other.

    python benchmarks/engine/paths_on_gpu.py --out DIR --layouts 1x1,2x1 --dtypes bf16,fp8,fp8+fp8
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import record
from benchmarks.engine.tokens_on_gpu import run_jobs, visible_gpus

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 100, 40
BATCHES = (1, 3, PROMPTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--checkpoints", default="demo,llama", help="demo, or families that tests/checkpoints.py writes")
    parser.add_argument("--dtypes", default="bf16,fp8,fp8+fp8", help="dtype, or dtype+KV dtype")
    parser.add_argument("--layouts", default="1x1,2x1,4x1,1x2,2x2", help="tp x pp")
    parser.add_argument("--device", default="cuda", help="cpu: to try this script itself")
    parser.add_argument("--name", default="paths_on_gpu", help="of the results file")
    parser.add_argument("--job", help="(internal) run one job, described as JSON")
    asked = parser.parse_args()
    if asked.job:
        print("RESULT " + json.dumps(run_job(json.loads(asked.job))), flush=True)
        return 0
    gpus = visible_gpus() if asked.device == "cuda" else [0, 1]
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for name in asked.checkpoints.split(","):
            model = folder_of(name, Path(folder))
            for dtype in asked.dtypes.split(","):
                for layout in asked.layouts.split(","):
                    tp, pp = map(int, layout.split("x"))
                    if tp * pp <= len(gpus):
                        job = {"checkpoint": name, "model": model, "dtype": dtype, "tp": tp, "pp": pp}
                        jobs.append({**job, "strategy": "AUTO", "device": asked.device})
        results = run_jobs(sorted(jobs, key=lambda job: -job["tp"] * job["pp"]), gpus, Path(__file__))
    for found in results:
        outcome = found.get("error") or "{equal} of {requests} equal, {within_noise} within noise, {wrong} wrong".format(**found)
        print(f"{found['checkpoint']:8} {found['dtype']:8} tp{found['tp']} pp{found['pp']}: {outcome}")
    print("written:", record.write(asked.name, {"jobs": results}, asked.out))
    return 1 if not results or any(found.get("error") or found["wrong"] for found in results) else 0


def folder_of(name: str, parent: Path) -> str:
    if name == "demo":
        return "demo"
    from tests.checkpoints import write_checkpoint

    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "std": 0.05}
    return str(write_checkpoint(parent / name, name, **sizes))


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from phalanx import LLM, SamplingParams

    begin = time.monotonic()
    dtype, _, kv = job["dtype"].partition("+")
    options: dict[str, Any] = {
        "tensor_parallel_size": job["tp"], "pipeline_parallel_size": job["pp"], "dtype": dtype, "kv_cache_dtype": kv or "model",
        "device": job["device"], "kv_cache_bytes": 256 << 20, "max_num_tokens": 4096, "max_seq_len": 256, "max_batch_size": PROMPTS,
        "skip_tokenizer_init": True, "enable_prefix_caching": False,
    }  # fmt: skip
    prompts = torch.randint(3, 500, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(7)).tolist()
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
    with LLM(job["model"], cuda_graphs=False, allreduce_strategy="NCCL", **options) as llm:
        plain = [output.outputs[0] for output in llm.generate(prompts, greedy, use_tqdm=False)]
        noise = own_noise(llm, prompts, plain)
    wanted = [list(output.token_ids) for output in plain]
    margins = [[entry.top[0][1] - entry.top[1][1] for entry in output.logprobs] for output in plain]
    bare = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    equal = within = wrong = 0
    widest = 0.0
    with LLM(job["model"], **options) as llm:
        for size in BATCHES:
            for at in range(0, PROMPTS if size == PROMPTS else 2 * size, size):
                for row, output in enumerate(llm.generate(prompts[at : at + size], bare, use_tqdm=False), start=at):
                    tokens = list(output.outputs[0].token_ids)
                    parts = [step for step, (a, b) in enumerate(zip(tokens, wanted[row], strict=True)) if a != b]
                    margin = margins[row][parts[0]] if parts else 0.0
                    equal += not parts
                    within += bool(parts) and margin <= noise
                    wrong += margin > noise
                    widest = max(widest, margin)
        time.sleep(1.5)  # ranks report their all-reduces once a second
        facts = {
            "attention": llm.facts.ranks[0].attention, "allreduce": llm.stats().allreduce,
            "graphs": llm.facts.ranks[0].bytes.get("graphs", 0),
        }  # fmt: skip
    return {
        "requests": equal + within + wrong, "equal": equal, "within_noise": within, "wrong": wrong, "noise": noise,
        "widest_margin_at_a_parting": widest, **facts,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def own_noise(llm: Any, prompts: list[list[int]], plain: list[Any]) -> float:
    from phalanx import SamplingParams

    largest = 0.0
    reading = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, ignore_eos=True)
    for prompt, output in list(zip(prompts, plain, strict=True))[:8]:
        read = llm.generate([prompt + list(output.token_ids)], reading, use_tqdm=False)[0]
        for step, entry in enumerate(output.logprobs):
            again = read.prompt_logprobs[PROMPT_TOKENS + step]
            largest = max(largest, abs(entry.logprob - again.logprob))
    return 2 * largest


if __name__ == "__main__":
    sys.exit(main())
