# SPDX-License-Identifier: Apache-2.0
"""Two versions of the server in turn: how long a start takes, and how long a request waits for its JSON schema; the demo on CPU.

Each round starts both servers, one after the other and another one first each time. Seconds are of the wall and of the CPU (user
and system, of the server and all its children): of the start, from the command until /ready says so; of the first request with a
schema, which makes both versions prepare; and of each further one, with a schema that the server has not met. Such a request asks
for one token. Wall times depend on what else runs on the machine, CPU seconds hardly do.

    python -m benchmarks.serve.paired_starts --other PATH/src --version COMMIT
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
from benchmarks.serve.paired import ON_CPU, compared

PARTS = ("start", "first_schema", "schema")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", required=True, help="the folder src of the other version")
    parser.add_argument("--version", required=True, help="its name, for the result: a commit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemas", type=int, default=8, help="in each round, behind the first one")
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
    """A server from its start to its end: seconds of each of PARTS, of the wall and (`_cpu`) of the CPU."""
    seconds: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    began = time.perf_counter()
    command = [sys.executable, "-P", "-m", "phalanx", "serve", *ON_CPU]
    with started.server(lambda port: [*command, "--port", str(port)], env=environment) as (server, url):
        processes = psutil.Process(server.pid)
        seconds["start"].append((time.perf_counter() - began, cpu_s(processes)))
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
            for number in range(1 + count):
                wall, cpu = time.perf_counter(), cpu_s(processes)
                answer = client.post("/v1/chat/completions", json=request(number))
                assert answer.status_code == 200, answer.text
                spent = time.perf_counter() - wall, cpu_s(processes) - cpu
                seconds["schema" if number else "first_schema"].append(spent)
    medians = {part: [statistics.median(column) for column in zip(*seconds[part], strict=True)] for part in PARTS}
    return {name: value for part, (wall, cpu) in medians.items() for name, value in ((part, wall), (f"{part}_cpu", cpu))}


def cpu_s(server: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def request(number: int) -> dict[str, Any]:
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
