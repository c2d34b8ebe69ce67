# SPDX-License-Identifier: Apache-2.0
"""Throughput of two hosts with a cluster token (CURVE: authenticated, encrypted) beside the same two without one.

Two network namespaces are the hosts; pp 2 is across them, so that every step crosses the authenticated channel twice. Both servers
run at the same time and are loaded in turns, so that other work on this machine meets both. The figures are medians of the ratios
of neighbouring runs, with the interval that holds each with 95 percent, their quartiles, and the noise: of the throughput, and,
where other work makes that too noisy, of the processor time per token of all processes of a server, which bounds it. Needs root and
iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

import psutil

from benchmarks import harness
from benchmarks.deploy.two_servers import compared, noise_of, show, wait_until_ready
from benchmarks.serve.paired import median_interval
from phalanx.bench.load import Load, run
from tests.support.namespaces import Namespaces, two_namespaces

TARGET = 0.98
LAYOUT = ("--device", "cpu", "--pp_size", "2", "--max_seq_len", "512", "--kv_cache_bytes", str(1 << 26), "--nnodes", "2")
PORTS = {"token": 8000, "insecure": 8001}
TOKEN = "the token of both hosts"
READY_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--processes", help="Used by the script itself: the processes of each server, as JSON.")
    parser.add_argument("--address", help="Used by the script itself: load the servers of this host in turns, and print the rates.")
    arguments = parser.parse_args()
    if arguments.address:
        print(json.dumps(in_turns(arguments)))
        return 0
    with two_namespaces("10.213.16") as hosts, tempfile.TemporaryFile("w+") as log, servers(hosts, log) as processes:
        words = [f"--{name}={value}" for name, value in vars(arguments).items() if value is not None]
        command = [sys.executable, "-m", "benchmarks.executor.peer_authentication", *words, f"--address={hosts.addresses[0]}"]
        command.append(f"--processes={json.dumps(processes)}")
        answer = subprocess.run(hosts.command(0, *command), capture_output=True, text=True, check=True, timeout=1800).stdout
    runs: dict[str, list[list[float]]] = json.loads(answer.splitlines()[-1])
    rates = {name: [rate for rate, _ in pairs] for name, pairs in runs.items()}
    costs = {name: [cost for _, cost in pairs] for name, pairs in runs.items()}
    ratio, quarters = compared(rates["token"], rates["insecure"])
    cost_ratio, cost_quarters = compared(costs["token"], costs["insecure"])
    noise = noise_of(rates)
    show(rates, ratio, quarters, noise, TARGET)
    interval, cost_interval = interval_of(rates), interval_of(costs)
    print(f"with 95 percent the ratio is from {interval[0]:.3f} to {interval[1]:.3f}")
    print(f"that of processor time per token from {cost_interval[0]:.3f} to {cost_interval[1]:.3f}")
    print(f"processor time per token: {cost_ratio:.3f}, half of the pairs from {cost_quarters[0]:.3f} to {cost_quarters[2]:.3f}")
    figures = {"asked": vars(arguments), "tokens_per_s": rates, "ratio": ratio, "ratio_quartiles": quarters, "noise": noise}
    figures["ratio_interval"] = interval
    figures |= {"cpu_ms_per_token": costs, "cpu_ratio": cost_ratio, "cpu_ratio_quartiles": cost_quarters}
    figures["cpu_ratio_interval"] = cost_interval
    print(f"written: {harness.write('peer_authentication_cpu', figures).relative_to(harness.ROOT)}")
    return 0 if (ratio if noise <= 1 - TARGET else 1 / cost_ratio) >= TARGET else 1


def interval_of(values: dict[str, list[float]]) -> tuple[float, float]:
    """The interval of 95 percent of the median ratio, with the token over without one."""
    return median_interval(sorted(token / other for token, other in zip(values["token"], values["insecure"], strict=True)))


def cpu_seconds(roots: list[int]) -> float:
    """Processor time so far of these processes and all below them."""
    tree = [one for root in roots for one in (psutil.Process(root), *psutil.Process(root).children(recursive=True))]
    return sum(sum(one.cpu_times()[:2]) for one in tree)


def in_turns(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Output tokens per second, and milliseconds of processor time per token, of each server, run by run; which one begins
    alternates."""
    processes: dict[str, list[int]] = json.loads(arguments.processes)
    load = Load(
        requests=arguments.streams, input_len=16, output_len=arguments.new_tokens, concurrency=arguments.streams, warmup=0
    )  # fmt: skip
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in PORTS}
    for turn in range(arguments.repeats + 1):
        for name in PORTS if turn % 2 else reversed(PORTS):
            before = cpu_seconds(processes[name])
            rate = float(run(f"http://{arguments.address}:{PORTS[name]}", None, load)["results"]["output_tok_s"])
            if turn:  # the first round warms both up
                cost = (cpu_seconds(processes[name]) - before) / (arguments.streams * arguments.new_tokens)
                runs[name].append((rate, 1000 * cost))
    return runs


@contextlib.contextmanager
def servers(hosts: Namespaces, log: IO[str]) -> Iterator[dict[str, list[int]]]:
    """Both servers, ready, and the ids of their processes; what they say goes to `log`. They end with the namespaces."""
    first, processes, ids = hosts.addresses[0], [], {}
    for name, port in PORTS.items():
        trust = {"PHALANX_CLUSTER_TOKEN": TOKEN} if name == "token" else {"PHALANX_INSECURE_CLUSTER": "true"}
        words = [sys.executable, "-m", "phalanx", "serve", "demo", *LAYOUT, "--host", first, "--port", str(port)]
        words += ["--master_addr", first, "--master_port", str(port + 20000)]
        processes += [
            subprocess.Popen(
                hosts.command(host, *words, "--node_rank", str(host)),
                env=os.environ | trust, stdout=subprocess.DEVNULL, stderr=log,
            )
            for host in (0, 1)
        ]  # fmt: skip
        ids[name] = [process.pid for process in processes[-2:]]
    wait_until_ready(hosts, PORTS.values(), processes, log, READY_SECONDS)
    yield ids


if __name__ == "__main__":
    sys.exit(main())
