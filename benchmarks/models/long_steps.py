# SPDX-License-Identifier: Apache-2.0
"""Long steps of Llama-3-70B, or another shape, in FP8 over N ranks, whose row-parallel layers run as GEMM_RS, and
as RS_NORM_AG: `torchrun --nproc-per-node N -m benchmarks.models.long_steps --out DIR
[--tokens 8192,4096,2048] [--layers 12] [--prompt 512] [--profile 256,512] [--bf16] [--shape llama-3.1-405b]`

Layers, tuned all-reduces, attention and the cache in e4m3 are the engine's, run eagerly as its long steps are, on prompts of
`--prompt` tokens; weights are random, and the last layer hands on to the norm of the first. us: microseconds a layer, medians of
nine steps that stand back to back, the largest over ranks; host: those that the host took to launch it; off: how far the last
norm of the two is apart, relative, 0 where the bits are equal.

--profile: also the kernels of a replayed decode step of so many rows of 200 tokens, by time, as rank 0's profiler saw them: us a
layer, and how many a layer has. A kernel that waits for the one before it, or for other ranks, counts that too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.gemm import off
from benchmarks.models.layers import BF16, BLOCK, Layers, batch_of, filled, group_of, through
from phalanx.bench import shapes
from phalanx.comm.sequence_parallel.gemm_rs import GemmRs
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.models import registry, weights
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache
from phalanx.models.decoder import Decoder
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext

SHAPE = "llama-3-70b"
STEPS = 9
CONTEXT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--tokens", default="8192,4096,2048")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--profile", default="")
    parser.add_argument("--shape", default=SHAPE, choices=sorted(shapes.SHAPES))
    parser.add_argument("--bf16", action="store_true", help="weights and cache in bf16")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    with torch.inference_mode():
        run(arguments, device)
    dist.barrier()
    dist.destroy_process_group()


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    counts = [int(count) for count in arguments.tokens.split(",")]
    profiled = [int(count) for count in arguments.profile.split(",") if count]
    shape = ModelShape.from_config(shapes.SHAPES[arguments.shape])
    group = group_of(device, max(counts) * shape.hidden_size * BF16.itemsize)
    # Not the first layer of the model, which has the embedding, nor the last, which has the head.
    layer_range = range(1, 1 + arguments.layers)
    model = registry.build(
        shape,
        layer_range,
        LayerContext(
            group,
            BF16,
            device,
            quantization=ON_LOAD if not arguments.bf16 else None,
            kv_cache_dtype="fp8" if not arguments.bf16 else "model",
        ),
    )
    weights.dummy(model, 0)
    caches = filled(model, max(max(counts) // BLOCK, max([0, *profiled]) * (CONTEXT // BLOCK + 1)) + arguments.prompt + 1)
    other = [arguments.shape] if arguments.shape != SHAPE else []
    result = ".".join(["models_long_steps", f"tp{group.size}", *other, *(["bf16"] if arguments.bf16 else [])])
    figures: dict[str, Any] = {
        "shape": arguments.shape,
        "world": group.size,
        "layers": arguments.layers,
        "prompt": arguments.prompt,
    }
    figures |= {"steps": {}, "kernels": {}}
    for tokens in counts:
        step = Step(model, caches, tokens, min(arguments.prompt, tokens))
        figures["steps"][tokens] = us_of = compared(step, arguments.layers)
        if group.rank == 0:
            print(f"tp{group.size} {tokens:5} tokens: " + ", ".join(f"{name} {value}" for name, value in us_of.items()), flush=True)
            harness.write(result, figures, arguments.out)
    for tokens in profiled:
        figures["kernels"][tokens] = kernels = profile(Layers(model, caches, batch_of(tokens, CONTEXT, device)), arguments.layers)
        if group.rank == 0:
            print(f"tp{group.size} {tokens} rows, us a layer: {kernels['us']}", flush=True)
            for name, us, calls in kernels["by_time"]:
                print(f"{us:9.2f} us {calls:5.2f} x {name}")
            harness.write(result, figures, arguments.out)


class Step:
    """The model's layers over prompts of `prompt` tokens each, `tokens` in all."""

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], tokens: int, prompt: int) -> None:
        self._model, self._caches = model, caches
        device, shape = model.context.device, model.shape
        drawn = torch.randn(tokens, shape.hidden_size, generator=torch.Generator().manual_seed(5))
        self._hidden = drawn.to(device, BF16)
        self._batch = prompts_of(tokens, prompt, device)
        self._planner = select_backend(device, BF16, shape.head_dim, shape.latent)
        self._batch.attention = self._planner.plan(self._batch)
        self.run()

    def run(self) -> Activation:
        return through(self._model, self._batch, self._caches, self._hidden)


def prompts_of(tokens: int, prompt: int, device: torch.device) -> Batch:
    starts = [*range(0, tokens, prompt), tokens]
    lengths = [end - begin for begin, end in pairwise(starts)]
    width = -(-prompt // BLOCK)
    tables = np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width) + 1
    positions = torch.cat([torch.arange(length) for length in lengths])
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slots = torch.from_numpy(tables)[row_of, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device), positions=positions.to(device), kv_slots=slots.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=device), block_tables=torch.from_numpy(tables).to(device),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device), query_starts_cpu=starts, kv_lengths_cpu=lengths,
        block_tables_cpu=tables,
    )  # fmt: skip


def compared(step: Step, layers: int) -> dict[str, float]:
    outputs, us_of = [], {}
    with mock.patch.object(GemmRs, "targets", return_value=None):  # all run RS_NORM_AG
        us_of["whole_us"], us_of["whole_host_us"], out = timed(step, layers)
        outputs.append(of(out))
    us_of["landed_us"], us_of["landed_host_us"], out = timed(step, layers)
    outputs.append(of(out))
    return {**us_of, "off": float(f"{off(outputs[1], outputs[0]):.1e}")}


def of(out: Activation) -> Tensor:
    return out.float() if isinstance(out, Tensor) else out.values.float() * out.scale


def timed(step: Step, layers: int) -> tuple[float, float, Activation]:
    """(us, us of the host) of a layer, and what the last step gave."""
    for _ in range(2):
        step.run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    dist.barrier()
    marks[0].record()
    begin = time.perf_counter()
    for mark in marks[1:]:
        out = step.run()
        mark.record()
    host = (time.perf_counter() - begin) / STEPS
    marks[-1].synchronize()
    took = statistics.median(left.elapsed_time(right) for left, right in pairwise(marks)) / 1e3
    slowest = torch.tensor([took, host], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    us, host_us = (round(seconds * 1e6 / layers, 1) for seconds in slowest.tolist())
    return us, host_us, out


def profile(layers: Layers, count: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    graph = layers.captured()
    for _ in range(20):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    us = begin.elapsed_time(end) * 1e3 / 20 / count
    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
    by_time = [(event.key[:100], event.device_time_total / 4 / count, event.count / 4 / count) for event in recorded.key_averages()]
    by_time = sorted((each for each in by_time if each[1] > 0), key=lambda each: -each[1])
    return {"us": round(us, 2), "by_time": [(name, round(us, 2), round(calls, 3)) for name, us, calls in by_time]}


if __name__ == "__main__":
    main()
