# SPDX-License-Identifier: Apache-2.0
"""Two versions of the server in turn: how long a start takes, and how long a request waits for its JSON schema; the demo on CPU.

Each round starts both servers, one after the other and another one first each time. Seconds are of the wall and of the CPU (user
and system, of the server and all its children): of the start, from the command until /ready says so, also for each process; of the
first request with a schema, which makes both versions prepare; and of each further one, with a schema that the server has not met.
Such a request asks for one token. Wall times depend on what else runs on the machine, CPU seconds hardly do.

    python -m benchmarks.serve.paired_starts --other PATH/src --version COMMIT

A version whose library for grammars is not installed is started only: --schemas 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import harness
from benchmarks.serve import started
from benchmarks.serve.paired import ON_CPU, compared, cpu_s, processes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", required=True, help="the folder src of the other version")
    parser.add_argument("--version", required=True, help="its name, for the result: a commit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemas", type=int, default=9, help="in each round, with the first one; 0: none")
    parser.add_argument("--folder", type=Path, help="of the result file")
    arguments = parser.parse_args()
    path = os.environ.get("PYTHONPATH", "")
    environments = {"this": {**os.environ}, "other": {**os.environ, "PYTHONPATH": os.pathsep.join([arguments.other, path])}}
    pairs = []
    for number in range(arguments.rounds):
        order = sorted(environments, reverse=number % 2 == 1)
        pairs.append({name: one(environments[name], arguments.schemas) for name in order})
    ratios = {measure: compared(pairs, measure) for measure in pairs[0]["this"]}
    for measure, ratio in ratios.items():
        this, other = (statistics.median(pair[version][measure] for pair in pairs) for version in ("this", "other"))
        low, high = ratio["interval"]
        print(f"{measure:16} {this:.4f} s, the other {other:.4f} s: {ratio['median']:.4f}, 95 percent: {low:.4f} to {high:.4f}")
    options = {name: value for name, value in vars(arguments).items() if name not in ("other", "folder")}
    figures = {"asked": options, "ratios": ratios, "pairs": pairs}
    print(f"written: {harness.write('serve_paired_starts_cpu', figures, arguments.folder)}")
    return 0


def one(environment: Mapping[str, str], count: int) -> dict[str, float]:
    """A server from its start to its end: seconds of the start, of the first request with a schema, and the median of the further
    ones, of the wall and (`_cpu`) of the CPU. The CPU seconds of the start also by process."""
    began = time.perf_counter()
    command = [sys.executable, "-P", "-m", "phalanx", "serve", *ON_CPU]
    with started.server(lambda port: [*command, "--port", str(port)], env=environment) as (server, url):
        first = psutil.Process(server.pid)
        seconds = {"start": time.perf_counter() - began, "start_cpu": cpu_of_all(first)}
        seconds |= {f"start_cpu_{name}": cpu_s(process) for name, process in processes(first).items()}
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
            spent = [request(client, number, first) for number in range(count)]
    for part, times in (("first_schema", spent[:1]), ("schema", spent[1:])):
        for name, column in zip((part, f"{part}_cpu"), zip(*times, strict=True), strict=False):
            seconds[name] = statistics.median(column)
    return seconds


def request(client: httpx.Client, number: int, server: psutil.Process) -> tuple[float, float]:
    """Seconds of one request, of the wall and of the CPU."""
    wall, cpu = time.perf_counter(), cpu_of_all(server)
    answer = client.post("/v1/chat/completions", json=body(number))
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - wall, cpu_of_all(server) - cpu


def cpu_of_all(server: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    return sum(cpu_s(process) for process in (server, *server.children(recursive=True)))


def body(number: int) -> dict[str, Any]:
    """For one token of the JSON of a schema whose names no other number has."""
    item = {
        "type": "object",
        "properties": {f"key_{number}_{i}": {"enum": [f"value {number} {j}" for j in range(4)]} for i in range(3)},
        "required": [f"key_{number}_0"],
        "additionalProperties": False,
    }  # fmt: skip
    fields: dict[str, Any] = {f"list_{number}_{i}": {"type": "array", "items": item} for i in range(2 + number % 3)}
    fields |= {f"number_{number}_{i}": {"anyOf": [{"type": "integer"}, {"type": "null"}]} for i in range(4)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {
        "model": "demo", "messages": [{"role": "user", "content": "an object"}], "max_tokens": 1, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "object", "schema": schema, "strict": True}},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
