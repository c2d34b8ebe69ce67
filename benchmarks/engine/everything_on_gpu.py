# SPDX-License-Identifier: Apache-2.0
"""Measure all of `benchmarks/results/serving`, the mixtures of experts on four GPUs and the all-reduce again, and run the checks
that need GPUs, on one host: each work on as many GPUs as it needs, beside others where GPUs are free.

    python -m benchmarks.engine.everything_on_gpu --out DIR [--only tp4,8b_http] [--seconds 1500]
    python -m benchmarks.engine.everything_on_gpu --out DIR --device cpu      a few works with the demo model, to test this script

Works that need more GPUs come first. Reports, logs and metrics of servers go to --out and, whenever a work has ended, into one file
(--packed; default: results.tgz there), so that an interrupted run keeps its results. A work that could not end within --seconds is
not started. Compiled kernels are kept in --kernels, so the first work with a model measures a start without them, and the next one
a start with them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx

from benchmarks import harness
from benchmarks.engine.gpu_jobs import run_jobs, visible_gpus
from benchmarks.serve import started

PHALANX = [sys.executable, "-m", "phalanx"]
DECODES = ("decode-1", "decode-64", "decode-256", "decode-512")
ONLINE = tuple((streams, 2 * streams, 1024, 1024) for streams in (4, 8, 16, 32, 64, 128))
"""Closed loops of as many requests as streams, as published of other engines."""


class Work(NamedTuple):
    """seconds: limit. bench: a command of `phalanx bench` with its model and options; it writes NAME.json. served: options of a
    server of `model`, which then gets the streams (concurrency, requests, prompt tokens, output tokens), after bench. python:
    arguments of the interpreter, run in the project's folder; OUT stands for --out."""

    gpus: int
    seconds: int
    bench: Sequence[str] = ()
    model: str = ""
    served: Sequence[str] = ()
    streams: Sequence[tuple[int, int, int, int]] = ()
    python: Sequence[str] = ()


def works() -> dict[str, Work]:
    fp8 = ["--dtype", "fp8", "--kv_cache_dtype", "fp8"]
    sizes = ["--max_num_tokens", "8192", "--max_seq_len", "4096"]
    many, few = [*sizes, "--max_batch_size", "512"], [*sizes, "--max_batch_size", "64"]
    full = ["--kv_cache_free_gpu_memory_fraction", "0.95"]
    fp16 = ["--dtype", "fp16", *many, "--no_enable_prefix_caching"]

    def scaling(size: str) -> list[str]:
        return ["scaling", "llama-3-70b", *fp8, "--sizes", size, *_each("--decode", DECODES[:2]), *many]

    def strategies(tp: int) -> list[str]:
        options = ["--tp_size", str(tp), "--strategies", "AUTO,NCCL", *_each("-w", DECODES)]
        return ["all", "llama-3-70b", *fp8, *options, *many, *full]

    eight = ["all", "llama-3-8b", "--dtype", "bf16", "--kv_cache_dtype", "fp8", *_each("-w", DECODES[:2])]
    streams = ((1, 2, 128, 65), (64, 64, 128, 129))
    kernels = ["tests/kernels/attention", "tests/kernels/ops", "tests/kernels/sampling"]
    return {
        "tp4": Work(4, 230, scaling("4")),
        "strategies_tp4": Work(4, 230, strategies(4)),
        "tp2_pp2": Work(4, 190, scaling("2x2")),
        "paths": Work(4, 300, python=["-m", "tests.gpu.compare_paths", "--out", "OUT"]),
        "tp1": Work(1, 330, scaling("1")),
        "tp2": Work(2, 240, scaling("2")),
        "8b": Work(1, 200, [*eight, "-w", "batch-512x1000x1000", *many, *full]),
        "strategies_tp2": Work(2, 270, strategies(2)),
        "8b_http": Work(
            1, 240, ["throughput", "llama-3-8b", *fp16, "-w", "batch-64x128x1000"], "llama-3-8b", fp16, [(64, 64, 128, 1000)] * 2
        ),
        "pp2": Work(2, 200, scaling("1x2")),
        "lengths": Work(1, 120, python=["-m", "benchmarks.models.lengths", "--out", "OUT"]),
        "405b_tp4": Work(4, 190, model="llama-3.1-405b", served=["--tp_size", "4", *fp8, *few], streams=streams),
        "405b_tp2_pp2": Work(
            4, 190, model="llama-3.1-405b", served=["--tp_size", "2", "--pp_size", "2", *fp8, *few], streams=streams
        ),
        "fp8_error": Work(1, 120, python=["-m", "benchmarks.models.fp8_error", "--device", "cuda", "--out", "OUT"]),
        "test_engine": Work(1, 300, python=_tests("gpu1", "tests/worker", "tests/bench", "tests/kernels/compiling")),
        "test_kernels": Work(1, 300, python=_tests("gpu1", *kernels, "tests/models")),
        "test_gemm": Work(1, 400, python=_tests("gpu1", "tests/kernels/gemm")),
        "test_two_stages": Work(2, 200, python=_tests("gpu2", "tests/kernels/compiling", "tests/architecture")),
        "test_two": Work(2, 400, python=[*_tests("gpu2", "tests/comm"), "-n", "0"]),
        "test_four": Work(4, 400, python=[*_tests("gpu4", "tests/comm"), "-n", "0"]),
        "wide_two": Work(2, 150, python=_ranks(2, "tests.support.comm_sequence_parallel_rank", "rows_of_405b")),
        "wide_four": Work(4, 150, python=_ranks(4, "tests.support.comm_sequence_parallel_rank", "rows_of_405b")),
        **expert_works(),
        "70b_http_tp4": Work(4, 300, model="llama-3-70b", served=["--tp_size", "4", *fp8, *many], streams=ONLINE),
        "70b_http_tp2": Work(2, 300, model="llama-3-70b", served=["--tp_size", "2", *fp8, *many], streams=ONLINE),
        "peers_four": Work(4, 200, python=[*_ranks(4, "benchmarks.comm.peers"), "--out", "OUT"]),
        "tune_four": Work(4, 600, python=_tune(4, 540)),
        "tune_two": Work(2, 600, python=_tune(2, 540)),
        "topology": Work(4, 60, python=["-m", "phalanx", "topo", "--json", "OUT/topology.json"]),
        "doctor": Work(4, 60, python=["-m", "phalanx", "doctor"]),
    }  # fmt: skip


def expert_works() -> dict[str, Work]:
    """Mixtures of experts on four GPUs, by each layout that pays or might."""
    most = ["--max_num_tokens", "8192", "--max_seq_len", "4096", "--expert_traffic", "0", "--dtype", "fp8"]
    fp8 = [*most, "--kv_cache_dtype", "fp8"]
    usual = [*_each("-w", (*DECODES[:3], "batch-512x1000x1000")), "--max_batch_size", "512"]

    def mixture(seconds: int, model: str, layout: str, *options: str) -> Work:
        return Work(4, seconds, ["all", model, *layout.split(), *options])

    replicas = [*_each("-w", ("batch-1024x1000x1000", "batch-2048x1000x1000")), "--max_batch_size", "512", *fp8]
    return {
        "mixtral_tp4": mixture(150, "mixtral-8x7b", "--tp_size 4", *usual, *fp8),
        "mixtral_split": mixture(120, "mixtral-8x7b", "--tp_size 4 --moe_expert_parallel_size 4", *usual, *fp8),
        "mixtral_groups": mixture(120, "mixtral-8x7b", "--tp_size 2 --ep_size 2", *usual, *fp8),
        "mixtral_pairs": mixture(120, "mixtral-8x7b", "--tp_size 2 --replicas 2", *replicas),
        "mixtral_replicas": mixture(150, "mixtral-8x7b", "--replicas 4", *replicas),
        "mixtral_8x22b_tp4": mixture(180, "mixtral-8x22b", "--tp_size 4", *usual, *fp8),
        "qwen_235b_tp4": mixture(200, "qwen3-235b-a22b", "--tp_size 4", *usual, *fp8),
        "qwen_235b_split": mixture(200, "qwen3-235b-a22b", "--tp_size 4 --moe_expert_parallel_size 4", *usual, *fp8),
        "deepseek_v2_tp4": mixture(200, "deepseek-v2", "--tp_size 4", *usual, *most),
    }


def trial_works() -> dict[str, Work]:
    """One work of each kind, with the demo model on a CPU."""
    small = ["--device", "cpu", "--max_batch_size", "8", "--kv_cache_bytes", "33554432"]
    return {
        "python": Work(1, 60, python=["-c", "print(1 + 1)"]),
        "pair": Work(2, 90, ["all", "demo", "--tp_size", "2", "-w", "decode-1x16x8", *small]),
        "late": Work(1, 100_000, ["all", "demo", "-w", "decode-1x16x8", *small]),
        "http": Work(1, 90, ["throughput", "demo", "-w", "batch-4x16x8", *small], "demo", small, [(2, 4, 16, 8)]),
    }


def _tests(mark: str, *paths: str) -> list[str]:
    plain = ["-m", "pytest", "-v", "-p", "no:benchmark", "-p", "no:cacheprovider", "-n", "8", "--dist", "worksteal"]
    return [*plain, "-m", mark, *paths]


def _ranks(count: int, module: str, *arguments: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", module, *arguments]


def _tune(ranks: int, seconds: int) -> list[str]:
    """The whole grid; the same command goes on where a run was cut off."""
    return [
        "-m", "phalanx", "allreduce", "tune", "--tp_size", str(ranks), "--save_csv_dir", f"OUT/tune{ranks}", "--time_limit",
        str(seconds), "--no_install",
    ]  # fmt: skip


def _within(folder: Path, word: str) -> str:
    """A word whose first part OUT stands for the folder."""
    first, *rest = word.split("/")
    return str(folder.joinpath(*rest)) if first == "OUT" else word


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("everything"))
    parser.add_argument("--packed", type=Path, help="one file with everything in --out")
    parser.add_argument("--only", default="", help="names of works; default: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all works")
    parser.add_argument("--kernels", type=Path, default=Path.home() / ".cache" / "phalanx_everything")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--job", help="(internal) run one work, described as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes are ended
    if arguments.job:
        print("RESULT " + json.dumps({"outcome": outcome(json.loads(arguments.job))}), flush=True)
        return 0
    known, gpus = known_on(arguments.device), visible_gpus() if arguments.device == "cuda" else list(range(4))
    names = [name for name in arguments.only.split(",") if name] or list(known)
    unfit = [name for name in names if name not in known or known[name].gpus > len(gpus)]
    if unfit:
        parser.error(f"{unfit[0]!r} is not a work for {len(gpus)} GPUs; --only takes {', '.join(known)}")
    out, begin = arguments.out.resolve(), time.time()  # works run in the project's folder
    out.mkdir(parents=True, exist_ok=True)
    common = {
        "pp": 1,
        "device": arguments.device,
        "out": str(out),
        "kernels": str(arguments.kernels.resolve()),
        "end": begin + arguments.seconds,
    }
    jobs = [{**common, "name": name, "tp": known[name].gpus} for name in names]

    def tell(results: list[dict[str, Any]]) -> None:
        print(f"[{time.time() - begin:6.1f}] {results[-1]['name']}: {outcome_of(results[-1])}", flush=True)
        pack(out, arguments.packed or out / "results.tgz")

    results = run_jobs(jobs, gpus, "benchmarks.engine.everything_on_gpu", tell=tell)
    return 0 if all(outcome_of(result) == "done" for result in results) else 1


def known_on(device: str) -> dict[str, Work]:
    return works() if device == "cuda" else trial_works()


def outcome_of(result: dict[str, Any]) -> str:
    return str(result.get("error") or result["outcome"])


def pack(folder: Path, file: Path) -> None:
    part = folder / "results.part"  # the final name never names an incomplete file
    with tarfile.open(part, "w:gz") as packed:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.suffix in (".json", ".txt", ".png", ".csv") and not name.parts[0].startswith("shape_"):
                packed.add(path, str(name))
    shutil.move(part, file)


def outcome(job: dict[str, Any]) -> str:
    """Runs in a process of its own, which sees only its GPUs."""
    name, work, out = job["name"], known_on(job["device"])[job["name"]], Path(job["out"])
    if time.time() + work.seconds > job["end"]:
        return f"not begun, as it may take {work.seconds} s"
    with (out / f"{name}.txt").open("wb") as log:
        try:
            status = Run(name, work, out, Path(job["kernels"]), log).all()
        except SystemExit as error:
            if error.code == 143:
                raise
            return str(error.code)
    return "done" if not status else f"exit status {status}, see {name}.txt"


class Run:
    """One work; its processes print into `log`."""

    def __init__(self, name: str, work: Work, out: Path, kernels: Path, log: IO[bytes]) -> None:
        self._name, self._work, self._out, self._log = name, work, out, log
        self._kept = [
            "--kernel_cache_dir",
            str(kernels),
            "--load_format",
            "auto" if "demo" in (*work.bench, work.model) else "dummy",
        ]
        self._end = time.monotonic() + work.seconds

    def all(self) -> int:
        """Run it; returns an exit status."""
        work, model, status = self._work, self._work.model, 0
        if work.python:
            return self._call([sys.executable, *(_within(self._out, word) for word in work.python)])
        if model not in ("", "demo"):  # a server does not take the name of a shape
            model = str(self._out / f"shape_{self._name}")
            shutil.rmtree(model, ignore_errors=True)
            status = self._call([*PHALANX, "bench", "shape", work.model, model])
        if work.bench and not status:
            command = [model if word == work.model else word for word in work.bench]
            status = self._call([*PHALANX, "bench", *command, *self._kept, "--json", self._new(".json")])
        return status or (self._serve(model) if work.served else 0)

    def _serve(self, model: str) -> int:
        """Run a server, send it the streams, and store its metrics."""
        begin, command = time.monotonic(), [*PHALANX, "serve", model, *self._work.served, *self._kept]
        seconds = self._end - begin
        with started.server(lambda port: [*command, "--port", str(port)], seconds=seconds, log=self._log) as (_, url):
            facts = f"ready after {time.monotonic() - begin:.1f} s\n"
            for number, (concurrency, requests, prompt, output) in enumerate(self._work.streams):
                counts = ["--concurrency", concurrency, "--requests", requests, "--input_len", prompt, "--output_len", output]
                offline = ["--offline", self._out / f"{self._name}.json"] if self._work.bench else []
                options = [*counts, *offline, "--warmup", min(16, concurrency), "--json", self._new(f".streams{number}.json")]
                if status := self._call([*PHALANX, "bench", "serve", url, *map(str, options)]):
                    return status
            facts += httpx.get(f"{url}/metrics", trust_env=False).text
        Path(self._new(".server.txt")).write_text(facts, encoding="utf-8")
        return 0

    def _new(self, ending: str) -> str:
        """The path of a report; an earlier one is removed."""
        path = self._out / f"{self._name}{ending}"
        path.unlink(missing_ok=True)
        return str(path)

    def _call(self, command: Sequence[str]) -> int:
        process = subprocess.Popen(command, cwd=harness.ROOT, stdout=self._log, stderr=self._log)
        try:
            return process.wait(max(self._end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            return 124
        finally:
            started.ended(process)


if __name__ == "__main__":
    sys.exit(main())
