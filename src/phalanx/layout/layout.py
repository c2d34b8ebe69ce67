# SPDX-License-Identifier: Apache-2.0
"""Ranks and axes of the mesh: world = pp x dp x tp, tp fastest. And the layers of each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.errors import LayoutError
from phalanx.layout.families import layer_tensors
from phalanx.layout.shard import in_runs

SPLIT_FROM = 256
"""With pipeline stages a prompt is split into chunks of at least this many tokens. Smaller chunks cost more, by reading the weights
more often, than the overlap of the stages gains."""
_MAX_LISTED = 64  # larger tp sizes are not listed

OPTIONS = {
    "pp": "pipeline_parallel_size", "dp": "expert_parallel_size", "tp": "tensor_parallel_size",
    "moe_ep": "moe_expert_parallel_size", "redundant": "redundant_experts", "replicas": "replicas",
    "dcp": "decode_context_parallel_size",
}  # fmt: skip
"""Size of a layout -> the option that sets it."""


@dataclass(frozen=True)
class MeshCoordinate:
    """The index of a rank on each axis."""

    pp_index: int
    dp_index: int
    tp_index: int


@dataclass(frozen=True)
class Layout:
    """How a model stands on its ranks. Of one replica rank = (pp_index * dp + dp_index) * tp + tp_index.

    dp: groups over which requests are split, and experts by number (the option expert_parallel_size, `--ep_size`).
    moe_ep: parts of the experts by number inside the tensor-parallel group, each split tp / moe_ep ways.
    redundant: copies beside a layer's experts, on all ranks together.
    replicas: engines of this layout behind one server.
    dcp: neighbours in the tensor-parallel group over which the tokens of a cache of latents are divided.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    moe_ep: int = 1
    redundant: int = 0
    replicas: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        if min(self.pp, self.dp, self.tp, self.moe_ep, self.redundant + 1, self.replicas, self.dcp) < 1:
            raise LayoutError(f"layout {self.name} is not valid", why="each size is at least 1")
        if self.tp % self.dcp:
            raise LayoutError(f"layout {self.name} is not valid", why=f"dcp {self.dcp} does not divide tp {self.tp}")

    @classmethod
    def of(cls, options: EngineOptions) -> Layout:
        """The layout that these options name."""
        sizes = {name: getattr(options, option) for name, option in OPTIONS.items()}
        return cls(**sizes)

    @property
    def options(self) -> dict[str, int]:
        """By the names of `EngineOptions`."""
        return {option: getattr(self, name) for name, option in OPTIONS.items()}

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.pp * self.dp * self.tp

    @property
    def gpus(self) -> int:
        return self.world * self.replicas

    @property
    def expert_ranks(self) -> int:
        """Parts into which a layer's experts are split by number."""
        return self.dp * self.moe_ep

    @property
    def name(self) -> str:
        """By the flags that make it."""
        sizes = [f"tp {self.tp} pp {self.pp}"]
        sizes += [f"{name} {size}" for name, size in (("ep", self.dp), ("moe_ep", self.moe_ep), ("dcp", self.dcp)) if size > 1]
        sizes += [f"+ {self.redundant} copies"] if self.redundant else []
        return " ".join([*sizes, f"x {self.replicas} replicas"] if self.replicas > 1 else sizes)

    def as_json(self) -> dict[str, int]:
        """By the flags that make it."""
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.dp, "replicas": self.replicas, "moe_ep": self.moe_ep}
        sizes |= {"dcp": self.dcp} if self.dcp > 1 else {}
        return sizes | ({"redundant_experts": self.redundant} if self.redundant else {})

    def place(self, rank: int) -> MeshCoordinate:
        """Raises LayoutError for a rank outside the world."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} does not exist", held=f"the world has ranks 0..{self.world - 1}")
        rest, tp_index = divmod(rank, self.tp)
        pp_index, dp_index = divmod(rest, self.dp)
        return MeshCoordinate(pp_index, dp_index, tp_index)

    def rank(self, pp_index: int, dp_index: int, tp_index: int) -> int:
        return (pp_index * self.dp + dp_index) * self.tp + tp_index

    def tp_group(self, rank: int) -> list[int]:
        """The ranks that hold the slices of the same layers, in tp order."""
        at = self.place(rank)
        return [self.rank(at.pp_index, at.dp_index, t) for t in range(self.tp)]

    def dcp_group(self, rank: int) -> list[int]:
        """The ranks over which the tokens of this rank's latents are divided, in tp order."""
        at = self.place(rank)
        first = at.tp_index // self.dcp * self.dcp
        return [self.rank(at.pp_index, at.dp_index, t) for t in range(first, first + self.dcp)]

    def dp_group(self, rank: int) -> list[int]:
        """The ranks that hold the same slices for other requests, and other experts, in dp order."""
        at = self.place(rank)
        return [self.rank(at.pp_index, d, at.tp_index) for d in range(self.dp)]

    def pp_group(self, rank: int) -> list[int]:
        """The ranks that hold the stages of the same slice, in stage order."""
        at = self.place(rank)
        return [self.rank(p, at.dp_index, at.tp_index) for p in range(self.pp)]


def require_suits(layout: Layout, shape: ModelShape) -> None:
    """Raise LayoutError where the model does not fit the layout; it names sizes that do. Called before any rank is started."""
    experts = [shape.experts_in(layer) for layer in range(shape.num_layers)]
    dense = [layer for layer, each in enumerate(experts) if each is None or each.beside_mlp]
    quantization = shape.quantization
    units = {0 if quantization is None else quantization.unit(f"model.layers.{layer}.mlp.down_proj") for layer in dense}
    for unit in units - {0}:
        in_runs("intermediate_size", shape.intermediate_size, unit, layout.tp, 0)
    inner = shape.intermediate_size if 0 in units else shape.num_heads
    split = [("num_attention_heads", shape.num_heads), ("intermediate_size", inner)]
    split += [] if shape.recurrent is None else [shape.recurrent.split]
    for name, size in split:
        if size % layout.tp:
            both = math.gcd(*(each for _, each in split))
            fits = [str(tp) for tp in range(1, min(both, _MAX_LISTED) + 1) if both % tp == 0]
            raise LayoutError(
                f"tensor_parallel_size={layout.tp} does not divide {name}={size}", next=f"use one of {', '.join(fits)}",
            )  # fmt: skip
    _require_layers(layout.pp, sum(map(shape.may_begin_stage, range(shape.num_layers))))
    first = next((layer for layer, each in enumerate(experts) if each is not None), None)
    if first is not None:
        _require_slices_of_experts(layout, shape, first)


def _require_slices_of_experts(layout: Layout, shape: ModelShape, layer: int) -> None:
    """Raise LayoutError where the ranks that share an expert cannot each hold a slice of it."""
    (down,) = (tensor for tensor in layer_tensors(shape, layer) if tensor.gemm == "experts_down")
    inner, ranks = down.shape[1], layout.tp // layout.moe_ep
    quotient = f"{OPTIONS['tp']}={layout.tp} / {OPTIONS['moe_ep']}={layout.moe_ep} = {ranks}"
    groups = -(-inner // down.unit) if down.unit else 0
    if groups and ranks > groups:
        raise LayoutError(
            f"{quotient} exceeds the {groups} groups of {down.unit} columns that share a scale in an expert",
            next=f"choose sizes whose quotient is at most {groups}",
        )  # fmt: skip
    if not groups and inner % ranks:
        fits = [str(size) for size in range(1, min(inner, _MAX_LISTED) + 1) if inner % size == 0]
        raise LayoutError(
            f"{quotient} does not divide the experts' intermediate size {inner}",
            next=f"choose sizes whose quotient is one of {', '.join(fits)}",
        )  # fmt: skip


def _require_layers(pp: int, count: int) -> None:
    if pp > count:
        raise LayoutError(
            f"pipeline_parallel_size={pp} is more than the {count} layers that a stage may begin with",
            why="every stage holds at least one layer, and layers that share what one of them computed are on one stage",
            next=f"use at most {count}",
        )  # fmt: skip


def max_chunk(tokens: int, pipeline_stages: int) -> int:
    """Tokens of a prompt of so many that one step computes, at most: stages share it in equal chunks, of which the stages compute
    one each at a time."""
    return -(-tokens // max(min(pipeline_stages, tokens // SPLIT_FROM), 1))


def stages(layer_bytes: Sequence[int], pp: int, *, first_bytes: int = 0, last_bytes: int = 0) -> list[range]:
    """Contiguous layer ranges, one per stage, so that the largest stage in bytes is as small as possible.

    first_bytes (embedding) count for the first stage, last_bytes (final norm and head) for the last. Every stage holds at least one
    layer. Among equal optima the later stages hold less, which leaves memory for the sampler on the last one.
    Raises LayoutError when there are more stages than layers. Dynamic programming over cut points, O(pp x layers^2).
    """
    count = len(layer_bytes)
    _require_layers(pp, count)
    prefix = [0]
    for size in layer_bytes:
        prefix.append(prefix[-1] + size)

    def cost(stage: int, begin: int, end: int) -> int:
        return prefix[end] - prefix[begin] + (first_bytes if stage == 0 else 0) + (last_bytes if stage == pp - 1 else 0)

    # best[k][e]: the smallest possible largest stage when stages 0..k hold layers 0..e-1; cut[k][e]: where stage k begins.
    infinite = prefix[-1] + first_bytes + last_bytes + 1
    best = [[infinite] * (count + 1) for _ in range(pp)]
    cut = [[0] * (count + 1) for _ in range(pp)]
    for end in range(1, count + 1):
        best[0][end] = cost(0, 0, end)
    for stage in range(1, pp):
        for end in range(stage + 1, count + 1):
            for begin in range(stage, end):
                worst = max(best[stage - 1][begin], cost(stage, begin, end))
                if worst <= best[stage][end]:
                    best[stage][end], cut[stage][end] = worst, begin
    ranges: list[range] = []
    end = count
    for stage in range(pp - 1, -1, -1):
        begin = cut[stage][end] if stage else 0
        ranges.append(range(begin, end))
        end = begin
    return ranges[::-1]
