# SPDX-License-Identifier: Apache-2.0
"""The same tokens on GPUs as on CPU in fp32, wherever the top two logits differ by more than the dtype's noise.

Reference: transformers on CPU in fp32, greedy, one sequence per prompt, with the margin (top-1 minus top-2 log probability)
at each position. Noise of a dtype: twice the largest difference of any log probability between transformers on CPU in that
dtype and in fp32 over the same sequences, so the bound comes from the CPU alone and the GPU can fail it.

Each job (checkpoint, dtype, tp, pp) is one engine on its own GPUs; jobs run beside each other while GPUs are free. A job
checks two paths: forced (each reference sequence as a prompt with prompt logprobs: one comparison per position) and free (greedy
generation in one batch: up to the first difference, which must lie within the noise).

    python benchmarks/engine/tokens_on_gpu.py --out DIR        needs 4 GPUs for every layout; runs those that fit
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import record

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
DTYPES = ["bf16", "fp16"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--checkpoints", default=",".join(["demo", *FAMILIES]))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--everywhere", default="demo,llama", help="those that run in every layout; others: 1 x 1, 2 x 2")
    parser.add_argument("--layouts", default=",".join(f"{tp}x{pp}" for tp, pp in LAYOUTS), help="tp x pp")
    parser.add_argument("--strategies", default="AUTO", help="all-reduce strategies, each an engine of its own")
    parser.add_argument("--name", default="tokens_on_gpu", help="of the results file")
    parser.add_argument("--job", help="(internal) run one job, described as JSON")
    asked = parser.parse_args()
    if asked.job:
        print("RESULT " + json.dumps(run_job(json.loads(asked.job))), flush=True)
        return 0
    gpus = visible_gpus()
    layouts = [tuple(map(int, layout.split("x"))) for layout in asked.layouts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {name: make_reference(name, Path(folder)) for name in asked.checkpoints.split(",")}
        jobs = [
            {"checkpoint": name, "reference": str(path), "dtype": dtype, "tp": tp, "pp": pp, "strategy": strategy}
            for name, path in checkpoints.items()
            for dtype in asked.dtypes.split(",")
            for strategy in asked.strategies.split(",")
            for tp, pp in layouts
            if tp * pp <= len(gpus) and (name in asked.everywhere.split(",") or (tp, pp) in {(1, 1), (2, 2)})
        ]
        results = run_jobs(sorted(jobs, key=lambda job: -job["tp"] * job["pp"]), gpus)
    for result in results:
        print(
            f"{result['checkpoint']:8} {result['dtype']} tp{result['tp']} pp{result['pp']} {result['strategy']}: "
            + (
                result.get("error")
                or "{compared} compared, {within_noise} within noise, {wrong} wrong; {attention}; {allreduce}".format(**result)
            )
        )
    wrong = sum(bool(result.get("error")) or result["wrong"] > 0 for result in results)
    print("written:", record.write(asked.name, {"jobs": results}, asked.out))
    return 1 if wrong or not results else 0


def make_reference(name: str, folder: Path) -> Path:
    """Sequences, margins and noise of one checkpoint by transformers on CPU; returns the file's path."""
    import torch
    from transformers import AutoModelForCausalLM

    from phalanx.config.locate import locate

    if name == "demo":
        model_folder = locate("demo")
    else:
        from tests.checkpoints import write_checkpoint

        # Weights small enough that the dtype's noise stays well below most margins.
        model_folder = write_checkpoint(
            folder / name, name, hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128, std=0.05
        )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, min(vocab, 500), (PROMPTS, PROMPT_TOKENS), generator=generator)
    with torch.inference_mode():
        whole = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=-1,
        )  # fmt: skip
        exact = model(whole).logits.log_softmax(-1)
        noise = {}
        for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            rounded = AutoModelForCausalLM.from_pretrained(model_folder, dtype=kind).eval()
            noise[dtype] = 2 * (rounded(whole).logits.float().log_softmax(-1) - exact).abs().max().item()
    top = exact.topk(2, -1)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps(
            {
                "folder": str(model_folder), "sequences": whole.tolist(), "noise": noise, "best": top.indices[..., 0].tolist(),
                "margin": (top.values[..., 0] - top.values[..., 1]).tolist(),
            }
        )
    )  # fmt: skip
    return path


def visible_gpus() -> list[int]:
    """The host's GPUs, or those that CUDA_VISIBLE_DEVICES names by number."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [int(number) for number in visible.split(",")]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return list(range(len(listed.splitlines())))


def run_jobs(jobs: list[dict[str, Any]], gpus: list[int], script: Path = Path(__file__)) -> list[dict[str, Any]]:
    """Run the jobs beside each other, each by `script --job` on GPUs of its own."""
    free = list(gpus)
    running: list[tuple[dict[str, Any], list[int], subprocess.Popen[str]]] = []
    results = []
    while jobs or running:
        for job in list(jobs):
            need = job["tp"] * job["pp"]
            if need <= len(free):
                mine, free[:] = free[:need], free[need:]
                jobs.remove(job)
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, mine))}
                command = [sys.executable, str(script), "--job", json.dumps(job)]
                running.append((job, mine, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)))
        for entry in list(running):
            job, mine, process = entry
            if process.poll() is not None:
                running.remove(entry)
                free.extend(mine)
                lines = [line for line in process.stdout.read().splitlines() if line.startswith("RESULT ")]
                described = {key: job[key] for key in ("checkpoint", "dtype", "tp", "pp", "strategy")}
                outcome = json.loads(lines[0][7:]) if lines else {"error": f"exit status {process.returncode}"}
                results.append({**described, **outcome})
        time.sleep(0.1)
    return results


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from phalanx import LLM, SamplingParams

    reference = json.loads(Path(job["reference"]).read_text())
    noise = reference["noise"][job["dtype"]]
    sequences, best, margin = reference["sequences"], reference["best"], reference["margin"]
    begin = time.monotonic()
    with LLM(
        reference["folder"], tensor_parallel_size=job["tp"], pipeline_parallel_size=job["pp"], dtype=job["dtype"], device="cuda",
        kv_cache_bytes=256 << 20, max_num_tokens=64, max_seq_len=256, skip_tokenizer_init=True,
        allreduce_strategy=job["strategy"],
    ) as llm:  # fmt: skip
        started = time.monotonic() - begin
        forced = llm.generate(
            sequences, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, ignore_eos=True), use_tqdm=False
        )
        prompts = [sequence[:PROMPT_TOKENS] for sequence in sequences]
        free = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True), use_tqdm=False)
        attention = sorted({rank.attention for rank in llm.facts.ranks})
        time.sleep(1.5)  # ranks report their all-reduces once a second
        allreduce = {"table": llm.facts.ranks[0].allreduce, "calls": llm.stats().allreduce}
    compared = within = wrong = 0
    for row, output in enumerate(forced):
        # prompt_logprobs[i] is about position i, which the logits at i - 1 predict.
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            compared += 1
            if margin[row][position] <= noise:
                within += 1
            elif entry.top[0][0] != best[row][position]:
                wrong += 1
    for row, output in enumerate(free):
        for step, token in enumerate(output.outputs[0].token_ids):
            position = PROMPT_TOKENS - 1 + step
            compared += 1
            if token != best[row][position]:
                wrong += margin[row][position] > noise
                within += margin[row][position] <= noise
                break
    return {
        "compared": compared, "within_noise": within, "wrong": wrong, "noise": noise, "attention": ", ".join(attention),
        "allreduce": allreduce,
        "start_s": round(started, 1), "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
