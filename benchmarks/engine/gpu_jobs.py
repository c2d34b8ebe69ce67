# SPDX-License-Identifier: Apache-2.0
"""Many small engines on few GPUs: jobs that are processes of their own start beside each other, and take turns at running.

Starting is the host's work; what runs in turns are the engines, since ranks that wait for one another on GPUs should have them to
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

_TURNS = "BENCH_TURNS"  # a folder with a file for each GPU, which is locked by who runs there
_DESCRIBED = ("name", "checkpoint", "dtype", "tp", "pp", "strategy")


def visible_gpus() -> list[int]:
    """The host's GPUs, or those that CUDA_VISIBLE_DEVICES names by number."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [int(number) for number in visible.split(",")]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return list(range(len(listed.splitlines())))


def run_jobs(
    jobs: list[dict[str, Any]], gpus: list[int], module: str, *, beside: int = 1, tell: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Run each job by `python -m MODULE --job` on tp x pp GPUs, of which each has at most `beside` jobs at a time. A job prints one line,
    RESULT and what it found as JSON; found here with what the job is, or with an error. Larger jobs come first. tell: is called
    with all that there is whenever a job has ended, the latest last, so that a run that is cut off has not run in vain. Jobs that
    run when this is left are ended."""
    held = dict.fromkeys(gpus, 0)
    waiting = sorted(jobs, key=lambda job: -job["tp"] * job["pp"])
    running: list[tuple[dict[str, Any], list[int], subprocess.Popen[str]]] = []
    results = []
    with tempfile.TemporaryDirectory() as turns:
        try:
            while waiting or running:
                for job in list(waiting):
                    mine = _places(held, job["tp"] * job["pp"], beside)
                    if mine:
                        waiting.remove(job)
                        running.append((job, mine, _start(job, mine, module, turns)))
                for entry in [each for each in running if each[2].poll() is not None]:
                    running.remove(entry)
                    job, mine, process = entry
                    for gpu in mine:
                        held[gpu] -= 1
                    results.append(_result(job, process))
                    tell(results)
                time.sleep(0.05)
        finally:
            for *_, process in running:
                ended(process)
    return results


def _places(held: dict[int, int], count: int, beside: int) -> list[int]:
    """The GPUs with the fewest jobs, counted in `held`; none if there are not enough with room."""
    room = sorted((gpu for gpu, jobs in held.items() if jobs < beside), key=lambda gpu: held[gpu])[:count]
    if len(room) < count:
        return []
    for gpu in room:
        held[gpu] += 1
    return sorted(room)


def _start(job: Mapping[str, Any], gpus: list[int], module: str, turns: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), _TURNS: turns}
    command = [sys.executable, "-m", module, "--job", json.dumps(job)]
    return subprocess.Popen(command, cwd=harness.ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def _result(job: Mapping[str, Any], process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    lines = [line for line in process.stdout.read().splitlines() if line.startswith("RESULT ")]
    outcome = json.loads(lines[0][7:]) if lines else {"error": f"exit status {process.returncode}"}
    return {**{key: job[key] for key in _DESCRIBED if key in job}, **outcome}


def keeping(name: str, out: Path, count: int, line: Callable[[dict[str, Any]], str]) -> Callable[[list[dict[str, Any]]], None]:
    """For `run_jobs` of `count` jobs: a function that prints the line of the job that has ended, and writes all there is as
    out/NAME.json."""
    begin = time.monotonic()

    def tell(results: list[dict[str, Any]]) -> None:
        print(line(results[-1]), flush=True)
        seconds = round(time.monotonic() - begin, 1)
        harness.write(name, {"seconds": seconds, "asked": count, "jobs": results}, out)

    return tell


@contextmanager
def turn() -> Iterator[None]:
    """In a job: hold its GPUs, once nobody else runs there."""
    folder = os.environ.get(_TURNS)
    if folder is None:
        yield
        return
    with ExitStack() as held:
        for gpu in sorted(os.environ["CUDA_VISIBLE_DEVICES"].split(",")):  # in one order, so that nobody waits in a circle
            file = held.enter_context((Path(folder) / gpu).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
