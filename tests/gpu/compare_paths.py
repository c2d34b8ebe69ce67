# SPDX-License-Identifier: Apache-2.0
"""Compare the fast path with the plain path on the same GPUs in the same dtype: graphs, overlap, fused kernels and fused
collectives must give the results of eager steps with NCCL, and both must give those of a reference.

Trained answers: the demo model is sure of each (the margins are reported), and both paths must give it token by token, for one,
three and many requests at a time. Forced positions: both paths continue with the same tokens, after short and long prompts, and
report the log probabilities of the most likely tokens at every position, those of the prompts included. The reference is fp32 on a
CPU with the same quantization; the yardstick is the distance of 16 bit on a CPU from it. A path fails

- when it is further from the reference than 1.25 times the yardstick, or than 1.1 times the plain path;
- when its most likely token differs where the reference's margin is more than twice the largest error of margins by rounding;
- when its log probabilities, fitted by their derivatives, say that the scale of one of the GEMMs is wrong by more than 1 percent;
- when it reports values that are not finite, or positions that the other path does not report;
- when no step of 2,048 tokens ran, no step from a graph of each kind, or, with several ranks, no ONESHOT or no RS_NORM_AG
  all-reduce.

"More" is by two standard errors, where there are any.

    python -m tests.gpu.compare_paths --out DIR        runs each layout that fits the GPUs
    python -m tests.gpu.compare_paths --device cpu --checkpoints demo --layouts 1x1,2x1 --small
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.engine.gpu_jobs import keeping, run_jobs, visible_gpus
from phalanx.hardware.probe import cores

AMOUNTS = {"short": 300, "long": 24, "cuts": 40, "answers": 120}
AMOUNTS_SMALL = {"short": 40, "long": 3, "cuts": 4, "answers": 12}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--checkpoints", default="demo,llama", help="demo, or families that tests/support/checkpoints.py writes")
    parser.add_argument("--dtypes", default="bf16,fp8+fp8", help="dtype, or dtype+KV dtype")
    parser.add_argument("--layouts", default="1x1,2x1,4x1,1x2,2x2", help="tp x pp; those that fit run")
    parser.add_argument("--tiny_layouts", default="1x1,2x2", help="of these, those for checkpoints other than the demo")
    parser.add_argument("--device", default="cuda", help="cpu: to try this script itself")
    parser.add_argument("--small", action="store_true", help="a tenth of the prompts")
    parser.add_argument("--texts", help=f"numbers of prompts, separated by commas: {', '.join(AMOUNTS)}")
    parser.add_argument("--beside", type=int, default=8, help="jobs that share a GPU; they take turns")
    parser.add_argument("--name", default="paths_on_gpu", help="name of the results file")
    parser.add_argument("--job", help="(internal) run one job, described as JSON")
    arguments = parser.parse_args()
    if arguments.job:
        print("RESULT " + json.dumps(run_job(json.loads(arguments.job))), flush=True)
        return 0
    begin = time.monotonic()
    gpus = visible_gpus() if arguments.device == "cuda" else list(range(4))
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(arguments, len(gpus), Path(folder))
        tell = keeping(arguments.name, arguments.out, len(jobs), lambda result: "\n".join(lines(result)))
        results = run_jobs(
            jobs, gpus, "tests.gpu.compare_paths", beside=arguments.beside if arguments.device == "cuda" else 1, tell=tell
        )
    print(f"{round(time.monotonic() - begin, 1)} s; written: {arguments.name}.json")
    return 1 if not results or any(result.get("error") or result["faults"] for result in results) else 0


def jobs_of(arguments: argparse.Namespace, gpus: int, folder: Path) -> list[dict[str, Any]]:
    texts = AMOUNTS_SMALL if arguments.small else AMOUNTS
    if arguments.texts:
        texts = dict(zip(AMOUNTS, map(int, arguments.texts.split(",")), strict=True))
    jobs = []
    for name in arguments.checkpoints.split(","):
        model = folder_of(name, folder)
        for dtype in arguments.dtypes.split(","):
            for layout in arguments.layouts.split(","):
                tp, pp = map(int, layout.split("x"))
                if tp * pp <= gpus and (name == "demo" or layout in arguments.tiny_layouts.split(",")):
                    job = {"checkpoint": name, "model": model, "dtype": dtype, "tp": tp, "pp": pp, "device": arguments.device}
                    jobs.append({**job, **texts})
    return [{**job, "threads": max(4, cores() // max(len(jobs), 1))} for job in jobs]


def folder_of(name: str, parent: Path) -> str:
    """The folder of a checkpoint: the demo, or a tiny one with random weights that is written there."""
    if name == "demo":
        return "demo"
    import torch

    from tests.support.checkpoints import write_checkpoint

    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 512}
    kind = {"std": 0.05, "max_position_embeddings": 1024, "dtype": torch.bfloat16}
    return str(write_checkpoint(parent / name, name, **sizes, **kind))


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tests.gpu.path_comparison import compare

    torch.set_num_threads(job["threads"])
    return compare(job)


def lines(result: dict[str, Any]) -> list[str]:
    """A summary of a job for people."""
    name = f"{result['checkpoint']:6} {result['dtype']:8} tp{result['tp']} pp{result['pp']}"
    if "error" in result:
        return [f"{name}: {result['error']}"]
    others, margins = result["answers_with_another_token"], result["answer_margins"]
    text = [
        f"{name}: {'FAILS' if result['faults'] else 'holds'}; {result['started_s']} + {result['ran_s'] - result['started_s']:.1f} s"
    ]
    if margins:
        text.append(
            f"    {result['answers']} answers, smallest margin {margins['0']}: {others['fast']} with another token "
            f"(plain: {others['plain']})"
        )
    for part, each in result["parts"].items():
        fast, plain, ratios = each["fast"], each["plain"], each["ratios"]
        scales = ", ".join(f"{gemm} {100 * off:+.2f}%" for gemm, (off, _) in fast["scales"].items())
        text.append(
            f"    {part:8} {fast['positions']:6} positions: {fast['distance']:.4f} nats from the truth, "
            f"{ratios['fast over plain'][0]:.3f} of plain, {ratios['fast over yardstick'][0]:.3f} of rounding; other argmax "
            f"tokens {fast['other']} (plain {plain['other']}), wrong {fast['wrong']}; scales {scales}"
        )
    text.append(f"    steps of at least {result['steps_tokens_at_least']} tokens; {result['allreduce']['fast']}")
    return text + [f"    FAULT {fault}" for fault in result["faults"]]


if __name__ == "__main__":
    sys.exit(main())
