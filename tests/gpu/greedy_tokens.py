# SPDX-License-Identifier: Apache-2.0
"""Check that GPUs give the tokens of a CPU in fp32 wherever the two largest logits differ by more than the dtype's noise.

Reference: transformers on CPU in fp32, greedy, one sequence per prompt, with the margin (top-1 minus top-2 log probability)
at each position. Noise of a dtype: twice the largest difference of any log probability between transformers on CPU in that
dtype and in fp32 over the same sequences, so the bound comes from the CPU alone and the GPU can fail it.

Each job (checkpoint, dtype, tp, pp) is one engine; jobs start at the same time, and take turns where they share GPUs. A job checks
two paths: forced (each reference sequence as a prompt with prompt logprobs: one comparison per position) and free (greedy
generation in one batch: up to the first difference, which must lie within the noise).

    python -m tests.gpu.greedy_tokens --out DIR        needs 4 GPUs for every layout; runs those that fit
    python -m tests.gpu.greedy_tokens --device cpu --checkpoints demo --dtypes bf16 --layouts 1x1,2x1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.engine.gpu_jobs import keeping, run_jobs, turn, visible_gpus

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
DTYPES = ["bf16", "fp16"]
DENSE_FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 24, 40
STEP_TOKENS = 192  # the sequences take three steps, which are long enough that rows have owners where ranks sum


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--checkpoints", default=",".join(["demo", *DENSE_FAMILIES]))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--everywhere", default="demo,llama", help="those that run in every layout; others: 1 x 1, 2 x 2")
    parser.add_argument("--layouts", default=",".join(f"{tp}x{pp}" for tp, pp in LAYOUTS), help="tp x pp")
    parser.add_argument("--strategies", default="AUTO", help="all-reduce strategies, each an engine of its own")
    parser.add_argument("--device", default="cuda", help="cpu: to try this script itself")
    parser.add_argument("--beside", type=int, default=8, help="jobs that share a GPU; they take turns")
    parser.add_argument("--name", default="tokens_on_gpu", help="name of the results file")
    parser.add_argument("--job", help="(internal) run one job, described as JSON")
    arguments = parser.parse_args()
    if arguments.job:
        print("RESULT " + json.dumps(run_job(json.loads(arguments.job))), flush=True)
        return 0
    begin = time.monotonic()
    gpus = visible_gpus() if arguments.device == "cuda" else list(range(4))
    layouts = [tuple(map(int, layout.split("x"))) for layout in arguments.layouts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        names = arguments.checkpoints.split(",")
        with ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn")) as pool:
            references = dict(zip(names, pool.map(make_reference, names, [Path(folder)] * len(names)), strict=True))
        jobs = [
            {
                "checkpoint": name, "reference": str(path), "dtype": dtype, "tp": tp, "pp": pp, "strategy": strategy,
                "device": arguments.device,
            }
            for name, path in references.items()
            for dtype in arguments.dtypes.split(",")
            for strategy in arguments.strategies.split(",")
            for tp, pp in layouts
            if tp * pp <= len(gpus) and (name in arguments.everywhere.split(",") or (tp, pp) in {(1, 1), (2, 2)})
        ]  # fmt: skip
        tell = keeping(arguments.name, arguments.out, len(jobs), line)
        results = run_jobs(
            jobs, gpus, "tests.gpu.greedy_tokens", beside=arguments.beside if arguments.device == "cuda" else 1, tell=tell
        )
    wrong = sum(bool(result.get("error")) or result["wrong"] > 0 for result in results)
    print(f"{round(time.monotonic() - begin, 1)} s; written: {arguments.name}.json")
    return 1 if wrong or not results else 0


def line(result: dict[str, Any]) -> str:
    """A summary of a job for people."""
    text = "{compared} compared, {within_noise} within noise, {wrong} wrong; {attention}; {allreduce}"
    name = f"{result['checkpoint']:8} {result['dtype']} tp{result['tp']} pp{result['pp']} {result['strategy']}"
    return f"{name}: {result.get('error') or text.format(**result)}"


def make_reference(name: str, folder: Path) -> Path:
    """Sequences, margins and noise of one checkpoint by transformers on CPU; returns the file's path."""
    import torch
    from transformers import AutoModelForCausalLM

    from phalanx.config.locate import locate

    if name == "demo":
        model_folder = locate("demo")
    else:
        from tests.support.checkpoints import write_checkpoint

        # Weights small enough that the dtype's noise stays well below most margins.
        model_folder = write_checkpoint(
            folder / name, name, hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128, std=0.05
        )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, min(vocab, 500), (PROMPTS, PROMPT_TOKENS), generator=generator)
    with torch.inference_mode():
        sequences = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=-1,
        )  # fmt: skip
        exact = model(sequences).logits.log_softmax(-1)
        noise = {}
        for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            rounded = AutoModelForCausalLM.from_pretrained(model_folder, dtype=kind).eval()
            noise[dtype] = 2 * (rounded(sequences).logits.float().log_softmax(-1) - exact).abs().max().item()
    top = exact.topk(2, -1)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps(
            {
                "folder": str(model_folder), "sequences": sequences.tolist(), "noise": noise, "best": top.indices[..., 0].tolist(),
                "margin": (top.values[..., 0] - top.values[..., 1]).tolist(),
            }
        )
    )  # fmt: skip
    return path


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from phalanx import LLM, SamplingParams

    reference = json.loads(Path(job["reference"]).read_text())
    noise = reference["noise"][job["dtype"]]
    sequences, best, margin = reference["sequences"], reference["best"], reference["margin"]
    begin = time.monotonic()
    with LLM(
        reference["folder"], tensor_parallel_size=job["tp"], pipeline_parallel_size=job["pp"], dtype=job["dtype"],
        device=job["device"], kv_cache_bytes=256 << 20, max_num_tokens=STEP_TOKENS, max_seq_len=256, max_batch_size=2 * PROMPTS,
        skip_tokenizer_init=True, allreduce_strategy=job["strategy"],
    ) as llm:  # fmt: skip
        started = time.monotonic() - begin
        with turn():
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
