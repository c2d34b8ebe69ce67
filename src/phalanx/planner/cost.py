# SPDX-License-Identifier: Apache-2.0
"""How long one step takes: a roofline with few coefficients per class of machine.

Per stage, in seconds, for T tokens, of which R rows sample, that read K tokens of the KV cache and pair P prompt tokens with keys:

    sum over layers of  sum over GEMMs ((bytes / (e_b BW))^p + (2 m n k / (e_f F))^p)^(1/p)    soft maximum of two ceilings
                      + max(kv bytes / (e_a BW), ns(longest row))                              attention of decodes, where e_a
                                                                                               is less beyond FAR_ROW tokens
                      + 4 P heads head_dim / (e_p F16)                                         attention of prompts
                      + (K / e_latent_few + P / e_p) 2 index heads index head_dim / F16        indexer of sparse attention, which
                                                                                               bounds K and P of the attention
                      + T * activation bytes / BW                                              what is between GEMMs
                      + 2 all-reduces (measured curve; T hidden bytes) - their norms  +  c(T)   c: a layer's chain of kernels
                      + exchange of tokens (measured curve), there and back                     of layers with experts, for dp > 1
                      + queries gathered, outputs exchanged (all-reduce of half the bytes), 5 c_norm   of latents, for dcp > 1
    + head on R rows + c_step, and for a stage of a pipeline the hidden states' bytes and c_hop,   c_return: where the last stage
      or R c_return                                                                            returns tokens on the device

BW and F are the catalogue's; e_f F is at most what the power limit allows, watts x operations per joule, which is what binds on
H200. Experts: bytes of those that T tokens reach, E (1 - (1 - k/E)^T) of them. Fitted by benchmarks/planner/fit.py;
`data/coefficients.json` holds the coefficients with their residuals.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from phalanx.config.experts import Experts
from phalanx.config.model import ModelShape
from phalanx.hardware.catalogue import GpuSpec, Network
from phalanx.layout import Layout, weights
from phalanx.layout.cache import request_bytes, token_bytes, window_of
from phalanx.layout.families import layer_tensors
from phalanx.layout.graphs import max_absorbed_pairs, max_graph_tokens
from phalanx.layout.memory import stage_caches
from phalanx.planner import collectives
from phalanx.planner.coefficients import Coefficients, document
from phalanx.planner.collectives import Curve, Label
from phalanx.tables.seed import GEMM_RS_BYTES

SHORT_ROW, LONG_ROW = 200, 1500
"""Tokens of a row's context up to which its attention is part of a layer's chain, and from which on it is split more finely."""

FAR_ROW = 2048
"""Tokens of a row's context beyond which decode attention reads the cache at another speed: its splits are too few for few rows."""

FEW_ROWS, MANY_ROWS = 16, 32
"""Rows of a step up to which GEMMs are skinny, and from which on a layer's chain does not grow."""

HOPPER = 90
LONG_PROMPT_HEAD_DIMS = (64, 128)
"""Of models whose long prompts have a kernel of their own on GPUs of that SM."""

LATENT_HEADS = 33
"""Heads of a rank from which on latent attention has a kernel of its own on Hopper: LATENT_BAND_LEAST of
kernels/attention/heuristics.py, which imports torch."""

DIVIDED_KERNELS = 5
"""Small kernels of a layer that divides the tokens of latents, each priced as a norm."""

LONG_STEP = GEMM_RS_BYTES // (2 * 8192)
"""Tokens, of the 8,192 features of 70B, from which on row-parallel GEMMs write to the ranks that own the rows."""


@dataclass(frozen=True)
class MachineModel:
    """Where a plan runs. network: between nodes; coefficients: of its class; memory: bandwidth beside that of the machines that
    these were fitted on, which differ by 3 percent. known: "measured" where the coefficients were fitted on
    this very GPU, "derived" for another of its generation, "estimated" beyond. token_by_token: a step computes each of its tokens
    alone."""

    gpu: GpuSpec
    link: str
    gpus_per_node: int
    nodes: int
    network: Network | None
    coefficients: Coefficients
    known: Label
    memory: float = 1.0
    token_by_token: bool = False

    @property
    def deterministic(self) -> MachineModel:
        """With `--deterministic`: on a CPU token by token, on GPUs by kernels that were measured with one model."""
        if self.device == "cpu":
            return replace(self, token_by_token=True)
        return replace(self, coefficients=self.coefficients.batch_invariant, known="estimated")

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one GPU's memory, before the coefficients."""
        return self.gpu.memory_bandwidth * self.memory

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def device(self) -> str:
        """As the option `device` of an engine there: "cuda" or "cpu"."""
        return "cuda" if self.gpu.sm > 0 else "cpu"

    @property
    def replays_graphs(self) -> bool:
        """Whether steps are replayed from CUDA graphs, and padded to their sizes: on GPUs, not on a CPU."""
        return self.device == "cuda"


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
    """One step of one replica. tokens: computed; rows: that sample; kv_tokens: read by decode rows, over all of them; pairs:
    of prompt tokens with the keys that each sees. eager: launched kernel by kernel, not replayed from a graph. longest: context of
    the longest decode row. calls: of each layer's attention."""

    tokens: int
    rows: int
    kv_tokens: float = 0.0
    pairs: float = 0.0
    eager: bool = False
    longest: float = 0.0
    calls: int = 1


INT4_TOKENS, INT4_READ, INT4_FLOPS = 128, 0.71, 0.6
"""Up to so many tokens, what of the bandwidth of GEMMs in 16 bit, and of their operations, those of 4-bit integers reach: one layer
of Llama-3-70B (benchmarks/results/kernels_int4_gemm.json). By activations in FP8, of GEMMs in FP8: not measured."""


@dataclass(frozen=True)
class _Gemm:
    """GEMMs of one name of a stage's layers of one kind: how many, bytes of weights, operations per token, what holds the weights
    (`weights.stored_in`), and whether they are of routed experts."""

    count: int
    weight_bytes: int
    flops: float
    stored: str
    routed: bool


_Read = tuple[int | None, int, float, float]
"""Layers of one window: the window, how many they are, and a layer's seconds for a cached token within FAR_ROW and beyond."""


class _Attention(NamedTuple):
    """Per stage: by window the layers that have it, and a layer's seconds for each cached token read; and seconds of all layers for
    each pair of a prompt's token with a key, the same where the key is a latent, and of the indexers for such a pair."""

    reads: tuple[tuple[_Read, ...], ...]
    pairs: tuple[float, ...]
    absorbed: tuple[float, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Prices steps of one replica: a model in a dtype, split over ranks of a machine. kv: the dtype of keys and values.
    quantize_activations: as the engine's option."""

    shape: ModelShape
    dtype: str
    kv: str
    layout: Layout
    machine: MachineModel
    strategy: str = "AUTO"
    exchange: str = "AUTO"
    quantize_activations: bool = False
    _fixed: dict[tuple[int, int, bool], tuple[float, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def label(self) -> Label:
        """How well the parts are known, the worst of them."""
        labels: list[Label] = [self.machine.known]
        if self.layout.tp > 1:
            labels.append(self._all_reduce().label)
        gemms, *_ = _stage_gemms(self.shape, self.dtype, self.layout, 0)
        measured_once = any(gemm.stored not in ("16 bit", "FP8") for gemm in gemms)
        if self.shape.latent is not None or measured_once or self.layout.dp > 1 or self.shape.recurrent is not None:
            labels.append("estimated")  # figures of one model or layout of the kind alone are in the fit, or none
        if self.layout.pp > 1 and self.machine.network is not None and self._spans_nodes(self.layout.world):
            labels.append("estimated")
        return collectives.worst(*labels)

    def step_seconds(self, work: Work) -> tuple[float, ...]:
        """Seconds that each stage is busy with a step, the hop to the next one included."""
        local = self._share(work)
        everywhere = max(work.tokens, 1)
        key = (everywhere, local.rows, local.eager)
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = tuple(self._stage(stage, local, everywhere) for stage in range(self.layout.pp))
        per_kv, per_pair, per_absorbed_pair, per_scored_pair = self._attention_seconds
        if self.shape.latent is not None and (not local.eager or self._topk is not None):
            per_pair = per_absorbed_pair
        rows, kv, longest = max(local.rows, 1), local.kv_tokens, local.longest
        stage_seconds = []
        more_calls = 1e-6 * (local.calls - 1) * self.machine.coefficients.c_call
        pairs = local.pairs if self._topk is None else min(local.pairs, float(local.tokens * self._topk))
        for base, each, pair, scored in zip(fixed, per_kv, per_pair, per_scored_pair, strict=True):
            seconds = base + pairs * pair + local.pairs * scored
            for window, layers, read, read_far in each:
                tokens, row = (kv, longest) if window is None else (min(kv, window * rows), min(longest, window))
                far = max(tokens - FAR_ROW * rows, 0.0) if row > FAR_ROW else 0.0
                seconds += layers * (max((tokens - far) * read + far * read_far, self._row_seconds(row)) + more_calls)
            stage_seconds.append(seconds)
        return tuple(stage_seconds)

    @property
    def _topk(self) -> int | None:
        return _topk(self.shape)

    def _row_seconds(self, longest: float) -> float:
        """What one row's attention takes however few there are: split-kv gives a row only so many programs."""
        if longest <= SHORT_ROW:
            return 0.0
        cs = self.machine.coefficients
        below, beyond = min(longest, LONG_ROW) - SHORT_ROW, max(longest - LONG_ROW, 0.0)
        return 1e-9 * (cs.ns_row * below + cs.ns_long_row * beyond)

    @cached_property
    def without_power_limit(self) -> Costs | None:
        """The same at full clocks; None for a GPU whose limit is unknown, and for a CPU."""
        if self.machine.gpu.power is None:
            return None
        coefficients = replace(self.machine.coefficients, tflops_per_watt=math.inf)
        return replace(self, machine=replace(self.machine, coefficients=coefficients))

    @property
    def returns_tokens(self) -> bool:
        """Whether the last stage of a pipeline returns tokens to the first on the device, as it does on the GPUs of one node."""
        return self.layout.pp > 1 and self.machine.replays_graphs and not self._spans_nodes(self.layout.world)

    @property
    def has_long_prompts(self) -> bool:
        """Whether long prompts have a kernel of their own (kernels/attention/dispatch.py:supports_warp_specialized_prefill)."""
        shape = self.shape
        plain = not shape.sinks and shape.latent is None and all(window is None for window in shape.windows)
        return self.machine.gpu.sm == HOPPER and plain and shape.head_dim in LONG_PROMPT_HEAD_DIMS

    @property
    def graph_pairs(self) -> float:
        """Up to how many pairs of a prompt's token with a key one is."""
        shape = self.shape
        if shape.latent is None:
            return math.inf
        return max_absorbed_pairs(-(-shape.num_heads // self.layout.tp), shape.latent.cached)

    @property
    def graph_tokens(self) -> int:
        """Up to how many tokens a step with prompts is replayed from a graph."""
        return max_graph_tokens(self.shape, self.dtype, self.layout)

    def seconds(self, work: Work) -> float:
        """From the first stage's start to the last one's end."""
        return sum(self.step_seconds(work))

    def _share(self, work: Work) -> Work:
        dp = self.layout.dp
        if dp == 1:
            return work
        return replace(
            work, tokens=-(-work.tokens // dp), rows=-(-work.rows // dp), kv_tokens=work.kv_tokens / dp, pairs=work.pairs / dp
        )

    @cached_property
    def _attention_seconds(self) -> _Attention:
        return _attention_seconds(self.shape, self.dtype, self.kv, self.layout, self.machine, self.has_long_prompts)

    def _stage(self, stage: int, work: Work, everywhere: int) -> float:
        """What does not depend on contexts. everywhere: tokens of all groups of experts together."""
        machine, cs, layout = self.machine, self.machine.coefficients, self.layout
        tokens, forwards = max(work.tokens, 1), 1
        if machine.token_by_token:
            tokens, forwards, everywhere = 1, tokens, 1
        seconds = 0.0
        gemms, layers, moe_layers, between = _stage_gemms(self.shape, self.dtype, layout, stage)
        for gemm in gemms:
            seconds += gemm.count * self._gemm_seconds(gemm, tokens, everywhere)
        seconds += cs.passes * tokens * between / machine.bandwidth
        seconds += layers * self._chain_us(tokens) * 1e-6 + moe_layers * self._around_experts(everywhere)
        hidden_bytes = tokens * self.shape.hidden_size * 2.0
        if layout.tp > 1:
            seconds += 1e-6 * self._all_reduces_us(tokens, layers, moe_layers)
        if layout.dcp > 1:
            seconds += layers * self._divided_seconds(work.rows if work.eager else tokens)
        if layout.dp > 1 and moe_layers:
            payload = "e4m3" if self._experts_in_fp8 else "16 bit"
            seconds += moe_layers * self._exchange(payload).us(hidden_bytes) * 1e-6
        seconds, hidden_bytes = seconds * forwards, hidden_bytes * forwards
        if stage == layout.pp - 1:
            seconds += self._head_seconds(max(work.rows, 1)) + cs.c_step * 1e-6
        if layout.pp > 1:
            seconds += (cs.c_return * max(work.rows, 1) if self.returns_tokens else cs.c_hop) * 1e-6
            if stage < layout.pp - 1:
                between_nodes = machine.network if self._spans_nodes(layout.world) else None
                bandwidth = between_nodes.bandwidth if between_nodes else machine.gpu.link_bandwidth
                seconds += hidden_bytes / (0.85 * bandwidth)
        if (recurrent := self.shape.recurrent) is not None:
            own = set(weights.stage_layers(self.shape, self.dtype, layout.pp)[stage]) & set(recurrent.layers)
            flops = work.tokens * len(own) * recurrent.flops / layout.tp
            seconds += flops / (cs.e_prompt * machine.gpu.bf16_flops)
        state = request_bytes(stage_caches(self.shape, self.kv, self.dtype, layout)[stage])
        seconds += 2.0 * max(work.rows, 1) * state / machine.bandwidth  # read, and written
        launches = (layers - moe_layers) * cs.c_eager + moe_layers * cs.c_eager_experts
        return max(seconds, launches * 1e-6) if work.eager else seconds

    def _all_reduces_us(self, tokens: int, layers: int, moe_layers: int) -> float:
        """Microseconds of the two all-reduces of each layer, beyond the norms that a chain has without them.

        Long steps of dense layers hide a part, since their GEMMs write to the ranks that own the rows."""
        cs, nbytes = self.machine.coefficients, tokens * self.shape.hidden_size * 2.0
        tuned = self.strategy != "NCCL"
        hidden_part = cs.gemm_rs_hidden_part * min(tokens / LONG_STEP, 1.0) if tuned else 0.0
        us = self._all_reduce().us(nbytes)
        norms = 0.0 if tokens == 1 else 2 * cs.c_norm  # dense GEMMs of one token compute their own
        total = (layers - moe_layers) * max(2 * us * (1 - hidden_part) - norms, 0.0)
        routed = self._all_reduce(collectives.ROUTED).us(nbytes) if moe_layers and tuned and self._experts_in_fp8 else us
        return total + moe_layers * max(us + max(us, routed) - 2 * cs.c_norm, 0.0)

    def _divided_seconds(self, tokens: int) -> float:
        """What a layer takes for so many absorbed tokens where ranks divide those of latents: all queries are gathered, and
        outputs go to the ranks of their heads. Each moves half of what an all-reduce of as many bytes does. A few kernels pack and
        merge. The latents that a prompt gathers are not counted."""
        assert self.shape.latent is not None
        heads = self.shape.num_heads / self.layout.tp * self.layout.dcp
        curve = self._all_reduce("NCCL", self.layout.dcp)
        us = sum(curve.us(tokens * heads * width) for width in (self.shape.latent.cached, self.shape.latent.kv_rank + 2))
        return 1e-6 * (us + DIVIDED_KERNELS * self.machine.coefficients.c_norm)

    @cached_property
    def _experts_in_fp8(self) -> bool:
        gemms, _, _, _ = _stage_gemms(self.shape, self.dtype, self.layout, self.layout.pp - 1)
        return any(gemm.routed and gemm.stored == "FP8" for gemm in gemms)

    def _chain_us(self, tokens: int) -> float:
        """Microseconds of a layer's chain of kernels: fused at one token, skinny GEMMs at few, and tiles from MANY_ROWS on."""
        cs, latent = self.machine.coefficients, self.shape.latent
        part = min(max(tokens - FEW_ROWS, 0) / (MANY_ROWS - FEW_ROWS), 1.0)
        us = cs.c_one if tokens == 1 else cs.c_few + (cs.c_layer - cs.c_few) * part
        if latent is not None:
            us += cs.c_latent + (cs.c_query if latent.q_rank is not None else 0.0)
        return us

    def experts_seconds(self, tokens: int) -> float:
        """Seconds of the experts of one layer of the first stage that has them: router, GEMMs and what is between them."""
        gemms, _, moe_layers, _ = _stage_gemms(self.shape, self.dtype, self.layout, 0)
        count = self.shape.experts
        assert count is not None, self.shape.architecture
        everywhere = tokens * self.layout.dp
        seconds = sum(gemm.count * self._gemm_seconds(gemm, tokens, everywhere) for gemm in gemms if gemm.routed) / moe_layers
        return seconds + self._around_experts(everywhere)

    def _around_experts(self, everywhere: int) -> float:
        """Seconds of what a layer does for its experts beside their GEMMs. Each pair of a token with an expert of the rank has a
        row of its own."""
        cs, experts = self.machine.coefficients, self.shape.experts
        if experts is None:
            return 0.0
        ranks = self.layout.expert_ranks
        row = 2.0 * (self.shape.hidden_size + 3 * experts.intermediate * self.layout.moe_ep / self.layout.tp)
        pairs = everywhere * experts.per_token / ranks * _unevenness(experts, ranks, everywhere)
        passes = cs.passes_experts * pairs * row / self.machine.bandwidth
        chain = cs.c_moe + cs.c_moe_hidden * self.shape.hidden_size / 1024
        chosen = 1e-9 * cs.ns_pair * everywhere * experts.per_token
        return (chain + cs.c_expert * _busiest(experts, self.layout, everywhere)) * 1e-6 + chosen + passes

    def _gemm_seconds(self, gemm: _Gemm, tokens: int, everywhere: int) -> float:
        """of one GEMM of one layer. Where experts are routed, a rank reads those that all tokens reach, and computes its part; all
        wait for the busiest rank where experts are split by number."""
        cs, gpu, experts = self.machine.coefficients, self.machine.gpu, self.shape.experts
        if gemm.routed and experts is not None:
            physical, ranks = experts.count + self.layout.redundant, self.layout.expert_ranks
            nbytes = gemm.weight_bytes * _busiest(experts, self.layout, everywhere) * ranks / physical
            pairs = float(everywhere * experts.per_token)
            if gemm.stored not in weights.IN_4_BITS:  # whose GEMMs have tiles of their own
                pairs = _tiled_pairs(everywhere, experts.per_token, experts.count) * experts.count
            flops = gemm.flops * pairs / physical * _unevenness(experts, ranks, everywhere)
            peak = _reached_flops(gpu, cs, gemm.stored == "FP8", cs.e_experts_flops)
            part = cs.e_experts
            if gemm.stored in weights.IN_4_BITS:
                part, peak = part / cs.mxfp4, peak / cs.mxfp4_flops
            elif self.shape.quantization is not None and self.shape.quantization.block is not None:
                part = part / cs.block_experts
        else:
            nbytes, flops = float(gemm.weight_bytes), gemm.flops * tokens
            fp8, int4 = gemm.stored == "FP8", gemm.stored in ("INT4", "W8A16")
            peak, part = _reached_flops(gpu, cs, fp8, cs.e_flops), cs.e_bytes if fp8 else cs.e_bytes_16
            by_fp8 = self.quantize_activations and tokens > INT4_TOKENS and gpu.fp8_flops is not None
            if int4 and (by_fp8 or tokens <= INT4_TOKENS):
                part, peak = part * INT4_READ, INT4_FLOPS * _reached_flops(gpu, cs, by_fp8, cs.e_flops)
            elif gemm.stored == "NVFP4":  # by the GEMM of experts in MXFP4
                part, peak = part / cs.mxfp4, peak / cs.mxfp4_flops
            elif int4:
                nbytes += 2 * gemm.flops  # widened values: 2 bytes of each, written and read
        reached_bandwidth = part * self.machine.bandwidth
        read, compute = nbytes / reached_bandwidth, flops / peak
        sharpness = cs.sharpness_experts if gemm.routed else cs.sharpness
        top = max(read, compute)
        least = min(read, compute) / top if top else 0.0
        return top * float((1 + least**sharpness) ** (1 / sharpness))

    def _head_seconds(self, rows: int) -> float:
        head = weights.head(self.shape)
        flops = 2.0 * weights.local_shape(head, self.layout)[0] * self.shape.hidden_size
        nbytes = weights.tensor_bytes(self.shape, head, self.dtype, self.layout)
        gemm = _Gemm(1, nbytes, flops, weights.stored_in(self.shape, head, self.dtype), False)
        return self._gemm_seconds(gemm, rows, rows)

    def _spans_nodes(self, ranks: int) -> bool:
        return ranks > self.machine.gpus_per_node

    def _all_reduce(self, strategy: str | None = None, ranks: int | None = None) -> Curve:
        """ranks: None for all of the tensor-parallel group."""
        network = self.machine.network if self._spans_nodes(self.layout.tp) else None
        return collectives.all_reduce(
            self.machine.gpu, self.machine.link, ranks or self.layout.tp, network, strategy or self.strategy, self.shape.hidden_size
        )

    def _exchange(self, payload: str) -> Curve:
        assert self.shape.experts is not None
        network = self.machine.network if self._spans_nodes(self.layout.tp * self.layout.dp) else None
        return collectives.expert_exchange(
            self.machine.gpu, self.machine.link, self.layout.dp, network, self.exchange, payload, self.shape.experts.per_token
        )


def _reached_flops(gpu: GpuSpec, coefficients: Coefficients, fp8: bool, part: float) -> float:
    """Operations per second of long GEMMs: a part of the peak, or what the power limit allows, whichever is less. FP8 without FP8
    arithmetic runs in 16 bit."""
    in_fp8 = fp8 and gpu.fp8_flops is not None
    reached = part * gpu.flops("fp8" if in_fp8 else "bf16")
    if gpu.power is None:
        return reached
    return min(reached, gpu.power * coefficients.tflops_per_watt * 1e12 * (1.0 if in_fp8 else 0.5))


@cache
def _tiled_pairs(tokens: int, per_token: int, experts: int) -> float:
    """Pairs of a token with an expert that the GEMMs multiply for one expert under uniform routing, on average: its last tile is
    multiplied whole. The tiles are those of `kernels.moe.heuristics.tile_size`, which tests compare."""
    part, (tile, extra) = per_token / experts, expert_tile(tokens, per_token, experts)
    mean = tokens * part
    if mean > 8 * tile:
        return mean + (tile - extra) / 2
    if part == 1:
        return float(tile * max(1, -(-(tokens - extra) // tile)) + extra)
    total = 0.0
    for pairs in range(1, tokens + 1):
        chosen = math.lgamma(tokens + 1) - math.lgamma(pairs + 1) - math.lgamma(tokens - pairs + 1)
        probability = math.exp(chosen + pairs * math.log(part) + (tokens - pairs) * math.log1p(-part))
        if pairs > mean and probability < 1e-9:
            break
        total += probability * (tile * max(1, -(-(pairs - extra) // tile)) + (extra if pairs > tile else 0))
    return total


def expert_tile(tokens: int, per_token: int, experts: int) -> tuple[int, int]:
    """Pairs of a tile, and how many more its expert's last one may have, on Hopper and later."""
    half = (1 << (max(1, experts // per_token).bit_length() - 1)) / 2
    tile = next((size for size in (16, 32, 64) if tokens <= size * half), 128)
    if tile < 128:
        return tile, 0
    return (64 if -(-tokens // 2) <= 64 * half else 128), 16


@cache
def _busiest(experts: Experts, layout: Layout, tokens: int) -> float:
    """Experts and copies that tokens reach on the rank with the most of them, averaged over uniform routing. Each is reached with
    the same chance, and taken to be so by itself: a rank's number is binomial, and the largest of `ranks` such numbers is meant."""
    ranks, touched = layout.expert_ranks, _touched(experts, layout.redundant, tokens)
    if ranks == 1:
        return touched
    count = (experts.count + layout.redundant) // ranks
    chance, most, below = min(touched / (count * ranks), 1.0), 0.0, 0.0
    for number in range(count):
        below += math.comb(count, number) * chance**number * (1 - chance) ** (count - number)
        most += 1 - min(below, 1.0) ** ranks
    return max(most, 1.0)


@cache
def _unevenness(experts: Experts, ranks: int, tokens: int) -> float:
    """Pairs of a token with an expert on the busiest rank over the average, under uniform routing: the largest of `ranks`
    normal numbers is Blom's (1958) estimate above their mean, and a token's experts are drawn without putting back."""
    if ranks == 1 or tokens == 0:
        return 1.0
    score = statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    drawn = experts.per_token * (experts.count - experts.per_token) / max(experts.count - 1, 1)
    deviation = math.sqrt(tokens * drawn / ranks * (1 - 1 / ranks))
    return 1 + score * deviation * ranks / (tokens * experts.per_token)


def _touched(experts: Experts, copies: int, tokens: int) -> float:
    """Experts of a layer and copies of them that tokens reach under uniform routing. Copies are spread over the experts, and the
    tokens of an expert over its copies."""
    if not copies:
        return experts.touched(tokens)
    each, more = divmod(copies, experts.count)
    touched = 0.0
    for number, count in ((experts.count - more, 1 + each), (more, 2 + each)):
        touched += number * count * (1 - (1 - experts.per_token / experts.count / count) ** tokens)
    return touched


@cache
def _attention_seconds(
    shape: ModelShape, dtype: str, kv: str, layout: Layout, machine: MachineModel, long_prompts: bool
) -> _Attention:
    cs, gpu = machine.coefficients, machine.gpu
    one_byte = kv in ("fp8", "int8")
    near, far = (cs.e_kv_fp8, cs.e_far_fp8) if one_byte else (cs.e_kv, cs.e_far)
    computed = _latent_seconds(shape, layout, machine) if shape.latent else 0.0
    scored = 0.0 if shape.latent else 1e-12 * (cs.ps_head_fp8 if one_byte else cs.ps_head) * shape.num_heads / layout.tp
    dims = shape.latent.nope + shape.latent.rope + shape.latent.v if shape.latent else 2 * shape.mean_head_dim
    flops = 2.0 * shape.num_heads / layout.tp * dims
    reached = ((cs.e_long_prompt, cs.e_long_prompt_fp8) if long_prompts else (cs.e_prompt, cs.e_prompt_fp8))[one_byte]
    index_flops, topk = _index_flops(shape), _topk(shape)
    indexed = index_flops / (cs.e_latent_few * gpu.bf16_flops)
    reads, pairs, absorbed, scores = [], [], [], []
    for caches in stage_caches(shape, kv, dtype, layout):
        attended = [tuple(tensor for tensor in cache if not tensor.name.startswith("index")) for cache in caches]
        tokens = Counter((window_of(cache) or topk, token_bytes([cache]), computed) for cache in attended if token_bytes([cache]))
        layers = tokens.total()
        of_indexer = [token_bytes([cache]) - token_bytes([rest]) for cache, rest in zip(caches, attended, strict=True)]
        tokens.update((None, nbytes, indexed) for nbytes in of_indexer if nbytes)
        each: list[_Read] = []
        for (window, nbytes, least), count in tokens.items():
            nbytes_here = nbytes / layout.dcp
            read, read_far = (max(nbytes_here / part / machine.bandwidth + scored, least) for part in (near, far))
            each.append((window, count, read, read_far))
        reads.append(tuple(each))
        pairs.append(layers * flops / (reached * gpu.bf16_flops))
        absorbed.append(layers * computed)
        scores.append((tokens.total() - layers) * index_flops / (reached * gpu.bf16_flops))
    return _Attention(tuple(reads), tuple(pairs), tuple(absorbed), tuple(scores))


def _topk(shape: ModelShape) -> int | None:
    """How many tokens a query attends to at most; None: all."""
    return None if shape.indexer is None else shape.indexer.topk


def _index_flops(shape: ModelShape) -> float:
    """Operations of the score of one token by an indexer, which each rank has all of."""
    return 0.0 if shape.indexer is None else 2.0 * shape.indexer.heads * shape.indexer.head_dim


def _latent_seconds(shape: ModelShape, layout: Layout, machine: MachineModel) -> float:
    """What the heads of a rank take for one cached token of a decode row: each has a score of all of it, and sums its latent. With
    dcp a rank has as many times more heads and fewer tokens, and runs the kernel of few heads, which gives the log-sum-exp."""
    assert shape.latent is not None
    cs, heads = machine.coefficients, shape.num_heads / layout.tp
    reached = cs.e_latent if heads >= LATENT_HEADS and layout.dcp == 1 else cs.e_latent_few
    return 2.0 * heads * (shape.latent.cached + shape.latent.kv_rank) / (reached * machine.gpu.bf16_flops)


@cache
def _stage_gemms(shape: ModelShape, dtype: str, layout: Layout, stage: int) -> tuple[tuple[_Gemm, ...], int, int, float]:
    """The GEMMs of a stage; its layers, two blocks of which are one where a layer has one; those with experts; and bytes of
    activations between GEMMs, for one token of all layers."""
    layers = weights.stage_layers(shape, dtype, layout.pp)[stage]
    gemms: list[_Gemm] = []
    moe, between = 0, 0.0
    for first, count in Counter(weights.kind_of(shape)[layer] for layer in layers).items():
        groups: dict[str, list[Any]] = {}
        for tensor in layer_tensors(shape, first):
            if tensor.gemm:
                groups.setdefault(tensor.gemm, []).append(tensor)
        for tensors in groups.values():
            sizes = [math.prod(weights.local_shape(t, layout)) * weights.local_experts(t, layout) for t in tensors]
            nbytes = sum(weights.tensor_bytes(shape, tensor, dtype, layout) for tensor in tensors)
            stored = weights.stored_in(shape, tensors[0], dtype)
            gemms.append(_Gemm(count, nbytes, 2.0 * sum(sizes), stored, bool(tensors[0].experts)))
        experts = shape.experts_in(first)
        inner = shape.intermediate_in(first) if experts is None else experts.shared
        if shape.blocks and shape.blocks[first] not in ("mlp", "experts"):
            inner = 0
        moe += count if experts is not None else 0
        widths = 2 if shape.blocks else 3  # of an MLP's inner values: written and read, and those of a gate
        between += count * 2.0 * ((2 if shape.blocks else 4) * shape.hidden_size + widths * inner / layout.tp)
        if shape.recurrent is not None and first in shape.recurrent.layers:
            between += count * 2.0 * 2 * sum(shape.recurrent.widths) / layout.tp
    count = -(-len(layers) // 2) if shape.blocks else len(layers)
    return tuple(gemms), count, min(moe, count), between
