# SPDX-License-Identifier: Apache-2.0
"""Bytes that a model takes on the fullest GPU of a layout, and what each change of options would free: the remedies for out of
memory.

All of it by the planner (`planner.footprint.rank_memory`): weights and KV cache are exact, and what stands beside them is
never less than a committed start took. On CPU only weights, KV cache and a step's activations count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.quantization import on_load
from phalanx.config.resolve import resolve
from phalanx.errors import PhalanxError
from phalanx.layout.cache import kv_dtype
from phalanx.layout.draft import draft_network
from phalanx.layout.layout import Layout, require_suits
from phalanx.layout.memory import blocks_of_request, most_positions
from phalanx.planner import footprint
from phalanx.planner.footprint import RankMemory, Sizes

MOST_BYTES = 1 << 62
"""Of a GPU, where its memory does not matter."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one GPU, of the rank that needs the most. sequence: KV cache of one request of full length."""

    rank: RankMemory
    sequence: int

    @property
    def least(self) -> int:
        """What a start needs: everything, and a single KV block."""
        return self.rank.least

    def text(self) -> str:
        rank = self.rank
        parts = {"weights": rank.weights, "activations, context and buffers": rank.beside, "graphs": rank.graphs}
        return ", ".join(f"{name} {count / 1e9:.2f} GB" for name, count in parts.items() if count)


@dataclass(frozen=True)
class Remedy:
    """One change of options. freed: bytes on the fullest GPU; fits: with it alone the start has room; gpus: GPUs that it needs."""

    options: dict[str, object]
    freed: int
    fits: bool
    gpus: int

    @property
    def flags(self) -> str:
        return " ".join(_flag(name, value) for name, value in self.options.items())


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name} {value}"


def budget(options: EngineOptions, shape: ModelShape, total: int = MOST_BYTES, *, on_gpu: bool) -> MemoryBudget:
    """Of options whose "auto" is resolved here, on GPUs with `total` free bytes. Raises LayoutError or OptionError for what cannot
    be laid out."""
    shape, world = shape.with_drafts(options.max_drafts), options.world_size
    device = "cuda" if on_gpu else "cpu"
    resolved = resolve(options.model_copy(update={"device": device}), shape, max(-(-world // options.nnodes), 1)).options
    layout = Layout.of(options)
    require_suits(layout, shape)
    kv = kv_dtype(resolved.kv_cache_dtype, resolved.dtype)
    sizes = Sizes(
        resolved.dtype, kv, resolved.max_batch_size, resolved.max_num_tokens or 1, options.block_size,
        options.kv_cache_free_gpu_memory_fraction, options.cuda_graphs, draft_network(options, shape), options.state_snapshots,
        (options.max_loras, options.max_lora_rank), resolved.max_seq_len, bool(options.kv_host_memory),
    )  # fmt: skip
    rank = footprint.rank_memory(shape, layout, total, sizes)
    return MemoryBudget(rank, rank.block * blocks_of_request(rank.windows, resolved.max_seq_len or 1, options.block_size))


def remedies(options: EngineOptions, shape: ModelShape, free: int, gpus: int) -> list[Remedy]:
    """Changes that free memory on the fullest GPU, with `free` bytes there. Those that suffice on the GPUs at hand come first, the
    smallest change first: FP8 before more GPUs, as it costs none; then those that need more GPUs; last those that do not suffice.
    """
    before = budget(options, shape, on_gpu=True)
    entries = []
    for changed in _changes(options, shape):
        try:
            after = budget(options.model_copy(update=changed), shape, on_gpu=True)
        except PhalanxError:
            continue
        freed = before.least - after.least
        world = options.model_copy(update=changed).world_size // options.nnodes
        if freed > 0:
            entries.append(Remedy(changed, freed, after.least <= free, world))
    return sorted(entries, key=lambda entry: (not (entry.fits and entry.gpus <= gpus), not entry.fits, entry.gpus))


def _changes(options: EngineOptions, shape: ModelShape) -> Iterator[dict[str, object]]:
    tokens = options.max_num_tokens or 8192
    while tokens > 1024:
        tokens //= 2
        yield {"max_num_tokens": tokens}
    batch, fewer = options.max_batch_size, options.max_num_tokens or 8192
    while batch > 16:
        batch, fewer = batch // 2, max(fewer // 2, 1024)
        yield {"max_batch_size": batch, "max_num_tokens": fewer}
    if options.cuda_graphs:
        yield {"cuda_graphs": False}
    if not on_load(options.dtype) and shape.quantization is None:
        yield {"dtype": "fp8"}
    if options.redundant_experts:
        yield {"redundant_experts": 0}
    for factor in (2, 4, 8):
        yield {"tensor_parallel_size": options.tensor_parallel_size * factor}
    for factor in (2, 4):
        yield {"pipeline_parallel_size": options.pipeline_parallel_size * factor}


@dataclass(frozen=True)
class CpuBudget:
    """Bytes of the rank on CPU that needs the most, without its libraries. block: one KV block; sequence: one request of full
    length."""

    weights: int
    activations: int
    kv: int
    block: int
    sequence: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv

    def text(self) -> str:
        return f"weights {self.weights / 1e9:.2f} GB, activations {self.activations / 1e9:.2f} GB, KV cache {self.kv / 1e9:.2f} GB"


def cpu_budget(options: EngineOptions, shape: ModelShape) -> CpuBudget:
    """Of options whose "auto" is resolved here. A rank allocates no more KV cache than the requests of its dp index can use."""
    resolved = resolve(options.model_copy(update={"device": "cpu"}), shape, 0).options
    need = budget(options, shape, on_gpu=False)
    assert resolved.kv_cache_bytes is not None
    assert resolved.max_num_tokens is not None
    block = need.rank.block
    activations = footprint.activation_bytes(
        shape, Layout.of(options), resolved.max_num_tokens, resolved.max_batch_size, resolved.dtype, on_gpu=False
    )
    usable = len(need.rank.windows) * math.ceil((resolved.max_seq_len or 1) / options.block_size)
    kv = min(resolved.kv_cache_bytes // block * block, resolved.index_batch_size * usable * block)
    return CpuBudget(need.rank.weights, activations, kv, block, need.sequence)


def cpu_remedies(options: EngineOptions, shape: ModelShape, room: int) -> list[Remedy]:
    """Changes that free memory on CPU, with `room` bytes for each rank beside its libraries; those that suffice come first."""
    before = cpu_budget(options, shape)
    changes: list[dict[str, object]] = []
    left = room - before.weights - before.activations
    if left >= before.block:
        changes.append({"kv_cache_bytes": left // before.block * before.block})
    changes += [changed for changed in _changes(options, shape) if "max_batch_size" not in changed]
    entries = []
    for changed in changes:
        try:
            after = cpu_budget(options.model_copy(update=changed), shape)
        except PhalanxError:
            continue
        if after.total < before.total:
            fits = after.total <= room and after.kv >= after.sequence
            entries.append(Remedy(changed, before.total - after.total, fits, 0))
    return sorted(entries, key=lambda entry: not entry.fits)


def divided_remedy(options: EngineOptions, shape: ModelShape, total: int) -> Remedy | None:
    """The tokens of latents divided over all ranks of a tensor-parallel group, where a request of full length then fits the KV
    cache on GPUs with `total` free bytes."""
    tp = options.tensor_parallel_size
    if shape.latent is None or options.decode_context_parallel_size == tp:
        return None
    changed: dict[str, object] = {"decode_context_parallel_size": tp}
    after = budget(options.model_copy(update=changed), shape, total, on_gpu=True)
    if after.sequence > after.rank.budget:
        return None
    return Remedy(changed, 0, True, options.world_size // options.nnodes)


def sequence_remedy(options: EngineOptions, shape: ModelShape, current: MemoryBudget) -> Remedy | None:
    """The longest max_seq_len of which one request fits the KV cache, where the whole length does not. current: on GPUs with their
    free bytes."""
    room = current.rank.budget
    length = options.max_seq_len or shape.max_positions
    fits = most_positions(current.rank.windows, room // current.rank.block, options.block_size)
    if fits >= length or fits < options.block_size:
        return None
    return Remedy({"max_seq_len": fits}, current.sequence - room, True, options.world_size // options.nnodes)
