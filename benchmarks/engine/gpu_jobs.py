# SPDX-License-Identifier: Apache-2.0
"""Many small engines on few GPUs: jobs are processes of their own that start at the same time and take turns on the GPUs.

A start is work of the host, so starts overlap. Engines take turns, as ranks that wait for one another should have their GPUs to
themselves.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.serve.started import ended

_LOCKS = "BENCH_LOCKS"  # a folder with a file for each GPU, locked by the job that runs there
_DESCRIPTION = ("name", "checkpoint", "dtype", "tp", "pp", "strategy")


def visible_gpus() -> list[int]:
    """The GPUs of this host, or those that CUDA_VISIBLE_DEVICES lists by number."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [int(number) for number in visible.split(",")]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return list(range(len(listed.splitlines())))


def run_jobs(
    jobs: list[dict[str, Any]], gpus: list[int], module: str, *, beside: int = 1, tell: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run each job by `python -m MODULE --job` on tp x pp GPUs. A GPU has at most `beside` jobs at a time; larger jobs come first.

    A job prints one line: RESULT and its result as JSON. Returns each job's description with its result or an error. tell: is
    called with all results so far whenever a job has ended, the latest last, so that an interrupted run keeps its results. Jobs
    that still run when this function is left are ended.
    """
    load = dict.fromkeys(gpus, 0)  # jobs on each GPU
    waiting = sorted(jobs, key=lambda job: -job["tp"] * job["pp"])
    running: list[tuple[dict[str, Any], list[int], subprocess.Popen[str]]] = []
    results = []
    with tempfile.TemporaryDirectory() as locks:
        try:
            while waiting or running:
                for job in list(waiting):
                    own = _allocate(load, job["tp"] * job["pp"], beside)
                    if own:
                        waiting.remove(job)
                        running.append((job, own, _start(job, own, module, locks)))
                for entry in [each for each in running if each[2].poll() is not None]:
                    running.remove(entry)
                    job, own, process = entry
                    for gpu in own:
                        load[gpu] -= 1
                    results.append(_result(job, process))
                    tell(results)
                time.sleep(0.05)
        finally:
            for *_, process in running:
                ended(process)
    return results


def _allocate(load: dict[int, int], count: int, beside: int) -> list[int]:
    """The `count` GPUs with the fewest jobs, which are counted in `load`; none where fewer GPUs may take another job."""
    free = sorted((gpu for gpu, jobs in load.items() if jobs < beside), key=lambda gpu: load[gpu])[:count]
    if len(free) < count:
        return []
    for gpu in free:
        load[gpu] += 1
    return sorted(free)


def _start(job: Mapping[str, Any], gpus: list[int], module: str, locks: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), _LOCKS: locks}
    command = [sys.executable, "-m", module, "--job", json.dumps(job)]
    return subprocess.Popen(command, cwd=harness.ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def _result(job: Mapping[str, Any], process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    lines = [line for line in process.stdout.read().splitlines() if line.startswith("RESULT ")]
    outcome = json.loads(lines[0][7:]) if lines else {"error": f"exit status {process.returncode}"}
    return {**{key: job[key] for key in _DESCRIPTION if key in job}, **outcome}


def keeping(name: str, out: Path, count: int, line: Callable[[dict[str, Any]], str]) -> Callable[[list[dict[str, Any]]], None]:
    """For `run_jobs` of `count` jobs: a function that prints a line for the job that has ended, and writes all results to
    out/NAME.json."""
    begin = time.monotonic()

    def tell(results: list[dict[str, Any]]) -> None:
        print(line(results[-1]), flush=True)
        seconds = round(time.monotonic() - begin, 1)
        harness.write(name, {"seconds": seconds, "asked": count, "jobs": results}, out)

    return tell


@contextmanager
def turn() -> Iterator[None]:
    """In a job: wait until its GPUs are free, and lock them."""
    folder = os.environ.get(_LOCKS)
    if folder is None:
        yield
        return
    with ExitStack() as locks:
        for gpu in sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(",")):  # in one order, so that jobs cannot deadlock
            file = locks.enter_context((Path(folder) / gpu).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
