# SPDX-License-Identifier: Apache-2.0
"""Check that a rank on a GPU that gets stuck is named, with the collective and its layer, in 10 seconds, and that the GPUs' memory
is free 5 seconds later: a kernel that spins, a collective that is skipped, each in graphs and without them, SIGSTOP and SIGKILL.
Then what it costs that GPUs say where they are: the time of a step with it and without it, in turns.

    python -m tests.gpu.stuck_ranks --out DIR        needs 2 GPUs

Dummy weights of the size of Llama 3 8B (`--layers`, `--hidden` for others).
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

from benchmarks import harness
from phalanx.engine.messages import Step
from phalanx.engine.step_times import LEAST_LIMIT
from phalanx.errors import PhalanxError
from phalanx.executor.rank_executor import RankExecutor
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
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), arguments.layers, arguments.hidden)
        for kind, graphs in FAULTS:
            results.append(inject(model, {"kind": kind, "rank": 1, "step": STEP, "call": CALL}, graphs=graphs))
            print(json.dumps(results[-1], indent=1), flush=True)
        if arguments.steps:
            results.append(cost(model, arguments.steps, arguments.rounds))
            print(json.dumps(results[-1], indent=1), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "stuck_ranks.json").write_text(json.dumps(results, indent=1))
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


if __name__ == "__main__":
    sys.exit(main())
