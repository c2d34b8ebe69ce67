# SPDX-License-Identifier: Apache-2.0
"""A model served over HTTP at several concurrencies, as public comparisons of engines measure it.

For each concurrency `phalanx bench serve` sends a closed loop to one server, `phalanx serve` of a shape with dummy weights: prompts
and outputs of 80 to 100 percent of 1,024 tokens, random ids, the prefix cache off. The first requests, one of each stream, begin
together and count for throughput only. What stands behind -- goes to `phalanx serve`. With --predict the planner's simulator gets
the same requests, and nothing is served.

    python -m benchmarks.serve.closed_loop --model llama-3-70b --concurrency 4,8,16,32,64 --out DIR -- --dtype fp8 --tp_size 2
    python -m benchmarks.serve.closed_loop --predict H200 --model llama-3-70b --out DIR -- --dtype fp8 --tp_size 2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.serve import started
from phalanx.bench import load, report, shapes
from phalanx.layout import Layout
from phalanx.planner import scenario, subject
from phalanx.planner.arrivals import Arrival
from phalanx.planner.scenario import ReplicaSpec
from phalanx.planner.search import PlanRequest

TOKENS, RANGE = 1024, 0.8
"""Of a prompt and an output, at most; and the least part of that."""
ROUNDS = 4
"""Requests of each stream, the first of which does not count."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--name", default="closed_loop", help="of the file of figures")
    parser.add_argument("--model", default="llama-3-70b", help="a shape as `phalanx bench shape` names it")
    parser.add_argument("--concurrency", default="4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="requests of each stream")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a prompt and an output, at most")
    parser.add_argument("--predict", metavar="GPU", help="of the planner's catalogue")
    parser.add_argument("--start_seconds", type=float, default=300.0)
    parser.add_argument("serve", nargs="*", metavar="ARGUMENT", help="behind --: options of `phalanx serve`")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.concurrency.split(",")]
    settings = {"model": options.model, "serve": options.serve, "concurrency": counts, "rounds": options.rounds}
    loops: list[dict[str, Any]] = []
    if options.predict:
        replica = replica_of(options.predict, options.model, options.serve)
        loops = [predicted(replica, closed_loop_of(count, options.rounds, options.tokens)) for count in counts]
        print(harness.write(options.name, {"asked": settings, "predicted_for": options.predict, "loops": loops}, options.out))
        return 0
    documents: list[report.Document] = []
    with shapes.folder_of(options.model) as folder:
        command = [sys.executable, "-m", "phalanx", "serve", folder, "--load_format", "dummy", "--no_enable_prefix_caching"]
        command += options.serve
        with started.server(lambda port: [*command, "--port", str(port)], seconds=options.start_seconds) as (_, url):
            for count in counts:
                documents.append(measured(url, count, options.rounds, options.tokens))
                report.show(load.table(documents[-1]))
                loops = [summary(document) for document in documents]
                harness.write(options.name, {"asked": settings, "loops": loops}, options.out)
    return 0


def closed_loop_of(concurrency: int, rounds: int, tokens: int) -> load.Load:
    return load.Load(
        requests=rounds * concurrency, input_len=tokens, output_len=tokens, concurrency=concurrency, length_range=RANGE,
        skip_first=concurrency if rounds > 1 else 0, warmup=min(concurrency, 4),
    )  # fmt: skip


def replica_of(gpu: str, model: str, serve: Sequence[str]) -> ReplicaSpec:
    """The server that these options start, as the planner knows it."""
    parser = argparse.ArgumentParser()
    for name, default in (("--dtype", "bf16"), ("--kv_cache_dtype", "model")):
        parser.add_argument(name, default=default)
    for name, count in (("--tp_size", 1), ("--pp_size", 1), ("--max_batch_size", 64), ("--max_num_tokens", 8192)):
        parser.add_argument(name, type=int, default=count)
    parser.add_argument("--max_seq_len", type=int, default=2 * TOKENS)
    options = parser.parse_args(serve)
    machine, _ = subject.machine_for(gpu)
    request = PlanRequest(
        options.dtype, options.kv_cache_dtype, max_batch_size=options.max_batch_size, max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
    )  # fmt: skip
    frontend, _ = scenario.frontend_of(machine)
    return ReplicaSpec.of(
        subject.shape_for(model), machine, request, Layout(options.pp_size, tp=options.tp_size), frontend=frontend
    )


def predicted(replica: ReplicaSpec, closed: load.Load) -> dict[str, Any]:
    """The same requests on the clock of the cost model."""
    lengths = zip(map(len, closed.prompts()), closed.output_lens(), strict=True)
    result = replica.run([Arrival(0.0, prompt, output) for prompt, output in lengths], concurrency=closed.concurrency)
    timed = result.served[closed.skip_first :]
    figures = {
        "ttft_ms": load.percentiles([request.ttft for request in timed]),
        "tpot_ms": load.percentiles([request.tpot for request in timed]),
    }
    return {"concurrency": closed.concurrency, "requests": closed.requests, **figures}


def measured(url: str, concurrency: int, rounds: int, tokens: int) -> report.Document:
    """One closed loop. Raises CalledProcessError where a request fails: then latencies are of less load than they say."""
    document = load.run(url, None, closed_loop_of(concurrency, rounds, tokens))
    if document["results"]["failed"]:
        raise subprocess.CalledProcessError(1, f"a closed loop of {concurrency}: {document['results']['errors']}")
    return document


def summary(loop: report.Document) -> dict[str, Any]:
    """The load and the figures."""
    settings = {name: value for name, value in loop["asked"].items() if name not in ("url", "model", "timeout")}
    return {**settings, **{name: value for name, value in loop["results"].items() if not name.startswith("fraction")}}


if __name__ == "__main__":
    sys.exit(main())
