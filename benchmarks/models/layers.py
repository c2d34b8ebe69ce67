# SPDX-License-Identifier: Apache-2.0
"""Decode layers of Llama-3-70B in FP8 over N ranks, with `kernels/gemm/fp8_skinny.py` and without it:
`torchrun --nproc-per-node N -m benchmarks.models.layers --out DIR [--tokens 1,4,8,16,32,64] [--layers 12] [--context 200]`

Layers, tuned all-reduces, attention and the cache in e4m3 are the engine's, from a CUDA graph; weights are random, and the last
layer hands on to the norm of the first, so that all are alike. Figures are microseconds a layer: medians of 30 replays that stand
back to back, as steps do, the largest over ranks. off: how far the last norm of the two is apart, relative; 0 where the bits are
equal. Random layers carry any other rounding on, e4m3 makes it larger, and 0.1 after 12 of them is no fault.

Without: while a graph is captured, `heuristics.select_fp8_skinny` gives no tiling, so that GEMMs run in the next choice. Nothing
else is changed, here or elsewhere.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.kernels.fp8_skinny import Job, call_of
from benchmarks.kernels.gemm import off
from phalanx.bench import shapes
from phalanx.comm.group import Group, Solo
from phalanx.comm.torch_group import TorchGroup
from phalanx.comm.tuned_group import tuned
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.kernels.capabilities import gpu
from phalanx.kernels.gemm import heuristics
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.models import registry, weights
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from phalanx.worker.cuda_graphs import CudaGraphCapturer

BF16 = torch.bfloat16
BLOCK = 16
ROUNDS, REPLAYS = 3, 10


class Captured(NamedTuple):
    """A graph of the layers. out: what they hand on, anew at each replay."""

    replay: Callable[[], None]
    out: Activation

    def unsharded(self) -> Tensor:
        return self.out.values.float() * self.out.scale if isinstance(self.out, Quantized) else self.out.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--tokens", default="1,4,8,16,32,64")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache of each row")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    begin = time.monotonic()
    with torch.inference_mode():
        run(arguments, device)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - begin:.1f} s")
    dist.destroy_process_group()


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    counts = [int(count) for count in arguments.tokens.split(",")]
    shape = ModelShape.from_config(shapes.SHAPES["llama-3-70b"])
    group = group_of(device, max(counts) * shape.hidden_size * BF16.itemsize)
    # Not the first layer of the model, which has the embedding, nor the last, which has the head.
    layer_range = range(1, 1 + arguments.layers)
    model = registry.build(shape, layer_range, LayerContext(group, BF16, device, quantization=ON_LOAD, kv_cache_dtype="fp8"))
    weights.dummy(model, 0)
    if group.rank == 0:
        harness.compile_ahead(map(call_of, jobs(model, counts)))
    dist.barrier()
    caches = filled(model, max(counts) * (arguments.context // BLOCK + 1) + 1)
    figures: dict[str, Any] = {"world": group.size, "layers": arguments.layers, "context": arguments.context, "us": {}}
    for tokens in counts:
        layers = Layers(model, caches, batch_of(tokens, arguments.context, device))
        figures["us"][tokens] = us_of = compared(layers, arguments.layers)
        if group.rank == 0:
            us = f"without {us_of['without']:.2f}, with {us_of['with']:.2f} us a layer"
            print(f"tp{group.size} {tokens:4} tokens: {us}, off {us_of['off']:.1e}", flush=True)
            harness.write(f"models_layers.tp{group.size}", figures, arguments.out)


def group_of(device: torch.device, message_bytes: int) -> Group:
    world = dist.group.WORLD
    assert world is not None
    return tuned(TorchGroup(world, device), message_bytes=message_bytes) if world.size() > 1 else Solo()


def jobs(model: Decoder, counts: Sequence[int]) -> list[Job]:
    """The kernels that the layers' GEMMs will run."""
    layer, gemms = model.layers[0], []
    for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        outputs, inputs = linear.method.weight.shape
        for tokens in counts:
            tiling = heuristics.select_fp8_skinny(tokens, outputs, inputs, gpu(linear.method.weight.device).num_sms)
            gemms += [] if tiling is None else [Job(tokens, outputs, inputs, tiling)]
    return gemms


def filled(model: Decoder, blocks: int) -> list[LayerCache]:
    device = model.context.device
    caches = empty_caches(model.declared_caches(), blocks, BLOCK, device)
    for cache in caches:
        for part in cache.tensors.values():
            part.copy_(torch.randn(part.shape, dtype=BF16, device=device))
    return caches


class Layers:
    """The model's layers over a fixed batch of decode rows."""

    def __init__(self, model: Decoder, caches: Sequence[LayerCache], batch: Batch) -> None:
        self._model, self._caches = model, caches
        device, shape = model.context.device, model.shape
        drawn = torch.randn(batch.decodes, shape.hidden_size, generator=torch.Generator().manual_seed(5))
        self._hidden = drawn.to(device, BF16)
        planner = select_backend(device, BF16, shape.head_dim, shape.latent)
        self._batch = batch
        self._batch.attention = planner.plan(self._batch)
        self.run()  # the planner meets the kinds of layers
        self._batch = replace(self._batch, short=planner.graphs.short_kv_limit(batch.decodes) >= max(batch.kv_lengths_cpu))
        self._batch.attention = planner.plan(self._batch)

    def run(self) -> Activation:
        return through(self._model, self._batch, self._caches, self._hidden)

    def captured(self) -> Captured:
        outs: list[Activation] = []
        replay = CudaGraphCapturer(self._hidden.device).capture(lambda: outs.append(self.run()))
        return Captured(replay, outs[-1])


def through(model: Decoder, batch: Batch, caches: Sequence[LayerCache], hidden: Tensor) -> Activation:
    """The layers as `Llama.hidden_states` runs them. Returns the first one's norm of what the last one gives."""
    layers = model.layers
    norms = [layer.input_layernorm for layer in layers]
    x, residual = norms[0](hidden), hidden
    cos_sin = model.rotary_embs[layers[0].rope](batch.positions)
    for layer, cache, next_norm in zip(layers, caches, [*norms[1:], norms[0]], strict=True):
        x, residual = layer(x, cos_sin, batch, cache, residual, next_norm)
    out: Activation = x
    return out


def batch_of(tokens: int, context: int, device: torch.device) -> Batch:
    """Fixed, as a captured one: each row's token comes behind `context` others."""
    width = context // BLOCK + 1
    tables = torch.arange(tokens * width, dtype=torch.int32).view(tokens, width) + 1
    rows = torch.arange(tokens, device=device)
    return Batch(
        token_ids=torch.zeros_like(rows), positions=torch.full_like(rows, context),
        kv_slots=(tables[:, context // BLOCK].long() * BLOCK + context % BLOCK).to(device),
        query_starts=torch.arange(tokens + 1, dtype=torch.int32, device=device),
        kv_lengths=torch.full((tokens,), context + 1, dtype=torch.int32, device=device), block_tables=tables.to(device),
        table_rows=rows, logit_rows=rows[:0], query_starts_cpu=list(range(tokens + 1)), kv_lengths_cpu=[context + 1] * tokens,
        block_tables_cpu=tables.numpy(), fixed=True, decodes=tokens,
    )  # fmt: skip


def compared(layers: Layers, count: int) -> dict[str, float]:
    """us of a layer, without the kernel and with it, and how far their results are apart."""
    graphs = {}
    without = mock.patch.object(heuristics, "select_fp8_skinny", return_value=None)
    for name, chosen in (("without", without), ("with", nullcontext())):
        with chosen:
            graphs[name] = layers.captured()
    outs = []
    for graph in graphs.values():
        graph.replay()
        outs.append(graph.unsharded())
    us_of = {name: round(us / count, 2) for name, us in timed(graphs).items()}
    return {**us_of, "off": float(f"{off(outs[1], outs[0]):.1e}")}


def timed(graphs: Mapping[str, Captured]) -> dict[str, float]:
    """us of a replay."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name] += replayed(graph)
    slowest = torch.tensor([statistics.median(each) for each in times.values()], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def replayed(graph: Captured) -> list[float]:
    """us of each of REPLAYS replays, back to back behind one that does not count."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]  # type: ignore[no-untyped-call]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(marks)]


if __name__ == "__main__":
    main()
