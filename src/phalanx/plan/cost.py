# SPDX-License-Identifier: Apache-2.0
"""How long one step takes: a roofline with few coefficients per class of machine.

Per stage, in seconds, for T tokens, of which R rows sample, that read K tokens of the KV cache and pair P prompt tokens with keys:

    sum over layers of  sum over GEMMs ((bytes / (e_b BW))^p + (2 m n k / (e_f F))^p)^(1/p)    soft maximum of two ceilings
                      + max(kv bytes / (e_a BW), ns(longest row))                              attention of decodes
                      + 4 P heads head_dim / (e_p F16)                                         attention of prompts
                      + T * activation bytes / BW                                              what is between GEMMs
                      + 2 all-reduces (measured curve; T hidden bytes)  +  c(T)                 c: a layer's chain of kernels
    + head on R rows + c_step, and for a pipeline c_hop and the hidden states' bytes for each stage

BW and F are the catalogue's; e_f F is at most what the power limit allows, watts x operations per joule, which is what binds on
H200. Experts: bytes of those that T tokens reach, E (1 - (1 - k/E)^T) of them. Fitted by benchmarks/plan/fit.py;
`data/coefficients.json` holds the coefficients with their residuals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from phalanx.hardware.catalogue import GpuSpec, Network
from phalanx.plan import collectives, footprint, graphs
from phalanx.plan.coefficients import Coefficients, document
from phalanx.plan.collectives import Curve, Label
from phalanx.plan.families import layer_tensors, outer_tensors
from phalanx.plan.footprint import Split
from phalanx.plan.shape import Shape

SHORT_ROW, LONG_ROW = 200, 1500
"""Tokens of a row's context up to which its attention is part of a layer's chain, and from which on it is split more finely."""

LONG_STEP = 2048
"""Tokens from which on row-parallel GEMMs write to the ranks that own the rows."""


@dataclass(frozen=True)
class Machine:
    """Where a plan runs. network: between nodes; coefficients: of its class; memory: bandwidth beside that of the machines that
    these were fitted on, which differ by 3 percent. known: "measured" where the coefficients were fitted on
    this very GPU, "derived" for another of its generation, "estimated" beyond."""

    gpu: GpuSpec
    link: str
    gpus_per_node: int
    nodes: int
    network: Network | None
    coefficients: Coefficients
    known: Label
    memory: float = 1.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one GPU's memory, before the coefficients."""
        return self.gpu.memory_bandwidth * self.memory

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


def coefficients_for(gpu: GpuSpec) -> tuple[Coefficients, Label]:
    """Those of the GPU's own class, or of the nearest measured one, and how sure that is."""
    machines = document()["machines"]
    for name, entry in machines.items():
        if name == gpu.name:
            return Coefficients.from_json(entry["coefficients"]), "table"
    entry = machines["H200"]
    label: Label = "derived" if gpu.sm == entry["sm"] else "estimated"
    return Coefficients.from_json(entry["coefficients"]), label


@dataclass(frozen=True)
class Work:
    """One step of one replica. tokens: computed; rows: that sample; kv_tokens: read by rows of one token, over all of them; pairs:
    of prompt tokens with the keys that each sees. eager: launched kernel by kernel, not replayed from a graph. longest: context of
    the longest row of one token."""

    tokens: int
    rows: int
    kv_tokens: float = 0.0
    pairs: float = 0.0
    eager: bool = False
    longest: float = 0.0


@dataclass(frozen=True)
class _Gemm:
    """GEMMs of one name of a stage's layers of one kind: how many, bytes of weights, operations per token, and whether in FP8.
    experts: held on this rank and in all, and per token; None of a dense one."""

    count: int
    weight_bytes: int
    flops: float
    fp8: bool
    routed: bool


@dataclass(frozen=True)
class Costs:
    """Prices steps of one replica: a model in a dtype, split over ranks of a machine. kv_itemsize: bytes of a cached value."""

    shape: Shape
    dtype: str
    kv_itemsize: int
    split: Split
    machine: Machine
    strategy: str = "AUTO"
    _fixed: dict[tuple[int, int, bool], tuple[float, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def label(self) -> Label:
        """How well the parts are known, the worst of them."""
        labels: list[Label] = [self.machine.known]
        if self.split.tp > 1:
            labels.append(self._all_reduce().label)
        if self.shape.experts is not None:
            labels.append("estimated")
        if self.split.pp > 1 and self.machine.network is not None and self._spans_nodes(self.split.world):
            labels.append("estimated")
        return collectives.worst(*labels)

    def step_seconds(self, work: Work) -> tuple[float, ...]:
        """Seconds that each stage is busy with a step, the hop to the next one included."""
        local = self._share(work)
        key = (local.tokens, local.rows, local.eager)
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = tuple(self._stage(stage, local) for stage in range(self.split.pp))
        per_kv, per_pair = self._attention_seconds
        rows, kv, longest = max(local.rows, 1), local.kv_tokens, local.longest
        stage_seconds = []
        for base, each, pair in zip(fixed, per_kv, per_pair, strict=True):
            seconds = base + local.pairs * pair
            for window, layers, read in each:
                if window is None:
                    seconds += layers * max(kv * read, self._row_seconds(longest))
                else:
                    seconds += layers * max(min(kv, window * rows) * read, self._row_seconds(min(longest, window)))
            stage_seconds.append(seconds)
        return tuple(stage_seconds)

    def _row_seconds(self, longest: float) -> float:
        """What one row's attention takes however few there are: split-kv gives a row only so many programs."""
        if longest <= SHORT_ROW:
            return 0.0
        cs = self.machine.coefficients
        below, beyond = min(longest, LONG_ROW) - SHORT_ROW, max(longest - LONG_ROW, 0.0)
        return 1e-9 * (cs.ns_row * below + cs.ns_long_row * beyond)

    @property
    def graph_tokens(self) -> int:
        """Up to how many tokens a step with prompts is replayed from a graph."""
        per_layer = footprint.layer_weight_bytes(self.shape, 0, self.dtype, self.split)
        return min(graphs.MIXED_GRAPH_TOKENS[-1], graphs.max_graph_tokens(per_layer))

    def seconds(self, work: Work) -> float:
        """From the first stage's start to the last one's end."""
        return sum(self.step_seconds(work))

    def _share(self, work: Work) -> Work:
        ep = self.split.ep
        if ep == 1:
            return work
        return Work(-(-work.tokens // ep), -(-work.rows // ep), work.kv_tokens / ep, work.pairs / ep, work.eager, work.longest)

    @property
    def _attention_seconds(self) -> tuple[tuple[tuple[tuple[int | None, int, float], ...], ...], tuple[float, ...]]:
        return _attention_seconds(self.shape, self.dtype, self.kv_itemsize, self.split, self.machine)

    def _stage(self, stage: int, work: Work) -> float:
        """What does not depend on contexts."""
        machine, cs, split = self.machine, self.machine.coefficients, self.split
        tokens, everywhere = max(work.tokens, 1), max(work.tokens, 1) * split.ep
        seconds = 0.0
        gemms, layers, moe_layers, between = _stage_gemms(self.shape, self.dtype, split, stage)
        for gemm in gemms:
            seconds += gemm.count * self._gemm_seconds(gemm, tokens, everywhere)
        seconds += cs.passes * tokens * between / machine.bandwidth
        chain = cs.c_one if tokens == 1 else cs.c_layer
        seconds += layers * chain * 1e-6 + moe_layers * cs.c_moe * 1e-6
        hidden_bytes = tokens * self.shape.hidden_size * 2.0
        if split.tp > 1:
            hidden_part = cs.landed * min(tokens / LONG_STEP, 1.0) if self.strategy != "NCCL" else 0.0
            seconds += 2 * layers * self._all_reduce().us(hidden_bytes) * (1 - hidden_part) * 1e-6
        if split.ep > 1 and moe_layers:
            reach = self.shape.experts.per_token if self.shape.experts else 1
            exchanged = hidden_bytes * min(reach, split.ep) / split.tp
            seconds += 2 * moe_layers * self._all_to_all().us(exchanged) * 1e-6
        if stage == split.pp - 1:
            seconds += self._head_seconds(max(work.rows, 1)) + cs.c_step * 1e-6
        if split.pp > 1:
            seconds += cs.c_hop * 1e-6
            if stage < split.pp - 1:
                between_nodes = machine.network if self._spans_nodes(split.world) else None
                bandwidth = between_nodes.bandwidth if between_nodes else machine.gpu.link_bandwidth
                seconds += hidden_bytes / (0.85 * bandwidth)
        return max(seconds, layers * cs.c_eager * 1e-6) if work.eager else seconds

    def _gemm_seconds(self, gemm: _Gemm, tokens: int, everywhere: int) -> float:
        """of one GEMM of one layer. Where experts are routed, a rank reads those that all tokens reach, and computes its part."""
        cs, gpu, experts = self.machine.coefficients, self.machine.gpu, self.shape.experts
        if gemm.routed and experts is not None:
            reached = experts.touched(everywhere) / experts.count
            nbytes = gemm.weight_bytes * reached
            flops = gemm.flops * everywhere * experts.per_token / experts.count
        else:
            nbytes, flops = float(gemm.weight_bytes), gemm.flops * tokens
        peak = _reached_flops(gpu, cs, gemm.fp8)
        reached_bandwidth = (cs.e_bytes if gemm.fp8 else cs.e_bytes_16) * self.machine.bandwidth
        read, compute = nbytes / reached_bandwidth, flops / peak
        top = max(read, compute)
        least = min(read, compute) / top if top else 0.0
        return top * float((1 + least**cs.sharpness) ** (1 / cs.sharpness))

    def _head_seconds(self, rows: int) -> float:
        width = footprint.local_shape(_head(self.shape), self.split)[0] * self.shape.hidden_size
        gemm = _Gemm(1, width * footprint.itemsize(self.dtype), 2.0 * width, False, False)
        return self._gemm_seconds(gemm, rows, rows)

    def _spans_nodes(self, ranks: int) -> bool:
        return ranks > self.machine.gpus_per_node

    def _all_reduce(self) -> Curve:
        network = self.machine.network if self._spans_nodes(self.split.tp) else None
        return collectives.all_reduce(self.machine.gpu, self.machine.link, self.split.tp, network, self.strategy)

    def _all_to_all(self) -> Curve:
        network = self.machine.network if self._spans_nodes(self.split.tp * self.split.ep) else None
        return collectives.all_to_all(self.machine.gpu, self.split.ep, network)


def _reached_flops(gpu: GpuSpec, coefficients: Coefficients, fp8: bool) -> float:
    """Operations per second of long GEMMs: a part of the peak, or what the power limit allows, whichever is less. FP8 without FP8
    arithmetic runs in 16 bit."""
    in_fp8 = fp8 and gpu.fp8_flops is not None
    reached = coefficients.e_flops * gpu.flops("fp8" if in_fp8 else "bf16")
    if gpu.power is None:
        return reached
    return min(reached, gpu.power * coefficients.tflops_per_watt * 1e12 * (1.0 if in_fp8 else 0.5))


def _head(shape: Shape) -> Any:
    outer = {tensor.part: tensor for tensor in outer_tensors(shape)}
    return outer.get("head", outer["embedding"])


@cache
def _attention_seconds(
    shape: Shape, dtype: str, kv_itemsize: int, split: Split, machine: Machine
) -> tuple[tuple[tuple[tuple[int | None, int, float], ...], ...], tuple[float, ...]]:
    """Per stage: by window the layers that have it, and a layer's seconds for each cached token read; and for each pair of a
    prompt's token with a key."""
    cs, gpu = machine.coefficients, machine.gpu
    reads, pairs = [], []
    for layers in footprint.stage_layers(shape, dtype, split.pp):
        by_window: dict[int | None, int] = {}
        for layer in layers:
            by_window[shape.windows[layer]] = by_window.get(shape.windows[layer], 0) + 1
        nbytes = shape.kv_elements(0, split.tp) * kv_itemsize
        read = (cs.e_kv_fp8 if kv_itemsize == 1 else cs.e_kv) * machine.bandwidth
        reads.append(tuple((window, count, nbytes / read) for window, count in by_window.items()))
        dims = shape.latent.nope + shape.latent.rope + shape.latent.v if shape.latent else 2 * shape.head_dim
        flops = 2.0 * shape.num_heads / split.tp * dims
        reached = cs.e_prompt_fp8 if kv_itemsize == 1 else cs.e_prompt
        pairs.append(len(layers) * flops / (reached * gpu.bf16_flops))
    return tuple(reads), tuple(pairs)


@cache
def _stage_gemms(shape: Shape, dtype: str, split: Split, stage: int) -> tuple[tuple[_Gemm, ...], int, int, float]:
    """The GEMMs of a stage; its layers; those with experts; and bytes of activations between GEMMs, for one token of all layers."""
    layers = footprint.stage_layers(shape, dtype, split.pp)[stage]
    gemms: list[_Gemm] = []
    moe, between = 0, 0.0
    for first, count in _kinds_of(shape, layers):
        groups: dict[str, list[Any]] = {}
        for tensor in layer_tensors(shape, first):
            if tensor.gemm:
                groups.setdefault(tensor.gemm, []).append(tensor)
        for tensors in groups.values():
            sizes = [math.prod(footprint.local_shape(t, split)) * footprint.local_experts(t, split) for t in tensors]
            nbytes = sum(footprint.tensor_bytes(shape, tensor, dtype, split) for tensor in tensors)
            fp8 = footprint.in_fp8(shape, tensors[0], dtype)
            gemms.append(_Gemm(count, nbytes, 2.0 * sum(sizes), fp8, bool(tensors[0].experts)))
        experts = shape.experts_in(first)
        inner = shape.intermediate_size if experts is None else experts.intermediate * experts.per_token + experts.shared
        moe += count if experts is not None else 0
        between += count * 2.0 * (4 * shape.hidden_size + 3 * inner / split.tp)
    return tuple(gemms), len(layers), moe, between


def _kinds_of(shape: Shape, layers: range) -> list[tuple[int, int]]:
    """(first layer, how many) of each kind among these layers; windows do not matter to GEMMs."""
    counts: dict[bool, list[int]] = {}
    for layer in layers:
        counts.setdefault(shape.experts_in(layer) is not None, []).append(layer)
    return [(layers_of_kind[0], len(layers_of_kind)) for layers_of_kind in counts.values()]
