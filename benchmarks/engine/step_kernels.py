# SPDX-License-Identifier: Apache-2.0
"""The kernels of long steps in a running engine, by time: what a step with prompts consists of on one rank.

Requests of equal length come at once, so that steps hold decode rows beside prompts, as in a throughput workload. Steps are
recorded by torch's profiler; times of kernels hold, but the host of a step that no graph replays takes longer while it records.
A kernel that was launched early waits for the one before it, and its time contains that; `alone_ms` is by how much it ended behind
all that began before it, so that these and the time without a kernel make up the step.

    python -m benchmarks.engine.step_kernels --model qwen3-30b-a3b --dtype fp8 --kv_cache_dtype fp8 --tp_size 2 --out DIR
    python -m benchmarks.engine.step_kernels --model mixtral-8x7b --dtype fp8 --requests 1,64 --input_len 128 --output_len 65
    python -m benchmarks.engine.step_kernels --traces qwen3-30b-a3b_tp2=FILE.json.gz --steps 4 --out DIR      traces that there are
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.engine.speculation import write_head
from benchmarks.engine.step_kernels_rank import VARIABLE
from phalanx import LLM, SamplingParams
from phalanx.bench import shapes
from phalanx.executor.launcher import HostRanks, LocalLauncher, LocalRank

SHOWN = 30
"""Kernels in the report, those that take most first."""


class RecordingLauncher(LocalLauncher):
    """Starts ranks that record: `step_kernels_rank`."""

    module = "benchmarks.engine.step_kernels_rank"

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, LocalRank]:
        # A rank does not look for modules in its working folder.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(harness.ROOT), os.environ.get("PYTHONPATH"))))
        return super().start(ranks, config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--name", default="step_kernels", help="of the file of figures")
    parser.add_argument("--traces", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--model", default="demo", help="demo, or a shape as `phalanx bench shape` names it")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--kv_cache_dtype", default="model")
    parser.add_argument("--tp_size", type=int, default=1)
    parser.add_argument("--expert_traffic", type=float, help="as of phalanx bench: 0 is uniform routing")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--max_num_tokens", type=int, default=8192)
    parser.add_argument(
        "--requests", type=numbers, default=[384],
        help="that come at once; several numbers, rising: one engine, the decode steps of each",
    )  # fmt: skip
    parser.add_argument("--input_len", type=int, default=1000)
    parser.add_argument("--output_len", type=int, default=100)
    parser.add_argument(
        "--tokens", type=int, help="of a step that is recorded, at least: 4,096, with several --requests each number"
    )
    parser.add_argument("--speculative_config", type=json.loads, metavar="JSON", help="as of phalanx serve; eagle3 needs no model")
    parser.add_argument("--first", type=int, default=24, help="the first of these steps that is recorded")
    parser.add_argument("--steps", type=int, default=4, help="how many are recorded")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for named in arguments.traces:
        name, _, path = named.partition("=")
        figures[name] = summary(read(Path(path)), arguments.steps)
    if not arguments.traces:
        name = f"{arguments.model} {arguments.dtype} tp{arguments.tp_size}"
        with tempfile.TemporaryDirectory() as folder:
            for requests, trace in zip(arguments.requests, record(arguments, Path(folder)), strict=True):
                several = f" {requests} requests" if len(arguments.requests) > 1 else ""
                figures[name + several] = summary(read(trace), arguments.steps)
    for name, figure in figures.items():
        print(f"{name}: kernels {figure['kernels_ms']} ms of {figure['step_ms']} ms a step")
        for row in figure["kernels"]:
            print(
                f"  {row['alone_ms']:9.3f} of {row['ms']:9.3f} ms {row['calls']:7.2f} x {row['alone_us']:7.1f} of "
                f"{row['median_us']:9.1f} us  {row['name']} {row['grid']}"
            )
        print(f"  {figure['idle_ms']:9.3f} ms without a kernel")
    harness.write(arguments.name, figures, arguments.out)
    return 0


def numbers(text: str) -> list[int]:
    """`1,64`. Raises ArgumentTypeError where they do not rise: the steps of more requests would count as those of fewer."""
    values = [int(part) for part in text.split(",")]
    if values != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text} does not rise")
    return values


def record(arguments: argparse.Namespace, folder: Path) -> list[Path]:
    """Run the requests, and return a trace of one rank for each number of them. Raises RuntimeError where too few steps were that
    long."""
    several = len(arguments.requests) > 1
    tokens = [arguments.tokens or (requests if several else 4096) for requests in arguments.requests]
    os.environ[VARIABLE] = json.dumps({"folder": str(folder), "tokens": tokens, "first": arguments.first, "count": arguments.steps})
    is_demo = arguments.model == "demo"
    model = arguments.model if is_demo else str(shapes.write(arguments.model, folder / "model"))
    with LLM(
        model, dtype=arguments.dtype, kv_cache_dtype=arguments.kv_cache_dtype, tensor_parallel_size=arguments.tp_size,
        device=arguments.device, load_format="auto" if is_demo else "dummy", skip_tokenizer_init=True,
        enable_prefix_caching=False, max_num_tokens=arguments.max_num_tokens, max_batch_size=512,
        expert_traffic=arguments.expert_traffic, speculative_config=speculative(arguments, folder),
        max_seq_len=arguments.input_len + arguments.output_len,
        launcher="benchmarks.engine.step_kernels:RecordingLauncher",
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arguments.output_len)
        for requests in arguments.requests:
            prompts = [[10 + (number + at) % 200 for at in range(arguments.input_len)] for number in range(requests)]
            llm.generate(prompts, params, use_tqdm=False)
    traces = [sorted(folder.glob(f"rank*.{number}.json.gz")) for number in range(len(tokens))]
    for least, of_ranks in zip(tokens, traces, strict=True):
        if not of_ranks:
            raise RuntimeError(f"fewer than {arguments.first + arguments.steps - 1} steps had {least} tokens")
    return [of_ranks[0] for of_ranks in traces]


def speculative(arguments: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """As named; eagle3 without a model has a head of the shape's layers."""
    config: dict[str, Any] | None = arguments.speculative_config
    if config is not None and config.get("method") == "eagle3" and "model" not in config:
        return {**config, "model": str(write_head(arguments.model, folder / "head"))}
    return config


def read(path: Path) -> list[dict[str, Any]]:
    """The kernels of a trace, or on a CPU the operators that no other one called, in the order of time."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        end = -1.0
        for event in sorted((each for each in events if each.get("cat") == "cpu_op"), key=lambda each: (each["ts"], -each["dur"])):
            if event["ts"] >= end:
                kernels.append(event)
                end = event["ts"] + event["dur"]
    return sorted(kernels, key=lambda event: float(event["ts"]))


def summary(kernels: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Of so many recorded steps: ms of a step from the first kernel's start to the last one's end, ms of all kernels, ms without
    one, and of each (name and grid) its ms and calls in a step and its median in us. alone: of that, what is behind the end of all
    kernels that began before it."""
    by_launch: dict[tuple[str, str], list[tuple[float, float]]] = {}
    begin = end = float(kernels[0]["ts"])
    idle = 0.0
    for kernel in kernels:
        grid = kernel.get("args", {}).get("grid", ())
        start, us = float(kernel["ts"]), float(kernel["dur"])
        idle += max(start - end, 0.0)
        alone = max(start + us - max(start, end), 0.0)
        end = max(end, start + us)
        by_launch.setdefault((kernel["name"][:80], "x".join(map(str, grid))), []).append((us, alone))
    rows = [
        {
            "name": name, "grid": grid, "ms": round(sum(us for us, _ in times) / steps / 1e3, 3),
            "alone_ms": round(sum(alone for _, alone in times) / steps / 1e3, 3), "calls": round(len(times) / steps, 2),
            "median_us": round(statistics.median(us for us, _ in times), 1),
            "alone_us": round(statistics.median(alone for _, alone in times), 1),
        }
        for (name, grid), times in by_launch.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: -row["alone_ms"])
    total = sum(float(kernel["dur"]) for kernel in kernels)
    return {
        "step_ms": round((end - begin) / steps / 1e3, 2), "kernels_ms": round(total / steps / 1e3, 2),
        "idle_ms": round(idle / steps / 1e3, 3), "kernels": rows[:SHOWN],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
