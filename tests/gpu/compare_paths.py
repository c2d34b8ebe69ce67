# SPDX-License-Identifier: Apache-2.0
"""The fast path against the plain one on the same GPUs at the same dtype: graphs, overlap, fused kernels and fused collectives must
give what eager steps with NCCL give, and both what the arithmetic means.

Taught answers: on each, the demo model is sure (the margins are reported), and both paths must give it token for token, asked one,
three and many at a time. Led positions: both paths are made to go on with the same tokens whatever they find likely, after short
prompts and long ones, and report the likeliest tokens' log probabilities at every position; so do the prompts' own positions. They
are held against fp32 on CPU with the same quantization, and their distance to that against the one that 16 bit on CPU has. A path
fails

- that is further from the truth than 1.25 times that, or than 1.1 times the plain path;
- whose likeliest token is another where the truth's margin is more than twice what rounding moved any margin;
- whose log probabilities, fitted by how they move with the scale of a kind of product, say that one is off by over a percent;
- or that reports what is no number, or positions that the other does not;
- or if no step of 2,048 tokens was among those that ran, none from a graph of each kind, or, where ranks sum, no one-shot
  all-reduce and none whose rows have owners.

"More" is by two standard errors, where there are some.

    python -m tests.gpu.compare_paths --out DIR        runs each layout that fits the GPUs
    python -m tests.gpu.compare_paths --device cpu --checkpoints demo --layouts 1x1,2x1 --small
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.engine.gpu_jobs import keeping, run_jobs, visible_gpus

ASKED = {"short": 300, "long": 24, "cuts": 40, "answers": 120}
ASKED_SMALL = {"short": 40, "long": 3, "cuts": 4, "answers": 12}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--checkpoints", default="demo,llama", help="demo, or families that tests/support/checkpoints.py writes")
    parser.add_argument("--dtypes", default="bf16,fp8+fp8", help="dtype, or dtype+KV dtype")
    parser.add_argument("--layouts", default="1x1,2x1,4x1,1x2,2x2", help="tp x pp; those that fit run")
    parser.add_argument("--tiny_layouts", default="1x1,2x2", help="of these, for checkpoints other than the demo")
    parser.add_argument("--device", default="cuda", help="cpu: to try this script itself")
    parser.add_argument("--small", action="store_true", help="a tenth of the texts")
    parser.add_argument("--texts", help=f"how many instead, by commas: {', '.join(ASKED)}")
    parser.add_argument("--beside", type=int, default=8, help="jobs that share a GPU; they run in turns")
    parser.add_argument("--name", default="paths_on_gpu", help="of the results file")
    parser.add_argument("--job", help="(internal) run one job, described as JSON")
    asked = parser.parse_args()
    if asked.job:
        print("RESULT " + json.dumps(run_job(json.loads(asked.job))), flush=True)
        return 0
    begin = time.monotonic()
    gpus = visible_gpus() if asked.device == "cuda" else list(range(4))
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(asked, len(gpus), Path(folder))
        tell = keeping(asked.name, asked.out, len(jobs), lambda found: "\n".join(lines(found)))
        results = run_jobs(jobs, gpus, "tests.gpu.compare_paths", beside=asked.beside if asked.device == "cuda" else 1, tell=tell)
    print(f"{round(time.monotonic() - begin, 1)} s; written: {asked.name}.json")
    return 1 if not results or any(found.get("error") or found["faults"] for found in results) else 0


def jobs_of(asked: argparse.Namespace, gpus: int, folder: Path) -> list[dict[str, Any]]:
    texts = ASKED_SMALL if asked.small else ASKED
    if asked.texts:
        texts = dict(zip(ASKED, map(int, asked.texts.split(",")), strict=True))
    found = []
    for name in asked.checkpoints.split(","):
        model = folder_of(name, folder)
        for dtype in asked.dtypes.split(","):
            for layout in asked.layouts.split(","):
                tp, pp = map(int, layout.split("x"))
                if tp * pp <= gpus and (name == "demo" or layout in asked.tiny_layouts.split(",")):
                    job = {"checkpoint": name, "model": model, "dtype": dtype, "tp": tp, "pp": pp, "device": asked.device}
                    found.append({**job, **texts})
    cores = os.cpu_count() or 1
    return [{**job, "threads": max(4, cores // max(len(found), 1))} for job in found]


def folder_of(name: str, parent: Path) -> str:
    """Where a checkpoint lies: the demo's own, or a tiny one of random weights, written there."""
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


def lines(found: dict[str, Any]) -> list[str]:
    """What a person wants to know of a job."""
    name = f"{found['checkpoint']:6} {found['dtype']:8} tp{found['tp']} pp{found['pp']}"
    if "error" in found:
        return [f"{name}: {found['error']}"]
    others, margins = found["answers_with_another_token"], found["answer_margins"]
    said = [
        f"{name}: {'FAILS' if found['faults'] else 'holds'}; {found['started_s']} + {found['ran_s'] - found['started_s']:.1f} s"
    ]
    if margins:
        said.append(
            f"    {found['answers']} answers, smallest margin {margins['0']}: {others['fast']} with another token "
            f"(plain: {others['plain']})"
        )
    for part, each in found["parts"].items():
        fast, plain, ratios = each["fast"], each["plain"], each["ratios"]
        scales = ", ".join(f"{product} {100 * off:+.2f}%" for product, (off, _) in fast["scales"].items())
        said.append(
            f"    {part:8} {fast['positions']:6} positions: {fast['distance']:.4f} nats from the truth, "
            f"{ratios['fast over plain'][0]:.3f} of plain, {ratios['fast over yardstick'][0]:.3f} of rounding; other likeliest "
            f"tokens {fast['other']} (plain {plain['other']}), wrong {fast['wrong']}; scales {scales}"
        )
    said.append(f"    steps of at least {found['steps_tokens_at_least']} tokens; {found['allreduce']['fast']}")
    return said + [f"    FAULT {fault}" for fault in found["faults"]]


if __name__ == "__main__":
    sys.exit(main())
