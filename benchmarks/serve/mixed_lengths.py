# SPDX-License-Identifier: Apache-2.0
"""Short prompts beside long ones: the time to the first token of each kind, over HTTP and in the simulator.

    python -m benchmarks.serve.mixed_lengths --tree before=FOLDER --tree after=FOLDER --rounds 3 --record
    python -m benchmarks.serve.mixed_lengths --mooncake conversation_trace.jsonl --record

With --tree a server of the demo runs on this CPU from the sources in FOLDER/src, all trees in turn in each round: short prompts as
a Poisson process, and a long one every few seconds. With --mooncake the simulator serves the first requests of Mooncake's public
trace (FAST 2025), slowed down to what one replica of 70B on four H200 takes, by the present scheduler and by the older one that
gave a long prompt all of its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.planner import history, served
from benchmarks.serve import started
from phalanx.bench.streaming_client import ApiEndpoint
from phalanx.engine.scheduler import SchedulerOptions
from phalanx.layout import Layout
from phalanx.planner import arrivals, simulate, subject
from phalanx.planner.arrivals import Arrival
from phalanx.planner.cost import Costs

STEP_TOKENS, SEQ_LEN = 256, 2048
"""Of the demo's server: steps are short on a CPU, so that a long prompt takes as many of them as 60,000 tokens take on a GPU."""
SHORT, LONG, OUTPUT = 32, 1900, 16
"""Tokens of the demo's prompts and outputs."""
RATE, EVERY, SECONDS = 6.0, 1.0, 40.0
"""Short prompts a second, seconds between long ones, seconds in all."""
KINDS = {"short": (0, 2048), "middle": (2048, 16384), "long": (16384, 1 << 30)}
"""Of Mooncake's prompts, by tokens: more than the first number, up to the second."""


def mixed(seed: int = 0) -> list[Arrival]:
    """The demo's requests."""
    draw, at = random.Random(seed), 0.0
    short: list[Arrival] = []
    while (at := at + draw.expovariate(RATE)) < SECONDS:
        short.append(Arrival(at, SHORT, OUTPUT))
    long = [Arrival(EVERY * number, LONG, OUTPUT) for number in range(int(SECONDS / EVERY))]
    return sorted(short + long, key=lambda each: each.at)


def measure(folder: Path, trace: Sequence[Arrival]) -> list[dict[str, Any]]:
    """Milliseconds to the first token of a server from these sources. Raises SystemExit where a request fails."""
    command = [
        sys.executable, "-m", "phalanx", "serve", "demo", "--device", "cpu", "--no_enable_prefix_caching",
        "--max_num_tokens", str(STEP_TOKENS), "--max_seq_len", str(SEQ_LEN), "--max_batch_size", "64",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile() as log,
        started.server(lambda port: [*command, "--port", str(port)], env=environment, log=log) as (_, url),
    ):
        client = served.Client(ApiEndpoint.of(url), "demo")
        due, lengths = [each.at for each in trace], [(each.input_len, each.output_len) for each in trace]
        asyncio.run(client.at([0.0] * 4, lengths[:4]))
        samples = asyncio.run(client.at(due, lengths))
    if failures := [sample.error for sample in samples if not sample.ok]:
        raise SystemExit(f"{len(failures)} of {len(samples)} requests failed, the first with: {failures[0]}")
    times: dict[str, list[float]] = {"short": [], "long": []}
    for arrival, sample in zip(trace, samples, strict=True):
        times["long" if arrival.input_len == LONG else "short"].append(sample.arrivals[0] - sample.begin)
    return [{"kind": kind, **percentiles(of_kind)} for kind, of_kind in times.items()]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In ms."""
    ordered = sorted(seconds)
    figures = {f"p{part}": ordered[min(int(part / 100 * len(ordered)), len(ordered) - 1)] for part in (50, 90, 99)}
    figures["mean"] = sum(ordered) / len(ordered)
    return {name: round(1e3 * value, 1) for name, value in figures.items()}


def simulated(path: Path, requests: int, slower: float) -> list[dict[str, Any]]:
    """The trace's first requests, by both schedulers: ms to the first token of each kind, and of all to the last one."""
    trace = arrivals.of(str(path), isl=0, osl=0, requests=0)[:requests]
    trace = [Arrival(each.at * slower, each.input_len, each.output_len, each.content) for each in trace]
    machine, _ = subject.machine_for("H200")
    costs = Costs(subject.shape_for("llama-3-70b"), "fp8", "fp8", Layout(tp=4), machine)
    limits = SchedulerOptions(
        num_blocks=3_000_000 // 16, block_size=16, max_batch_size=256, max_num_tokens=8192, max_seq_len=131072
    )  # fmt: skip
    figures: list[dict[str, Any]] = []
    for name, scheduler_of in (("before", history.older_scheduler), ("after", simulate.engine_scheduler)):
        result = simulate.run(costs, limits, trace, scheduler_of=scheduler_of)
        figures.append({"tree": name, "kind": "all, to the last token", **percentiles([each.e2e for each in result.served])})
        for kind, (above, most) in KINDS.items():
            times = [each.ttft for each in result.served if above < each.input_len <= most]
            figures.append({"tree": name, "kind": kind, "requests": len(times), **percentiles(times)})
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--requests", type=int, default=1500, help="of the trace")
    parser.add_argument("--slower", type=float, default=4.5, help="times as slow as the trace")
    parser.add_argument("--record", action="store_true", help="keep the figures in benchmarks/results/serving")
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    settings = {"requests": options.requests, "slower": options.slower} if options.mooncake else {"rounds": options.rounds}
    if options.mooncake:
        name, figures = "mixed_lengths_mooncake", simulated(options.mooncake, options.requests, options.slower)
    else:
        name = "mixed_lengths_cpu"
        trees = [(tree, Path(folder)) for tree, _, folder in (each.partition("=") for each in options.tree)]
        for number in range(options.rounds):
            for tree, folder in trees if number % 2 == 0 else trees[::-1]:
                figures += [{"tree": tree, **row} for row in measure(folder, mixed())]
                print(*figures[-2:], sep="\n", flush=True)
    if options.record:
        print(harness.write(name, {"asked": settings, "figures": figures}, harness.RESULTS / "serving"))
    elif options.mooncake:
        print(*figures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
