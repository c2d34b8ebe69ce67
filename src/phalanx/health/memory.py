# SPDX-License-Identifier: Apache-2.0
"""Bytes that a model takes on the fullest GPU of a layout, and what each change of options would free: the remedies for out of
memory.

Weights and the KV cache are exact (`plan.weight_tensors`, `plan.memory`). Activations and graphs are estimates: the engine
measures them at its start. The formula of activations was checked against starts of 70B in FP8 on H200
(benchmarks/results/serving): 1.68, 1.37 and 1.37 GB against 1.62, 1.40 and 1.37 measured at TP 1, 2 and 4 with max_batch_size 512.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.dtypes import DTYPES
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import resolve
from phalanx.errors import PhalanxError
from phalanx.plan.layout import Layout, require_suits, stages
from phalanx.plan.memory import KvSpec, block_bytes
from phalanx.plan.shard import heads
from phalanx.plan.weight_tensors import layer_bytes

CONTEXT_BYTES = 600 << 20
"""A CUDA context with the libraries' workspaces, and the all-reduce's buffers, which torch's allocator does not count."""
GRAPHS_BYTES = 450 << 20
_SAMPLER_COPIES = 5
"""Tensors [max_batch_size, vocabulary] in fp32 that the sampler may hold at once."""


@dataclass(frozen=True)
class Budget:
    """Bytes on one GPU, of the rank that needs the most. block: one KV block, without which no request runs."""

    weights: int
    activations: int
    graphs: int
    context: int
    block: int
    sequence: int

    @property
    def least(self) -> int:
        """What a start needs: everything, and a single KV block."""
        return self.weights + self.activations + self.graphs + self.context + self.block

    def text(self) -> str:
        parts = {
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "context and buffers": self.context,
        }
        return ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in parts.items() if count)


@dataclass(frozen=True)
class Remedy:
    """One change of options. freed: bytes on the fullest GPU; fits: with it alone the start has room; gpus: GPUs that it needs."""

    options: dict[str, object]
    freed: int
    fits: bool
    gpus: int
    why: str

    @property
    def flags(self) -> str:
        return " ".join(_flag(name, value) for name, value in self.options.items())


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"


def budget(options: EngineOptions, shape: ModelShape, *, on_gpu: bool) -> Budget:
    """Of options whose "auto" is settled here. Raises LayoutError or OptionError for what cannot be laid out."""
    world = options.world_size
    device = "cuda" if on_gpu else "cpu"
    settled = resolve(options.model_copy(update={"device": device}), shape, max(-(-world // options.nnodes), 1)).options
    tp, pp = options.tensor_parallel_size, options.pipeline_parallel_size
    require_suits(Layout(pp, options.expert_parallel_size, tp), shape)
    quantized = options.dtype == "fp8" or shape.quantization is not None
    plain = "bf16" if settled.dtype == "fp8" else settled.dtype
    per_layer, embedding, head = layer_bytes(shape, "fp8" if quantized else plain)
    ranges = stages(per_layer, pp, first_bytes=embedding, last_bytes=head)
    first, last = embedding, head
    if shape.tie_word_embeddings and pp == 1:
        last = 0
    stage_bytes = [
        sum(per_layer[place] for place in layers) + (first if stage == 0 else 0) + (last if stage == pp - 1 else 0)
        for stage, layers in enumerate(ranges)
    ]
    stage = max(range(pp), key=stage_bytes.__getitem__)
    itemsize = DTYPES[plain].itemsize
    spec = KvSpec(
        len(heads(shape.num_heads, shape.num_kv_heads, tp, 0).kv),
        shape.head_dim,
        1 if settled.kv_cache_dtype == "fp8" else itemsize,
    )
    block = block_bytes([spec] * len(ranges[stage]), options.kv_block_size)
    tokens, length = settled.max_num_tokens or 1, settled.max_seq_len or 1
    layer_peak = tokens * itemsize * (2 * shape.hidden_size + 3 * shape.intermediate_size // tp)
    sampler = _SAMPLER_COPIES * min(options.max_batch_size, tokens) * shape.vocab_size * 4
    return Budget(
        -(-stage_bytes[stage] // tp),
        max(layer_peak, sampler),
        GRAPHS_BYTES if on_gpu and options.cuda_graphs else 0,
        CONTEXT_BYTES if on_gpu else 0,
        block,
        block * math.ceil(length / options.kv_block_size),
    )


def remedies(options: EngineOptions, shape: ModelShape, free: int, gpus: int) -> list[Remedy]:
    """Changes that free memory on the fullest GPU, with `free` bytes there. Those that suffice on the GPUs at hand come first, the
    smallest change first: FP8 before more GPUs, as it costs none; then those that need more GPUs; last those that do not suffice.
    """
    before = budget(options, shape, on_gpu=True)
    entries = []
    for changed, why in _changes(options, shape):
        try:
            after = budget(options.model_copy(update=changed), shape, on_gpu=True)
        except PhalanxError:
            continue
        freed = before.least - after.least
        world = options.model_copy(update=changed).world_size // options.nnodes
        if freed > 0:
            entries.append(Remedy(changed, freed, after.least <= free, world, why))
    return sorted(entries, key=lambda entry: (not (entry.fits and entry.gpus <= gpus), not entry.fits, entry.gpus))


def _changes(options: EngineOptions, shape: ModelShape) -> Iterator[tuple[dict[str, object], str]]:
    tokens = options.max_num_tokens or 8192
    while tokens > 1024:
        tokens //= 2
        yield {"max_num_tokens": tokens}, "activations of a step shrink with its tokens; long prompts take more steps"
    batch, fewer = options.max_batch_size, options.max_num_tokens or 8192
    while batch > 16:
        batch, fewer = batch // 2, max(fewer // 2, 1024)
        changed: dict[str, object] = {"max_batch_size": batch, "max_num_tokens": fewer}
        yield changed, "a smaller batch: the sampler and the activations shrink, and so does the throughput at full load"
    if options.cuda_graphs:
        yield {"cuda_graphs": False}, "no memory for captured graphs; small steps get slower"
    if options.dtype != "fp8" and shape.quantization is None:
        yield {"dtype": "fp8"}, "weights of GEMMs in one byte instead of two"
    for factor in (2, 4, 8):
        yield {"tensor_parallel_size": options.tensor_parallel_size * factor}, f"each layer over {factor} times as many GPUs"
    for factor in (2, 4):
        yield {"pipeline_parallel_size": options.pipeline_parallel_size * factor}, f"layers over {factor} times as many stages"


def sequence_remedy(options: EngineOptions, shape: ModelShape, room: int) -> Remedy | None:
    """The longest max_seq_len of which one request fits in `room` bytes of KV cache, where the whole length does not."""
    current = budget(options, shape, on_gpu=True)
    length = options.max_seq_len or shape.max_positions
    fits = room // current.block * options.kv_block_size
    if fits >= length or fits < options.kv_block_size:
        return None
    return Remedy(
        {"max_seq_len": fits},
        current.sequence - room,
        True,
        options.world_size // options.nnodes,
        "the longest request that the KV cache holds",
    )
