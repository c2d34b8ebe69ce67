# SPDX-License-Identifier: Apache-2.0
"""All rows of `benchmarks/results/serving` again, and what only GPUs can check, on one host: each on as many GPUs as it needs,
beside others where there is room.

    python benchmarks/serve/rows.py --out DIR [--only tp4,8b_http] [--seconds 1500]
    python benchmarks/serve/rows.py --out DIR --device cpu       the demo model and short work, to try this script itself

Rows that are asked first start first. Reports, logs and servers' metrics go to --out and, whenever a row has ended, into one file
(--packed; results.tgz there), so that a run that is cut off has not run in vain. What could not end within --seconds is not begun.
Compiled kernels are kept in --kernels, so that the first row with a model says what a start takes without them, and the next with
them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PHALANX = [sys.executable, "-m", "phalanx"]
DECODES = ("decode-1", "decode-64", "decode-256", "decode-512")
PORT = 8300
"""Of the first GPU's server; that of another has its number more."""


class Row(NamedTuple):
    """seconds: at most. bench: a verb of `phalanx bench`, its model and options, which writes NAME.json. served: options of a
    server of `model`, which streams (concurrency, requests, prompt, output tokens) then ask; bench goes before. python: words for
    the interpreter, in the project's folder; OUT stands for --out."""

    gpus: int
    seconds: int
    bench: Sequence[str] = ()
    model: str = ""
    served: Sequence[str] = ()
    streams: Sequence[tuple[int, int, int, int]] = ()
    python: Sequence[str] = ()


def rows() -> dict[str, Row]:
    fp8 = ["--dtype", "fp8", "--kv_cache_dtype", "fp8"]
    sizes = ["--max_num_tokens", "8192", "--max_seq_len", "4096"]
    many, few = [*sizes, "--max_batch_size", "512"], [*sizes, "--max_batch_size", "64"]
    full = ["--kv_cache_free_gpu_memory_fraction", "0.95"]
    fp16 = ["--dtype", "fp16", *many, "--no_enable_prefix_caching"]

    def scaling(size: str) -> list[str]:
        return ["scaling", "llama-3-70b", *fp8, "--sizes", size, *_each("--decode", DECODES[:2]), *many]

    def strategies(tp: int) -> list[str]:
        asked = ["--tp_size", str(tp), "--strategies", "AUTO,NCCL", *_each("-w", DECODES)]
        return ["all", "llama-3-70b", *fp8, *asked, *many, *full]

    eight = ["all", "llama-3-8b", "--dtype", "bf16", "--kv_cache_dtype", "fp8", *_each("-w", DECODES[:2])]
    streams = ((1, 2, 128, 65), (64, 64, 128, 129))
    return {
        "tp4": Row(4, 230, scaling("4")),
        "strategies_tp4": Row(4, 230, strategies(4)),
        "tp2_pp2": Row(4, 190, scaling("2x2")),
        "paths": Row(4, 300, python=["benchmarks/engine/paths_on_gpu.py", "--out", "OUT"]),
        "tp1": Row(1, 330, scaling("1")),
        "tp2": Row(2, 240, scaling("2")),
        "8b": Row(1, 200, [*eight, "-w", "batch-512x1000x1000", *many, *full]),
        "strategies_tp2": Row(2, 270, strategies(2)),
        "8b_http": Row(
            1, 240, ["throughput", "llama-3-8b", *fp16, "-w", "batch-64x128x1000"], "llama-3-8b", fp16, [(64, 64, 128, 1000)] * 2
        ),
        "pp2": Row(2, 200, scaling("1x2")),
        "lengths": Row(1, 120, python=["benchmarks/models/lengths.py", "--out", "OUT"]),
        "405b_tp4": Row(4, 190, model="llama-3.1-405b", served=["--tp_size", "4", *fp8, *few], streams=streams),
        "405b_tp2_pp2": Row(
            4, 190, model="llama-3.1-405b", served=["--tp_size", "2", "--pp_size", "2", *fp8, *few], streams=streams
        ),
        "fp8_error": Row(1, 120, python=["benchmarks/models/fp8_error.py", "--device", "cuda", "--out", "OUT"]),
        "test_engine": Row(1, 300, python=_tests("gpu1", "tests/engine", "tests/bench", "tests/kernels/test_compiling.py")),
        "test_kernels": Row(1, 300, python=_tests("gpu1", "tests/kernels/attention", "tests/kernels/between", "tests/models")),
        "test_products": Row(1, 400, python=_tests("gpu1", "tests/kernels/products", "tests/kernels/test_scaled_mm.py")),
        "test_two_stages": Row(2, 200, python=_tests("gpu2", "tests/kernels/test_compiling.py")),
        "test_two": Row(2, 400, python=[*_tests("gpu2", "tests/comm"), "-n", "0"]),
        "test_four": Row(4, 400, python=[*_tests("gpu4", "tests/comm"), "-n", "0"]),
        "wide_two": Row(2, 150, python=_ranks(2, "tests.comm.rows.owned_rank", "wide")),
        "wide_four": Row(4, 150, python=_ranks(4, "tests.comm.rows.owned_rank", "wide")),
    }  # fmt: skip


def trial_rows() -> dict[str, Row]:
    """Of each kind one, by the demo model on CPU."""
    small = ["--device", "cpu", "--max_batch_size", "8", "--kv_cache_bytes", "33554432"]
    return {
        "python": Row(1, 60, python=["-c", "print(1 + 1)"]),
        "pair": Row(2, 90, ["all", "demo", "--tp_size", "2", "-w", "decode-1x16x8", *small]),
        "late": Row(1, 100_000, ["all", "demo", "-w", "decode-1x16x8", *small]),
        "http": Row(1, 90, ["throughput", "demo", "-w", "batch-4x16x8", *small], "demo", small, [(2, 4, 16, 8)]),
    }


def _tests(mark: str, *paths: str) -> list[str]:
    return [
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:benchmark",
        "-p",
        "no:cacheprovider",
        "-n",
        "8",
        "--dist",
        "worksteal",
        "-m",
        mark,
        *paths,
    ]


def _ranks(count: int, module: str, check: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", module, check]


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packed", type=Path, help="one file with all that is in --out")
    parser.add_argument("--only", default="", help="names of rows; all otherwise")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all")
    parser.add_argument("--kernels", type=Path, default=Path.home() / ".cache" / "phalanx_rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--row", help="(internal) run one row here")
    asked = parser.parse_args()
    asked.out, asked.kernels = asked.out.resolve(), asked.kernels.resolve()  # rows run in the project's folder
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    known = rows() if asked.device == "cuda" else trial_rows()
    if asked.row:
        return run_row(asked.row, known[asked.row], asked.out, asked.kernels)
    names = [name for name in asked.only.split(",") if name] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no row is called {unknown[0]!r}; there are {', '.join(known)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    return Run(asked, {name: known[name] for name in names}).all()


class Run:
    """Rows under way, and those that wait for GPUs."""

    def __init__(self, asked: argparse.Namespace, waiting: dict[str, Row]) -> None:
        self._asked, self._waiting, self._begin = asked, waiting, time.monotonic()
        self._free = set(range(asked.gpus))
        self._running: dict[str, tuple[subprocess.Popen[bytes], list[int]]] = {}
        self._failed: list[str] = []

    def all(self) -> int:
        try:
            while self._waiting or self._running:
                self._start()
                for name in [name for name, (process, _) in self._running.items() if process.poll() is not None]:
                    self._ended(name)
                time.sleep(0.2)
        finally:
            for process, _ in self._running.values():
                _end(process)
        return 1 if self._failed else 0

    def _start(self) -> None:
        """The first that waits goes first: one that needs many GPUs is not overtaken for ever."""
        for name, row in list(self._waiting.items()):
            if self._seconds() + row.seconds > self._asked.seconds or row.gpus > self._asked.gpus:
                self._say(f"{name}: not begun, as it may take {row.seconds} s on {row.gpus} GPUs")
                self._failed.append(name)
                del self._waiting[name]
                continue
            if row.gpus > len(self._free):
                return
            gpus = sorted(self._free)[: row.gpus]
            self._free.difference_update(gpus)
            del self._waiting[name]
            command = [sys.executable, __file__, "--row", name, *self._options()]
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if self._asked.device == "cuda" else {"GPU": str(gpus[0])}
            with (self._asked.out / f"{name}.txt").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **shown}, start_new_session=True)
            self._running[name] = process, gpus

    def _options(self) -> list[str]:
        return ["--out", str(self._asked.out), "--kernels", str(self._asked.kernels), "--device", self._asked.device]

    def _ended(self, name: str) -> None:
        process, gpus = self._running.pop(name)
        self._free.update(gpus)
        self._say(f"{name}: {'done' if process.returncode == 0 else f'exit status {process.returncode}'}, on {gpus}")
        if process.returncode:
            self._failed.append(name)
            print("    " + "\n    ".join((self._asked.out / f"{name}.txt").read_text("utf-8", "replace").splitlines()[-6:]))
        _pack(self._asked.out, self._asked.packed or self._asked.out / "results.tgz")

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _say(self, text: str) -> None:
        print(f"[{self._seconds():6.1f}] {text}", flush=True)


def _pack(folder: Path, file: Path) -> None:
    part = folder / "results.part"  # no half of a file is ever called by its name
    with tarfile.open(part, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".txt", ".png"):
                packed.add(path, path.name)
    shutil.move(part, file)


def run_row(name: str, row: Row, out: Path, kernels: Path) -> int:
    """In a process of its own, which sees its GPUs alone."""
    end, kept = time.monotonic() + row.seconds, ["--kernel_cache_dir", str(kernels)]
    report = out / f"{name}.json"
    report.unlink(missing_ok=True)
    if row.python:
        return _run([sys.executable, *(str(out) if word == "OUT" else word for word in row.python)], end)
    model, status = _folder(name, row, out, end)
    if row.bench and not status:
        asked = [model if word == row.model else word for word in row.bench]
        status = _run([*PHALANX, "bench", *asked, *kept, "--load_format", _weights(row), "--json", str(report)], end)
    return status or (_serve(name, row, model, out, kept, end) if row.served else 0)


def _folder(name: str, row: Row, out: Path, end: float) -> tuple[str, int]:
    """What a server is to serve, as it serves no bare shape; and an exit status."""
    if row.model in ("", "demo"):
        return row.model, 0
    folder = out / f"shape_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    return str(folder), _run([*PHALANX, "bench", "shape", row.model, str(folder)], end)


def _weights(row: Row) -> str:
    return "auto" if "demo" in (*row.bench, row.model) else "dummy"


def _serve(name: str, row: Row, model: str, out: Path, kept: Sequence[str], end: float) -> int:
    """Start a server, let streams ask it, keep its metrics, and end it."""
    port = PORT + int(os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("GPU", "0")).split(",")[0])
    url, begin = f"http://localhost:{port}", time.monotonic()
    server = subprocess.Popen([*PHALANX, "serve", model, "--port", str(port), "--load_format", _weights(row), *row.served, *kept])
    try:
        while not _answer(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > end:
                return 1
            time.sleep(0.1)
        facts = f"ready after {time.monotonic() - begin:.1f} s\n"
        for number, (concurrency, requests, prompt, output) in enumerate(row.streams):
            report = out / f"{name}.streams{number}.json"
            report.unlink(missing_ok=True)
            work = ["--concurrency", concurrency, "--requests", requests, "--input_len", prompt, "--output_len", output]
            offline = ["--offline", out / f"{name}.json"] if row.bench else []
            asked = [*work, *offline, "--warmup", min(16, concurrency), "--json", report]
            if status := _run([*PHALANX, "bench", "serve", url, *map(str, asked)], end):
                return status
        (out / f"{name}.server.txt").write_text(facts + (_answer(f"{url}/metrics") or ""), encoding="utf-8")
        return 0
    finally:
        _end(server, group=False)


def _answer(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as found:
            text: str = found.read().decode()
            return text or "ok"
    except OSError:
        return None


def _run(command: Sequence[str], end: float) -> int:
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(max(end - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
        print(f"cut off: {' '.join(command[:6])} ...", flush=True)
        _end(process, group=False)
        return 124


def _end(process: subprocess.Popen[Any], *, group: bool = True) -> None:
    """Ask it to end, and see to it."""
    for word, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            (os.killpg if group else os.kill)(process.pid, word)
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


if __name__ == "__main__":
    sys.exit(main())
