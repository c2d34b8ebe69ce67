# SPDX-License-Identifier: Apache-2.0
"""Throughput on a Ray cluster beside hosts that were started by hand: tp 2 inside each of two hosts, pp 2 across.

Two network namespaces are the hosts. Both servers run in them at the same time and are loaded in turns, so that other work on this
machine meets both; the figure is the median of the ratios of neighbouring runs, with their quartiles and the noise. Needs root,
iproute2 and the package ray.
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

from benchmarks import harness
from benchmarks.deploy.two_servers import compared, noise_of, show, wait_until_ready
from phalanx.bench.load import Load, run
from tests.support.namespaces import Namespaces, two_namespaces

TARGET = 0.98
LAYOUT = ("--device", "cpu", "--tp_size", "2", "--pp_size", "2", "--max_seq_len", "512", "--kv_cache_bytes", str(1 << 26))
PORTS = {"ray": 8000, "native": 8001}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--url", help="Used by the script itself: load this server once, and print its tokens per second.")
    arguments = parser.parse_args()
    if arguments.url:
        load = Load(
            requests=arguments.streams, input_len=16, output_len=arguments.new_tokens, concurrency=arguments.streams, warmup=0
        )  # fmt: skip
        print(json.dumps(run(arguments.url, None, load)["results"]["output_tok_s"]))
        return 0
    rates: dict[str, list[float]] = {name: [] for name in PORTS}
    with (
        two_namespaces("10.213.6") as hosts, ray_cluster(hosts) as environment, tempfile.TemporaryFile("w+") as log,
        servers(hosts, environment, log),
    ):  # fmt: skip
        for turn in range(arguments.repeats + 1):
            for name in PORTS if turn % 2 else reversed(PORTS):
                rate = loaded(hosts, f"http://{hosts.addresses[0]}:{PORTS[name]}", arguments)
                if turn:  # the first round warms both up
                    rates[name].append(rate)
    ratio, quarters = compared(rates["ray"], rates["native"])
    noise = noise_of(rates)
    show(rates, ratio, quarters, noise, TARGET)
    figures = {"asked": vars(arguments), "tokens_per_s": rates, "ratio": ratio, "ratio_quartiles": quarters, "noise": noise}
    print(f"written: {harness.write('ray_throughput_cpu', figures).relative_to(harness.ROOT)}")
    return 0 if ratio >= TARGET else 1


def loaded(hosts: Namespaces, url: str, arguments: argparse.Namespace) -> float:
    words = [sys.executable, "-m", "benchmarks.deploy.ray_throughput", "--url", url, "--streams", str(arguments.streams)]
    command = hosts.command(0, *words, "--new_tokens", str(arguments.new_tokens))
    return float(
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()[-1])
    )


@contextlib.contextmanager
def ray_cluster(hosts: Namespaces) -> Iterator[dict[str, str]]:
    """A Ray node on each host; yields the environment for what uses the cluster. The processes end with the namespaces."""
    address = f"{hosts.addresses[0]}:6379"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        for host in (0, 1):
            place = (
                ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
                if host == 0
                else [f"--address={address}"]
            )
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={hosts.addresses[host]}"]
            limits = ["--num-cpus=2", "--disable-usage-stats", "--object-store-memory=80000000"]
            subprocess.run(hosts.command(host, *words, *limits), stdout=subprocess.DEVNULL, check=True, timeout=120)
        yield os.environ | {"RAY_ADDRESS": address, "PHALANX_CLUSTER_TOKEN": "the token of both hosts"}


@contextlib.contextmanager
def servers(hosts: Namespaces, environment: dict[str, str], log: IO[str]) -> Iterator[None]:
    """Both servers, ready; what they say goes to `log`. They end with the namespaces."""
    first = hosts.addresses[0]
    words = [sys.executable, "-m", "phalanx", "serve", "demo", *LAYOUT, "--host", first]
    native = [*words, "--port", str(PORTS["native"]), "--nnodes", "2", "--master_addr", first, "--master_port", "29500"]
    commands = [
        hosts.command(0, *words, "--port", str(PORTS["ray"]), "--num_workers", "2", "--launcher", "ray"),
        hosts.command(0, *native, "--node_rank", "0"), hosts.command(1, *native, "--node_rank", "1"),
    ]  # fmt: skip
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log) for command in commands]
    wait_until_ready(hosts, PORTS.values(), processes, log, 200.0)
    yield


if __name__ == "__main__":
    sys.exit(main())
