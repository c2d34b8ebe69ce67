# SPDX-License-Identifier: Apache-2.0
"""Where the beginnings of prompts are found, by the size of host memory: a trace through a served demo on this CPU, and through the
simulator, which has the same scheduler; then at full size, simulated, for 70B in FP8 on two H200.

    python -m benchmarks.serve.host_memory --trace conversation_trace.jsonl --name host_memory_mooncake
    python -m benchmarks.serve.host_memory --write_agents agents.jsonl
    python -m benchmarks.serve.host_memory --trace agents.jsonl --slower 1 --name host_memory_agents

The trace is in Mooncake's form (FAST 2025). --write_agents makes one of agents: sessions that begin as a Poisson process, all with
one system prompt, whose requests have everything before them and the output of a tool. For the demo, prompts are 64 times shorter.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.serve import started
from phalanx.bench import load
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.engine.limits import SchedulerOptions
from phalanx.layout import Layout
from phalanx.layout.memory import block_bytes, stage_caches
from phalanx.planner import arrivals, scenario, simulate, subject
from phalanx.planner.arrivals import HASHED, Arrival
from phalanx.planner.cost import Costs
from phalanx.planner.search import PlanRequest

SHORTER = 64
BLOCK, SLOTS, SEQ_LEN, STEP_TOKENS = HASHED // SHORTER, 4, 2048, 512
"""Of the demo's engine."""
SYSTEM, TOOL, ANSWER = 6 * HASHED, HASHED, 256
"""Tokens of an agent's system prompt, of a tool's output, and of an answer; the session's prompt grows by TOOL each time, in which
the answer before is."""


def agents(sessions: int, rate: float, seed: int = 0) -> list[Arrival]:
    """Sessions of 4 to 40 calls of tools, one in 35 seconds."""
    draw, begin, numbers, rows = random.Random(seed), 0.0, iter(range(1 << 40, 1 << 41)), list[Arrival]()
    system = tuple(range(SYSTEM // HASHED))
    for _ in range(sessions):
        at, content = begin, (*system, next(numbers))
        for _ in range(draw.randint(4, 40)):
            rows.append(Arrival(at, len(content) * HASHED, ANSWER, content))
            content = (*content, *(next(numbers) for _ in range(draw.randint(1, 2 * TOOL // HASHED + 1))))
            at += 5.0 + draw.expovariate(1 / 30)  # the answer, and the tool
        begin += draw.expovariate(rate)
    return sorted(rows, key=lambda each: each.at)


def write_agents(path: Path, sessions: int, rate: float) -> None:
    with path.open("w", encoding="utf-8") as file:
        for each in agents(sessions, rate):
            row = {"timestamp": round(1e3 * each.at), "input_length": each.input_len, "output_length": each.output_len}
            file.write(json.dumps({**row, "hash_ids": list(each.content)}) + "\n")


def of_engine(trace: Path, requests: int, device: int, host: int) -> dict[str, Any]:
    """Served by the demo, with room for so many tokens on the device and in host memory."""
    (caches,) = stage_caches(ModelShape.from_folder(locate("demo", None)), "fp32", "fp32", Layout())
    token = block_bytes(caches, 1)
    command = [
        sys.executable, "-m", "phalanx", "serve", "demo", "--device", "cpu", "--kv_block_size", str(BLOCK), "--max_seq_len",
        str(SEQ_LEN), "--max_num_tokens", str(STEP_TOKENS), "--max_batch_size", str(SLOTS), "--kv_cache_bytes", str(device * token),
        "--kv_host_memory", str(host * token),
    ]  # fmt: skip
    with (
        tempfile.TemporaryFile() as log,
        started.server(lambda port: [*command, "--port", str(port)], log=log) as (_, url),
    ):
        wanted = load.Load(requests, 1, 1, concurrency=SLOTS, trace=str(trace), shorten=SHORTER, vocab_size=1000, warmup=0)
        figures = load.run(url, None, wanted)["results"]
    hits = figures["prefix_cache"]
    on_host = hits["tiers"].get("host", 0)
    more = {"ttft_p50_ms": round(figures["ttft_ms"]["p50"], 1), "failed": figures["failed"]}
    return rates(hits["queries"], hits["hits"], on_host) | more


def of_simulator(trace: Path, requests: int, device: int, host: int) -> dict[str, Any]:
    """The same requests and limits. The clock is another machine's."""
    rows = arrivals.shortened(arrivals.of(str(trace), isl=0, osl=0, requests=requests), SHORTER)
    machine, _ = subject.machine_for("H200")
    limits = SchedulerOptions(device // BLOCK, BLOCK, SLOTS, STEP_TOKENS, SEQ_LEN, host_blocks=host // BLOCK, copied_blocks=1 << 20)
    costs = Costs(subject.shape_for("llama-3.1-8b"), "bf16", "bf16", Layout(), machine)
    result = simulate.run(costs, limits, rows, concurrency=SLOTS)
    return rates(result.queries, result.hits, result.host_hits)


def at_full_size(trace: Path, requests: int, slower: float, memory: int) -> dict[str, Any]:
    """70B in FP8 on two H200, with so many bytes of host memory."""
    rows = arrivals.paced(arrivals.of(str(trace), isl=0, osl=0, requests=requests), 1 / slower)
    machine, _ = subject.machine_for("H200")
    request = PlanRequest("fp8", "fp8", max_batch_size=256, max_seq_len=131072, kv_host_memory=memory)
    replica = scenario.ReplicaSpec.of(subject.shape_for("llama-3.1-70b"), machine, request, Layout(tp=2))
    document = scenario.document(replica, rows, 1, scenario.Bounds())
    hits, queries = document["prefix_hits"], document["prompt_tokens"]
    figures = {name: round(document["ttft_ms"][name]) for name in ("p50", "p90")}
    return rates(queries, hits, document["prefix_hits_on_host"]) | {f"ttft_{name}_ms": value for name, value in figures.items()}


def rates(queries: int, hits: int, on_host: int) -> dict[str, Any]:
    """Of the prompts' tokens, which part was found on the device and in host memory."""
    return {"device": round((hits - on_host) / queries, 4), "host": round(on_host / queries, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=600, help="of the trace, for the demo")
    parser.add_argument("--device", type=int, default=8192, help="tokens that the demo's KV cache holds")
    parser.add_argument("--host", default="0,16384,65536", help="tokens that host memory holds beside the demo")
    parser.add_argument("--full_requests", type=int, default=2000, help="of the trace, at full size")
    parser.add_argument("--slower", type=float, default=7.0, help="times as slow as the trace, at full size")
    parser.add_argument("--memory", default="0,200,400,800", help="GB of host memory, at full size")
    parser.add_argument("--write_agents", type=Path, metavar="FILE", help="write a trace of agents, and end")
    parser.add_argument("--sessions", type=int, default=400, help="of agents")
    parser.add_argument("--rate", type=float, default=0.3, help="sessions of agents that begin in a second")
    parser.add_argument("--name", help="keep the figures in benchmarks/results/serving/NAME.json")
    options = parser.parse_args()
    if options.write_agents:
        write_agents(options.write_agents, options.sessions, options.rate)
        return 0
    figures: list[dict[str, Any]] = []
    for host in map(int, options.host.split(",")):
        for where, run in (("engine", of_engine), ("simulator", of_simulator)):
            figures.append({"where": where, "host_tokens": host, **run(options.trace, options.requests, options.device, host)})
            print(figures[-1], flush=True)
    for memory in map(float, options.memory.split(",")):
        row = at_full_size(options.trace, options.full_requests, options.slower, int(1e9 * memory))
        figures.append({"where": "simulated 70B FP8 on two H200", "host_gb": memory, **row})
        print(figures[-1], flush=True)
    if options.name:
        settings = {name: value for name, value in vars(options).items() if name not in ("trace", "write_agents", "name")}
        settings["trace"] = options.trace.name
        print(harness.write(options.name, {"asked": settings, "figures": figures}, harness.RESULTS / "serving"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
