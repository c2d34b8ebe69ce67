# SPDX-License-Identifier: Apache-2.0
"""One decode step of Llama-3-8B shapes in bf16 on one GPU, eager and from graphs: same tokens, time per token, kernels by time.

0. gemms: one row times each of the model's matrices by the kernels that there are, over copies that no cache holds.
1. tokens: a small checkpoint decodes greedily in batches of several sizes; graphs and eager steps must give the same tokens.
2. tpot: through the total engine, (t(129 tokens) - t(1 token)) / 128 at input 128, best of 2, as the peers were measured.
3. prompts: steps of one prompt, which the first token waits for, from graphs and eager: milliseconds by the wall clock, of the host
   in `run`, of the kernels; the host's functions by time; whether both modes give the same token, and what graphs take to capture.
4. steps: the runner alone, one step ahead as the engine keeps it, milliseconds per step by the wall clock; and the kernels of one
   replayed step by time (torch's profiler), with the bytes that the step must read over the time.

    python -m benchmarks.engine.decode_step --out DIR [--parts gemms,tokens,prompts,steps,tpot] [--requests 1,64]
        [--prompts 16,128,256]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from phalanx import LLM, SamplingParams
from phalanx.bench import shapes
from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.engine.messages import SlotAssignment, Step, StepBatch, StepResult, StepRow
from phalanx.models import registry, weights
from phalanx.models.cache import empty_caches
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from phalanx.worker.cuda_graphs import CudaGraphCapturer
from phalanx.worker.graph_buffers import GraphSize
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.sampler import Sampler

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1000)
PROMPT, STEPS = 128, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--parts", default="gemms,tokens,steps,tpot")
    parser.add_argument("--requests", default="1,64")
    parser.add_argument("--prompts", default="16,128,256", help="tokens of each prompt of the part `prompts`")
    parser.add_argument("--modes", default="graphs,eager")
    parser.add_argument("--shape", default="llama-3-8b", help="of `steps` and `prompts`, as `phalanx bench shape` names it")
    parser.add_argument("--ranks", type=int, default=1, help="these run what one of so many tensor-parallel ranks computes")
    parser.add_argument("--fp8", action="store_true", help="these with weights in FP8")
    parser.add_argument("--fp8_cache", action="store_true", help="these with the KV cache in FP8")
    parser.add_argument("--name", default="decode_step", help="of the file of figures")
    args = parser.parse_args()
    parts, modes = args.parts.split(","), args.modes.split(",")
    requests = [int(count) for count in args.requests.split(",")]
    figures: dict[str, Any] = {}
    for part, measure in (
        ("gemms", gemms),
        ("tokens", tokens),
        ("prompts", lambda: prompts_of(args)),
        ("steps", lambda: steps(args)),
        ("tpot", lambda: tpot(requests, modes)),
    ):
        if part in parts:
            begin = time.monotonic()
            figures[part] = measure()
            print(f"{part}: {time.monotonic() - begin:.1f} s\n{show(part, figures[part])}", flush=True)
            harness.write(args.name, figures, args.out)
    return 0 if figures.get("tokens", {"equal": True})["equal"] else 1


def show(part: str, figure: dict[str, Any]) -> str:
    if part not in ("steps", "prompts"):
        return json.dumps(figure)
    lines = []
    for name, values in figure.items():
        lines.append(f"{name}: " + json.dumps({key: value for key, value in values.items() if key not in ("kernels", "functions")}))
        lines += values.get("functions", [])
        lines += [f"  {k['us']:9.1f} us {k['calls']:4} x  {k['name'][:100]}" for k in values.get("kernels", [])[:16]]
    return "\n".join(lines)


def make_runner(
    folder: Path, slots: int, *, graphs: bool, dummy: bool, captured: Callable[[list[GraphSize]], Sequence[GraphSize]],
    fp8: bool = False, fp8_cache: bool = False, blocks: int | None = None, longest: int = 320, tokens: int = 0,
) -> ModelRunner:  # fmt: skip
    """captured: the sizes of graphs, of those there are. blocks: 20 for each slot if None is given. longest: tokens of a request.
    tokens: of a step from a graph that also takes prompts, at most."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    shape = ModelShape.from_folder(folder)
    model = registry.build(
        shape,
        range(shape.num_layers),
        LayerContext(Solo(), dtype, device, quantization=ON_LOAD if fp8 else None, kv_cache_dtype="fp8" if fp8_cache else "model"),
    )
    if dummy:
        weights.dummy(model, 0)
    else:
        weights.load(model, folder)
    num_blocks = slots * 20 + 1 if blocks is None else blocks
    caches = empty_caches(model.declared_caches(), num_blocks, 16, device)
    runner = ModelRunner(
        model, caches, select_backend(device, dtype, shape.head_dim, shape.latent), Sampler(slots, shape.vocab_size, device),
        Solo(),
        max_batch_size=slots, max_seq_len=longest, block_size=16, dtype=dtype, device=device,
        capturer=CudaGraphCapturer(device) if graphs else None, max_num_tokens=tokens,
    )  # fmt: skip
    # Kinds of layers are met in an eager step.
    runner.run(
        StepBatch(admitted=[SlotAssignment(0, [5], 1, GREEDY, 1)], rows=[StepRow(0, 0, 1, [5], [0], samples=True)])
    ).results()
    runner.run(StepBatch(released=[0]))
    begin = time.monotonic()
    done = list(runner.capture(captured(runner.graphs.sizes))) if runner.graphs is not None else []
    if done:
        print(f"captured {len(done)} sizes in {time.monotonic() - begin:.2f} s", flush=True)
    return runner


VARIANTS = [
    (4, 1024, 4),
    (2, 1024, 4),
    (1, 1024, 2),
    (1, 1024, 4),
    (2, 2048, 4),
    (4, 512, 4),
    (8, 512, 4),
    (8, 1024, 8),
    (4, 2048, 8),
]
"""(rows, block, warps) of `gemv`."""


def gemms() -> dict[str, Any]:
    """Microseconds and TB/s."""
    from functools import partial

    import torch.nn.functional as F

    from phalanx.kernels.gemm.gemv import gemv

    timings: dict[str, Any] = {}
    sizes = {**harness.SHAPES["8b"], "head": harness.LM_HEAD_8B}
    candidates: dict[str, Any] = {"torch": F.linear}
    candidates |= {str(v): partial(gemv, rows=v[0], block=v[1], warps=v[2]) for v in VARIANTS}
    for name, (outputs, inputs) in sizes.items():
        count = max(2, (600 << 20) // (2 * outputs * inputs))
        matrices = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        x = torch.randn(1, inputs, dtype=torch.bfloat16, device="cuda")
        wanted = (x.double() @ matrices[0].double().t()).float()
        row: dict[str, Any] = {}
        for label, candidate in candidates.items():
            off = ((candidate(x, matrices[0]).float() - wanted).norm() / wanted.norm()).item()
            if not off < 5e-3:
                row[label] = f"wrong: {off}"
                continue
            microseconds = harness.graph_us([partial(candidate, x, matrix) for matrix in matrices], replays=9)
            row[label] = [round(microseconds, 2), round(2 * outputs * inputs / microseconds / 1e6, 2)]
        timings[name] = row
    return timings


def tokens() -> dict[str, Any]:
    """Greedy tokens of graphs against the eager path's."""
    import tests.support.engine_drive as drive_module
    from tests.support.checkpoints import write_checkpoint

    drive_module.BLOCK = 16
    with tempfile.TemporaryDirectory() as parent:
        folder = write_checkpoint(
            Path(parent) / "llama", "llama", hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=128, std=0.05
        )
        timings: dict[bool, list[Any]] = {}
        for graphs in (True, False):
            runner = make_runner(folder, 44, graphs=graphs, dummy=False, captured=list)
            results = deque[StepResult]()

            def submit(step: Step, runner: ModelRunner = runner, results: deque[StepResult] = results) -> None:
                results.append(StepResult(step.number, [runner.run(step.batches[0]).results()[0] or []]))

            def collect(results: deque[StepResult] = results) -> list[StepResult]:
                return [results.popleft()] if results else []

            drive = drive_module.Drive(submit, collect, blocks=880)
            timings[graphs] = [
                drive.generate(drive_module.prompts(count, seed=count), 40, ahead=ahead)
                for count in (1, 3, 17, 40)
                for ahead in (False, True)
            ]
    rows = [(a, b) for left, right in zip(timings[True], timings[False], strict=True) for a, b in zip(left, right, strict=True)]
    return {"equal": timings[True] == timings[False], "requests": len(rows), "different": sum(a != b for a, b in rows)}


def part_of(folder: Path, ranks: int) -> Path:
    """The model in `folder` cut to what one of `ranks` tensor-parallel ranks computes, as a model of its own: the step of a rank
    without its collectives."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        config[name] //= ranks
    file.write_text(json.dumps(config))
    return folder


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """The runner alone."""
    requests = [int(count) for count in args.requests.split(",")]
    timings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = part_of(shapes.write(args.shape, Path(parent) / "model"), args.ranks)
        for mode in args.modes.split(","):
            runner = make_runner(
                folder,
                max(requests),
                graphs=mode == "graphs",
                dummy=True,
                captured=lambda _: [GraphSize(count, count) for count in requests],
                fp8=args.fp8,
                fp8_cache=args.fp8_cache,
            )
            for count in requests:
                timings[f"{mode} {count}"] = step_times(runner, count, profiled=mode == "graphs")
            del runner
            torch.cuda.empty_cache()
    return timings


def prompts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one prompt each. Slots and graphs are those of a server, whose padding is in the figures, up to what the longest
    prompt needs."""
    counts = [int(count) for count in args.prompts.split(",")]
    timings: dict[str, Any] = {}
    tokens: dict[str, list[int | None]] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = part_of(shapes.write(args.shape, Path(parent) / "model"), args.ranks)
        for mode in args.modes.split(","):
            runner = make_runner(
                folder, 256, graphs=mode == "graphs", dummy=True,
                captured=lambda sizes: [size for size in sizes if size.prefill_rows],
                fp8=args.fp8, fp8_cache=args.fp8_cache, blocks=max(counts) // 16 + 3, longest=max(counts) + 16,
                tokens=max(counts),
            )  # fmt: skip
            for count in counts:
                figures, token = prompt_times(runner, count)
                timings[f"{mode} {count}"] = figures
                tokens.setdefault(str(count), []).append(token)
            del runner
            torch.cuda.empty_cache()
    return {**timings, "same tokens": {count: len(set(sampled)) == 1 for count, sampled in tokens.items()}}


def prompt_times(runner: ModelRunner, count: int) -> tuple[dict[str, Any], int | None]:
    """The figures, and the token."""
    prompt, sampled = list(range(100, 100 + count)), []

    def step() -> tuple[float, float]:
        """Seconds until the token is there, and seconds in `run`."""
        admitted = [SlotAssignment(0, prompt, count, GREEDY, 1)]
        rows = [StepRow(0, 0, count, prompt, list(range(1, count // 16 + 2)), samples=True)]
        begin = time.perf_counter()
        output = runner.run(StepBatch(admitted=admitted, rows=rows))
        host = time.perf_counter() - begin
        sampled.append((output.results()[0] or [])[0].tokens[0])
        total = time.perf_counter() - begin
        runner.run(StepBatch(released=[0]))
        return total, host

    total, host = min(step() for _ in range(6))
    profiler = cProfile.Profile()
    profiler.enable()
    step()
    profiler.disable()
    figures = {
        "ms": round(total * 1e3, 2), "host_ms": round(host * 1e3, 2), **profile(step),
        "functions": functions(pstats.Stats(profiler)),
    }  # fmt: skip
    return figures, sampled[-1]


def functions(stats: pstats.Stats) -> list[str]:
    """The 25 that take longest by themselves: milliseconds, calls, where."""
    rows = sorted(stats.stats.items(), key=lambda row: -row[1][2])[:25]  # type: ignore[attr-defined]
    return [f"{own * 1e3:8.2f} ms {calls:6} x  {Path(file).name}:{line}:{name}" for (file, line, name), (_, calls, own, *_) in rows]


def step_times(runner: ModelRunner, count: int, *, profiled: bool) -> dict[str, Any]:
    prompt = list(range(100, 100 + PROMPT))
    blocks = [list(range(1 + slot * 20, 21 + slot * 20)) for slot in range(count)]
    rows = [StepRow(slot, 0, PROMPT, prompt, blocks[slot], samples=True) for slot in range(count)]
    for row in rows:
        runner.run(StepBatch(admitted=[SlotAssignment(row.slot, prompt, PROMPT, GREEDY, 1)], rows=[row])).results()
    at = PROMPT

    def step() -> Any:
        nonlocal at
        output = runner.run(StepBatch(rows=[StepRow(slot, at, 1, [], [], samples=True) for slot in range(count)]))
        at += 1
        return output

    def ahead(number: int) -> tuple[float, float]:
        """Seconds per step with one step ahead of the results, and seconds per step that the host spends in `run`."""
        torch.cuda.synchronize()
        begin, host = time.perf_counter(), 0.0
        waiting = deque([step()])
        for _ in range(number - 1):
            mark = time.perf_counter()
            waiting.append(step())
            host += time.perf_counter() - mark
            waiting.popleft().results()
        waiting.popleft().results()
        return (time.perf_counter() - begin) / number, host / max(number - 1, 1)

    ahead(8)
    times = [ahead(STEPS) for _ in range(2)]
    best = min(times)
    result: dict[str, Any] = {"ms_per_step": round(best[0] * 1e3, 3), "host_ms": round(best[1] * 1e3, 3)}
    if profiled:
        result |= profile(step)
    runner.run(StepBatch(released=list(range(count))))
    return result


def profile(step: Any) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            output = step()
            if not isinstance(output, tuple):
                output.results()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    table = [{"name": name, "calls": len(all_) // 4, "us": round(sum(all_) / 4, 1)} for name, all_ in kernels.items()]
    return {
        "kernel_us": round(sum(row["us"] for row in table), 1), "launches": sum(row["calls"] for row in table),
        "kernels": sorted(table, key=lambda row: -row["us"])[:30],
    }  # fmt: skip


def tpot(requests: list[int], modes: list[str]) -> dict[str, Any]:
    """Through the engine."""
    timings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = shapes.write("llama-3-8b", Path(parent) / "model")
        for mode in modes:
            begin = time.monotonic()
            with LLM(
                str(folder), dtype="bf16", load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
                max_batch_size=512, max_num_tokens=8192, max_seq_len=4096, cuda_graphs=mode == "graphs",
            ) as llm:  # fmt: skip
                rank = llm.facts.ranks[0]
                timings[f"{mode} start"] = {
                    "seconds": round(time.monotonic() - begin, 1), "phases": {k: round(v, 2) for k, v in rank.phases.items()},
                    "bytes": rank.bytes,
                }  # fmt: skip
                generator = torch.Generator().manual_seed(1)
                for count in requests:
                    args = torch.randint(10, 120000, (count, PROMPT), generator=generator).tolist()
                    seconds = {}
                    for length in (1, 129):
                        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
                        runs = []
                        for _ in range(3):
                            mark = time.perf_counter()
                            llm.generate(args, params, use_tqdm=False)
                            runs.append(time.perf_counter() - mark)
                        seconds[length] = min(runs[1:])
                    timings[f"{mode} {count}"] = {"tpot_ms": round((seconds[129] - seconds[1]) / 128 * 1e3, 3), "seconds": seconds}
    return timings


if __name__ == "__main__":
    sys.exit(main())
