# SPDX-License-Identifier: Apache-2.0
"""Two versions of the server in turn: tokens per second over HTTP, and CPU seconds per 1,000 tokens; the demo model on CPU, or a
shape of `phalanx bench` with dummy weights on a GPU, which both servers share.

Both servers run at once, and only one of them has requests: A B, B A, A B, ... in many short turns, and each pair gives a ratio.
Two servers of one version differ by some percent as long as they run, the one that started first being slower: so both are started
anew several times, in turn. The client is that of `phalanx bench serve`. Tokens per second depend on what else runs on the machine,
even in pairs. The CPU seconds (user and system) of the server's, the engine's and the rank's processes hardly do; on a machine
where the three use all cores, tokens per second are their reciprocal. Each median has the interval that holds it with 95 percent.

It fails if a loss of more than 1.5 percent is certain: of tokens per second by their interval, or on a CPU of CPU seconds of
server, engine and rank together by their median.

    python -m benchmarks.serve.paired --other PATH/src --version COMMIT
    python -m benchmarks.serve.paired --other src --version HEAD --flags "--log_requests --log_format json"
    python -m benchmarks.serve.paired --other PATH/src --version COMMIT --model llama-3-8b --streams 64 --new_tokens 512
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness
from benchmarks.serve import equal_streams, started
from phalanx.bench import shapes
from phalanx.bench.load import Load, run

LOSS = 0.015
"""What this version may lose."""
ON_CPU = ["demo", "--device", "cpu"]
ON_GPU = ["--load_format", "dummy", "--kv_cache_dtype", "fp8", "--kv_cache_bytes", str(16 << 30), "--max_batch_size", "64"]
"""Flags: two servers have their weights and caches on one GPU, and no module is to be compiled."""
PROCESSES = {"server": "phalanx server", "engine": "phalanx engine", "rank": "phalanx rank 0"}
"""The processes of a server, by their titles."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", required=True, help="the folder src of the other version (B); A is this one")
    parser.add_argument("--version", required=True, help="its name, for the result: a commit")
    equal_streams.add_arguments(parser, new_tokens=32)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=10, help="starts of both servers, among which the pairs are divided")
    parser.add_argument("--model", default="demo", help="demo, on CPU; or a shape of `phalanx bench`, on the GPU")
    parser.add_argument("--flags", default="", help="of this version's server alone, such as --log_requests: what they cost")
    parser.add_argument("--name", default="", help="of the result file")
    parser.add_argument("--folder", type=Path, help="of the result file")
    arguments = parser.parse_args()
    load, on_cpu = equal_streams.load_of(arguments), arguments.model == "demo"
    with tempfile.TemporaryDirectory() as folder:
        flags = ON_CPU if on_cpu else [str(shapes.write(arguments.model, Path(folder) / "model")), *ON_GPU]
        pairs = measured(
            {"this": [*flags, *arguments.flags.split()], "other": flags}, arguments.other, load, arguments.pairs, arguments.rounds
        )
    ratios = {measure: compared(pairs, measure) for measure in ("tokens_per_s", "cpu_s", *(f"cpu_s_{name}" for name in PROCESSES))}
    figures = {
        "asked": {name: value for name, value in vars(arguments).items() if name not in ("other", "name", "folder")},
        "ratios": ratios,
        "pairs": pairs,
    }
    for measure, ratio in ratios.items():
        this, other = (statistics.median(pair[version][measure] for pair in pairs) for version in ("this", "other"))
        low, high = ratio["interval"]
        print(f"{measure:13} {this:8.3f}, the other {other:8.3f}: ratio {ratio['median']:.4f}, 95 percent: {low:.4f} to {high:.4f}")
    name = arguments.name or f"serve_paired_{'cpu' if on_cpu else 'cuda'}"
    print(f"written: {harness.write(name, figures, arguments.folder)}")
    lost = ratios["tokens_per_s"]["interval"][1] < 1 - LOSS or (on_cpu and ratios["cpu_s"]["median"] > 1 / (1 - LOSS))
    print("FAILED" if lost else "passed")
    return int(lost)


def measured(
    flags: Mapping[str, Sequence[str]], other: str, load: Load, count: int, rounds: int
) -> list[dict[str, dict[str, float]]]:
    """`count` pairs, in rounds: each starts both servers anew, another one first each time, and warms them up."""
    pairs = []
    for round_number in range(rounds):
        of_round = count * (round_number + 1) // rounds - count * round_number // rounds
        pairs += one_round(flags, other, load, of_round, reverse=round_number % 2 == 1)
    return pairs


def one_round(
    flags: Mapping[str, Sequence[str]], other: str, load: Load, count: int, *, reverse: bool
) -> list[dict[str, dict[str, float]]]:
    """`count` pairs, behind one that warms up. flags: of `phalanx serve`, by version. reverse: the other one is started first."""
    command = [sys.executable, "-P", "-m", "phalanx", "serve", "--no_enable_prefix_caching"]
    environments = {
        "this": {**os.environ, "OMP_NUM_THREADS": "1"},
        "other": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([other, os.environ.get("PYTHONPATH", "")])},
    }
    with ExitStack() as stack:
        servers: dict[str, tuple[dict[str, psutil.Process], str]] = {}
        for name in sorted(environments, reverse=not reverse):
            words = partial(on_port, [*command, *flags[name]])
            server, url = stack.enter_context(started.server(words, env=environments[name]))
            servers[name] = processes(psutil.Process(server.pid)), url
        pairs = []
        for number in range(count + 1):
            order = ("this", "other") if number % 2 else ("other", "this")
            pairs.append({name: one(*servers[name], load) for name in order})
        return pairs[1:]


def on_port(command: Sequence[str], port: int) -> list[str]:
    return [*command, "--port", str(port)]


def processes(server: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of a server, by the names of PROCESSES."""
    by_title = {" ".join(process.cmdline()).strip(): process for process in (server, *server.children(recursive=True))}
    return {name: by_title[title] for name, title in PROCESSES.items()}


def one(server: dict[str, psutil.Process], url: str, load: Load) -> dict[str, float]:
    """One load on one server: tokens per second, and CPU seconds per 1,000 tokens of output, by process and together."""
    before = {name: cpu_s(process) for name, process in server.items()}
    results: dict[str, Any] = run(url, None, load)["results"]
    assert results["completed"] == load.requests, results
    thousands = load.requests * load.output_len / 1000
    costs = {f"cpu_s_{name}": (cpu_s(process) - before[name]) / thousands for name, process in server.items()}
    return {"tokens_per_s": results["output_tok_s"], "cpu_s": sum(costs.values()), **costs}


def compared(pairs: Sequence[dict[str, dict[str, float]]], measure: str) -> dict[str, Any]:
    """The median over the pairs of this version's figure over the other's, with its quartiles and its interval of 95 percent."""
    ratios = sorted(pair["this"][measure] / pair["other"][measure] for pair in pairs)
    return {
        "median": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4),
        "interval": median_interval(ratios),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of a sorted sample, the interval that holds the median of what it comes from with at least 95 percent, whatever that is: the
    sign test's. For fewer than 6 values, it is their range, which holds it with less."""
    count, tail = len(values), 0.0
    for rank in range(count // 2):
        tail += math.comb(count, rank) / 2**count
        if tail > 0.025:
            return values[max(rank - 1, 0)], values[min(count - rank, count - 1)]
    return values[0], values[-1]


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of all threads of a process: its CPU clock of Linux, since psutil's figures are multiples of 10 ms."""
    return time.clock_gettime((~process.pid << 3) | 2)


if __name__ == "__main__":
    sys.exit(main())
