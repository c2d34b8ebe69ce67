# SPDX-License-Identifier: Apache-2.0
"""Check that a rank on a GPU that gets stuck is named, with the collective and its layer, in 10 seconds, and that the GPUs' memory
is free 5 seconds later: a kernel that spins, a collective that is skipped, each in graphs and without them, SIGSTOP and SIGKILL.
Then what it costs that GPUs say where they are: the time of a step with it and without it, in turns.

    python -m tests.gpu.stuck_ranks --out DIR        needs 2 GPUs
    python -m tests.gpu.stuck_ranks --out DIR --one_gpu [--step_us US]

Dummy weights of the size of Llama 3 8B (`--layers`, `--hidden` for others). `--one_gpu` measures the cost alone, of the
kernels: the all-reduces of a step of two ranks, both on one GPU, in a graph. Data comes sooner there than over a link, so that less
of a mark's time is hidden; `--step_us` is what a step without marks takes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pynvml
import torch

from benchmarks import harness
from phalanx.comm import oneshot
from phalanx.comm.device_marks import DeviceMarks
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.symmetric import BOARD_PLACES, SymmetricWorkspace
from phalanx.engine.messages import Step
from phalanx.engine.step_times import LEAST_LIMIT
from phalanx.errors import PhalanxError
from phalanx.executor.rank_executor import RankExecutor
from phalanx.layout.rank_progress import ALL_REDUCE, RankProgress
from tests.support.engine_drive import Drive, all_gone, options, pids
from tests.support.faulty_rank import FaultyLauncher

BLOCK = 16
LIMIT_SECONDS, FREE_SECONDS = 10.0, 5.0
STEP, CALL = 4, 5
"""Where it goes wrong: the embedding has the first call, each layer two."""
LAYER = (CALL - 1) // 2
PROMPTS = [[3 + 7 * row + token for token in range(12)] for row in range(2)]
FAULTS = [(kind, graphs) for kind in ("spin", "skip") for graphs in (True, False)] + [("stop", True), ("kill", True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=1500, help="of a measurement of the cost; 0 for none")
    parser.add_argument("--rounds", type=int, default=3, help="of both measurements")
    parser.add_argument("--one_gpu", action="store_true", help="the cost alone, without ranks")
    parser.add_argument("--step_us", type=float, help="of a decode step, for the percentage of --one_gpu")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    if arguments.one_gpu:
        results.append(kernel_cost(arguments))
        print(json.dumps(results[-1], indent=1), flush=True)
        return written(arguments.out, results)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), arguments.layers, arguments.hidden)
        for kind, graphs in FAULTS:
            results.append(inject(model, {"kind": kind, "rank": 1, "step": STEP, "call": CALL}, graphs=graphs))
            print(json.dumps(results[-1], indent=1), flush=True)
        if arguments.steps:
            results.append(cost(model, arguments.steps, arguments.rounds))
            print(json.dumps(results[-1], indent=1), flush=True)
    return written(arguments.out, results)


def written(folder: Path, results: list[dict[str, Any]]) -> int:
    """The exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stuck_ranks.json").write_text(json.dumps(results, indent=1))
    return 0 if all(result["passed"] for result in results) else 1


def write_config(folder: Path, layers: int, hidden: int) -> Path:
    """A Llama of this size, for dummy weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": hidden * 7 // 2, "num_attention_heads": hidden // 128, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def executor_of(model: Path, fault: dict[str, Any], *, graphs: bool, max_seq_len: int = 128) -> RankExecutor:
    """One of two ranks, with a fault."""
    executor = RankExecutor(options(
        model, device="cuda", dtype="bf16", tensor_parallel_size=2, kv_block_size=BLOCK, cuda_graphs=graphs, load_format="dummy",
        max_seq_len=max_seq_len, device_progress=True, launcher="tests.support.faulty_rank:FaultyLauncher",
    ))  # fmt: skip
    launcher = executor._launcher
    assert isinstance(launcher, FaultyLauncher)
    launcher.fault = fault
    return executor


def inject(model: Path, fault: dict[str, Any], *, graphs: bool) -> dict[str, Any]:
    """What becomes of an engine one of whose ranks goes wrong."""
    before, executor, began, error = used_bytes(), executor_of(model, fault, graphs=graphs), time.monotonic(), "none"
    executor.start()
    ranks, started, submitted, steps = pids(executor), time.monotonic() - began, 0.0, 0

    def submit(step: Step) -> None:
        nonlocal submitted, steps
        submitted, steps = time.monotonic(), step.number
        step.limit = LEAST_LIMIT
        executor.submit(step)

    try:
        Drive(submit, executor.collect, blocks=40, block=BLOCK).generate(PROMPTS, STEP + 5)
    except PhalanxError as raised:
        error = str(raised)
    seconds, now = time.monotonic() - submitted, time.monotonic()
    gone = all_gone(ranks, 2 * FREE_SECONDS)
    while used_bytes() > before + (256 << 20) and time.monotonic() < now + 4 * FREE_SECONDS:
        time.sleep(0.05)
    freed = time.monotonic() - now
    executor.shutdown()
    place = f"all_reduce of the tensor-parallel group in layer {LAYER}"
    named = {"spin": ("rank 1 has not come to", place), "skip": ("rank 1 (", f"skipped {place}")}
    words = named.get(fault["kind"], ("rank 1 ",))
    passed = all(each in error for each in words) and seconds < LIMIT_SECONDS and freed < FREE_SECONDS and gone
    return {
        "kind": fault["kind"], "graphs": graphs, "passed": passed, "named after s": round(seconds, 2),
        "memory free after s": round(freed, 2), "processes gone": gone, "step": steps, "start s": round(started, 1), "error": error,
    }  # fmt: skip


def used_bytes() -> int:
    """Of all GPUs that this process may use."""
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = range(pynvml.nvmlDeviceGetCount()) if not visible else map(int, visible.split(","))
    return sum(int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used) for index in indices)


def cost(model: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a decode step with and without the words that kernels write."""
    times: dict[str, list[float]] = {"marked": [], "unmarked": []}
    for _ in range(rounds):
        for name, each in times.items():
            fault = {"kind": "none", "rank": -1, **({"everywhere": "unmarked"} if name == "unmarked" else {})}
            executor = executor_of(model, fault, graphs=True, max_seq_len=steps + 64)
            executor.start()
            drive = Drive(executor.submit, executor.collect, blocks=2 * (steps // BLOCK + 8), block=BLOCK)
            drive.generate(PROMPTS, 100, ahead=True)
            begin = time.monotonic()
            drive.generate(PROMPTS, steps, ahead=True)
            each.append(1e6 * (time.monotonic() - begin) / steps)
            executor.shutdown()
    ratio = median(times["marked"]) / median(times["unmarked"])
    rounded = {f"step us, {name}": [round(value, 1) for value in values] for name, values in times.items()}
    return {"kind": "cost", **rounded, "percent": round(100 * (ratio - 1), 3), "passed": ratio < 1.002}


class RanksOfOneGpu:
    """The all-reduces of a decode step of two ranks, both on one GPU, each rank on a stream of its own."""

    def __init__(self, hidden: int, layers: int, device: torch.device, sm: int, num_sms: int, *, marked: bool) -> None:
        memory = [torch.full((16 * len(PROMPTS) * hidden,), -1, dtype=torch.int32, device=device) for _ in range(2)]
        addresses, half = tuple(each.data_ptr() for each in memory), len(memory[0]) // 8
        self.memory, self.progress, self.calls = memory, [RankProgress() for _ in memory], 2 * layers + 1
        self.marks = [DeviceMarks(each, device) if marked else None for each in self.progress]
        self.spaces = [
            SymmetricWorkspace(
                rank, 2, addresses, half, torch.zeros(2, dtype=torch.int32, device=device),
                torch.zeros(BOARD_PLACES, 2, dtype=torch.int64, device=device), num_sms, sm, tuple(memory),
                tuple if marks is None else marks.of_kernel,
            )
            for rank, marks in enumerate(self.marks)
        ]  # fmt: skip
        for progress, marks in zip(self.progress, self.marks, strict=True):
            progress.device = marks
        self.x = torch.ones(len(PROMPTS), hidden, dtype=torch.bfloat16, device=device)
        self.fusion = ResidualRmsNorm(self.x, self.x[0], 1e-5)

    def call(self, rank: int) -> None:
        """One all-reduce of a rank."""
        marker = self.progress[rank].marker("tp")
        marker.call(ALL_REDUCE, lambda: oneshot.all_reduce_norm(self.x, self.fusion, self.spaces[rank]))

    def load(self) -> None:
        """Compile and load both ranks' kernels: here each takes zeros for its peer's data, since a kernel that waits may keep the
        next one from being loaded."""
        for rank in range(2):
            for each in self.memory:
                each.zero_()
            self.call(rank)
            torch.cuda.synchronize()
        for each in self.memory:
            each.fill_(-1)
        for space in self.spaces:
            space.epoch.zero_()

    def graph(self) -> torch.cuda.CUDAGraph:
        """Of all calls of a step."""
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        for progress in self.progress:
            progress.begin(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            other.wait_stream(torch.cuda.current_stream())
            for _ in range(self.calls):
                self.call(0)
                with torch.cuda.stream(other):
                    self.call(1)
            torch.cuda.current_stream().wait_stream(other)
        for progress in self.progress:
            progress.finished = 1  # nobody looks at a late step
        return graph

    def begin(self, step: int) -> None:
        """As before each step of both ranks."""
        for marks in self.marks:
            if marks is not None:
                marks.begin(step)


def kernel_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a step's all-reduces with and without marks, its beginning too."""
    device, times = torch.device("cuda", 0), dict[str, list[float]]()
    properties = torch.cuda.get_device_properties(device)
    sm, num_sms, sides = 10 * properties.major + properties.minor, properties.multi_processor_count, {}
    for name in ("marked", "unmarked"):
        ranks = RanksOfOneGpu(arguments.hidden, arguments.layers, device, sm, num_sms, marked=name == "marked")
        ranks.load()
        sides[name] = ranks, ranks.graph()
    for _ in range(arguments.rounds):
        for name, (ranks, graph) in sides.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for step in range(arguments.steps + 10):
                if step == 10:
                    begin.record()
                ranks.begin(step)
                graph.replay()
            end.record()
            end.synchronize()
            times.setdefault(name, []).append(1000 * begin.elapsed_time(end) / arguments.steps)
    more = median(times["marked"]) - median(times["unmarked"])
    rounded = {f"all-reduces us, {name}": [round(value, 2) for value in values] for name, values in times.items()}
    percent = None if arguments.step_us is None else round(100 * more / arguments.step_us, 3)
    marks = sides["marked"][0].marks[0]
    assert marks is not None
    marks.look()
    counted = int(marks._copy[0]) & 0xFFFFFFFF >= sides["marked"][0].calls * arguments.steps
    return {
        "kind": "cost of kernels", **rounded, "more us in a step": round(more, 2), "percent": percent,
        "calls": 2 * arguments.layers + 1, "passed": counted and (percent is None or percent < 0.2),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
