# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of two servers have in common, which run at the same time on two hosts and are loaded in turns."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any

from tests.support.namespaces import Namespaces


def wait_until_ready(
    hosts: Namespaces, ports: Iterable[int], processes: Sequence[subprocess.Popen[Any]], log: IO[str], seconds: float
) -> None:  # fmt: skip
    """Wait until the servers at these ports of the first host are ready. Raises SystemExit with the end of `log` where one of the
    processes ends, or after so many seconds."""
    deadline, address = time.monotonic() + seconds, hosts.addresses[0]
    for port in ports:
        probe = f"import httpx, sys; sys.exit(httpx.get('http://{address}:{port}/ready', timeout=5).status_code != 200)"
        while subprocess.run(hosts.command(0, sys.executable, "-c", probe), capture_output=True, check=False).returncode:
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                log.seek(0)
                raise SystemExit(f"{log.read()[-8000:]}\nthe server at port {port} is not ready: see the log above")
            time.sleep(0.5)


def compared(values: Sequence[float], others: Sequence[float]) -> tuple[float, list[float]]:
    """Median and quartiles of the ratios, values over others, of neighbouring runs."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return statistics.median(ratios), statistics.quantiles(ratios, n=4)


def noise_of(rates: dict[str, list[float]]) -> float:
    """What a server differs by from itself, one run later, in the median: no ratio is better known than that."""
    return statistics.median(
        abs(later / run_before - 1) for values in rates.values() for run_before, later in itertools.pairwise(values)
    )


def show(rates: dict[str, list[float]], ratio: float, quarters: Sequence[float], noise: float, target: float) -> None:
    """Print tokens per second of each server, their ratio and its certainty."""
    for name, values in rates.items():
        print(f"{name:9} {statistics.median(values):8.1f} tokens/s, from {min(values):.1f} to {max(values):.1f}")
    first, second = rates.values()
    pairs = [value / other for value, other in zip(first, second, strict=True)]
    print(f"ratio: {ratio:.3f} (target: at least {target:.2f}), half of the pairs from {quarters[0]:.3f} to {quarters[2]:.3f}")
    print(f"pairs: {sum(pair >= target for pair in pairs)} of {len(pairs)} meet the target")
    print(f"noise: the median difference of a server from itself, one run later, is {noise:.1%}")
