# SPDX-License-Identifier: Apache-2.0
"""Every layout of a model on a machine: what fits, how fast it is and how sure that is, and why the others are out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.config.experts import Experts
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.quantization import on_load
from phalanx.config.speculation import SpeculativeConfig
from phalanx.errors import CapacityError, LayoutError, OptionError
from phalanx.hardware import catalogue
from phalanx.layout import Layout
from phalanx.layout.cache import kv_dtype
from phalanx.layout.draft import DraftNetwork
from phalanx.layout.families import layer_tensors
from phalanx.layout.memory import blocks_of_request, most_positions, tokens_kept
from phalanx.layout.weights import kind_of, local_shape
from phalanx.planner import burst, coefficients, collectives, footprint, steady
from phalanx.planner.burst import Limits, Outcome
from phalanx.planner.collectives import Label
from phalanx.planner.cost import Costs, MachineModel
from phalanx.planner.speculation import Gain, Speculation, gain
from phalanx.planner.steady import SteadyLoad

BATCH_SIZE: int = EngineOptions.model_fields["max_batch_size"].default
Goal = Literal["latency", "throughput"]
BLOCK: int = EngineOptions.model_fields["kv_block_size"].default
"""Tokens of a KV block on a rank; `block_size` for those on all that divide them."""
EQUAL = 1.05
"""Plans within this factor are equally good: on average, predictions for a model that is not in the fit are 3 to 4 percent off, and
the difference of two such predictions the square root of 2 times that."""


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan. dtype, kv_cache_dtype: as the engine's options, but concrete; isl, osl: tokens in and out of
    each of `concurrency` requests at once; slo_*: seconds, None for no bound. fraction: of the memory left, the KV cache's
    part. redundant_experts, speculative_config, deterministic, quantize_activations: as the engine's options. draft: the network
    that speculative_config names, of which plans count the memory. kv_host_memory: of each host, in bytes. speculation: its
    drafts and how many are accepted, where this is stated; plans have the gain then. adapters: as of `footprint.Sizes`. *_size:
    only layouts with this size, None for any; of dcp_size: for those in which the cache then holds more of the requests."""

    dtype: str = "bf16"
    kv_cache_dtype: str = "model"
    isl: int = 1024
    osl: int = 1024
    concurrency: int = 64
    goal: Goal = "throughput"
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    max_batch_size: int | None = None
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    fraction: float = 0.9
    strategy: str = "AUTO"
    exchange: str = "AUTO"
    redundant_experts: int = 0
    speculative_config: str | None = None
    draft: DraftNetwork | None = None
    speculation: Speculation | None = None
    adapters: tuple[int, int] = (0, 1)
    kv_host_memory: int = 0
    deterministic: bool = False
    quantize_activations: bool = False
    tp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    dcp_size: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The asked sizes by flag."""
        sizes = {
            "--tp_size": self.tp_size, "--pp_size": self.pp_size, "--ep_size": self.ep_size, "--dcp_size": self.dcp_size,
        }  # fmt: skip
        return {flag: size for flag, size in sizes.items() if size is not None}

    @property
    def max_drafts(self) -> int:
        """As of `EngineOptions`."""
        config = self.speculative_config
        return 0 if config is None else SpeculativeConfig.of(config).num_speculative_tokens

    @property
    def seq_len(self) -> int:
        """Tokens of the longest request."""
        return self.isl + self.osl if self.max_seq_len is None else self.max_seq_len


@dataclass(frozen=True)
class Figure:
    """A predicted figure with its interval of 90 percent, and how it is known."""

    value: float
    low: float
    high: float
    label: Label

    @classmethod
    def of(cls, value: float, half: float, label: Label) -> Figure:
        return cls(value, value / (1 + half), value * (1 + half), label)

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "label": self.label}


@dataclass(frozen=True)
class Plan:
    """One layout that runs. bytes: of the fullest rank by kind; kv_tokens: of one replica, never more than its start gives;
    max_concurrency: requests of the asked length that its cache holds. Figures are of all requests at once; steady: those of one
    replica when they come one by one. gain: of speculative decoding, which no figure
    has. checked: as `Width`'s. `planner.explain` shows it."""

    layout: Layout
    bytes: dict[str, int]
    kv_tokens: int
    max_concurrency: int
    max_batch_size: int
    ms_per_token: Figure
    ttft_ms: Figure
    output_tokens_per_second: Figure
    steady: SteadyLoad
    notes: tuple[str, ...] = ()
    checked: bool = False
    gain: Gain | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(), "ms_per_token": self.ms_per_token.as_json(), "ttft_ms": self.ttft_ms.as_json(),
            "output_tokens_per_second": self.output_tokens_per_second.as_json(), "kv_tokens": self.kv_tokens,
            "steady": {
                "ttft_ms": self.steady.ttft_s * 1e3, "ms_per_token": self.steady.ms_per_token,
                "requests_per_second": self.steady.requests_per_second * self.layout.replicas,
            },
            "max_concurrency": self.max_concurrency, "max_batch_size": self.max_batch_size, "gpus": self.layout.gpus,
            "bytes_per_gpu": self.bytes, "notes": list(self.notes), "range_checked": self.checked,
            **({} if self.gain is None else {"speculation": self.gain.as_json()}),
        }  # fmt: skip


@dataclass(frozen=True)
class Rejected:
    """A layout that is out, and the reason that binds. short: bytes of one GPU that are missing, where memory is the reason."""

    layout: Layout
    reason: str
    short: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"layout": self.layout.as_json(), "reason": self.reason}


@dataclass(frozen=True)
class SearchResult:
    """Plans, the best first, and the rejected layouts."""

    plans: list[Plan]
    rejected: list[Rejected]
    changes: list[str] = field(default_factory=list)


def search(shape: ModelShape, machine: MachineModel, request: PlanRequest) -> SearchResult:
    """All asked layouts on up to all GPUs of the machine, the best first; of those within EQUAL of it, the best known leads. The
    nearest changes that would fit where nothing does.

    Raises OptionError for a length that the model does not have, or that is below the requests'.
    """
    if request.seq_len < request.isl + request.osl:
        raise OptionError(
            f"max_seq_len={request.seq_len} is too small", held=f"a request has {request.isl} + {request.osl} tokens",
            next=f"give at least {request.isl + request.osl}, or a smaller --isl or --osl",
        )  # fmt: skip
    if request.seq_len > shape.max_positions:
        raise OptionError(
            f"requests of {request.seq_len} tokens do not fit the model", held=f"its positions end at {shape.max_positions}",
            next=f"use --isl and --osl that add up to at most {shape.max_positions}",
        )  # fmt: skip
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    for layout in asked_layouts(shape, machine, request):
        verdict = examine(shape, machine, request, layout)
        (plans if isinstance(verdict, Plan) else rejected).append(verdict)  # type: ignore[arg-type]
    if not plans and not rejected:  # sizes of which there is no layout here
        dcp = request.dcp_size or 1
        layout = Layout(tp=request.tp_size or dcp, pp=request.pp_size or 1, dp=request.ep_size or 1, dcp=dcp)
        rejected.append(Rejected(layout, _illegal(shape, machine, layout) or f"{layout.name} is no layout of this machine"))
    plans.sort(key=lambda plan: _rank(plan, request.goal))
    if plans:
        leading = _best_known(plans, request.goal)
        plans.remove(leading)
        plans.insert(0, leading)
    rejected.sort(key=lambda each: (_UNEVEN in each.reason, each.short))
    return SearchResult(plans, rejected, [] if plans else nearest(shape, machine, request, rejected))


def _rank(plan: Plan, goal: Goal) -> tuple[float, ...]:
    rate, wait = -plan.output_tokens_per_second.value, plan.ms_per_token.value
    tie = (plan.layout.gpus, plan.layout.tp * plan.layout.pp * plan.layout.dp)
    return (rate, wait, *tie) if goal == "throughput" else (wait, rate, *tie)


def _best_known(plans: Sequence[Plan], goal: Goal) -> Plan:
    """The best known of those that are as good as the first; of these, one whose ranks share all experts, since the figures are of
    uniform routing, which whole experts on ranks depend on; the better one among equals."""

    def figure(plan: Plan) -> Figure:
        return plan.output_tokens_per_second if goal == "throughput" else plan.ms_per_token

    best = figure(plans[0]).value
    equals = (plan for plan in plans if max(best, figure(plan).value) <= EQUAL * min(best, figure(plan).value))
    return min(equals, key=lambda plan: (collectives.ORDER.index(figure(plan).label), plan.layout.dp * plan.layout.moe_ep > 1))


def layouts(shape: ModelShape, machine: MachineModel, redundant: int = 0) -> Iterator[Layout]:
    """Every product of sizes up to the machine's GPUs, each with as many replicas as there is room for. redundant: copies of
    experts in each layer."""
    total = machine.gpus
    for world in range(1, total + 1):
        for tp in _divisors(world):
            for pp in _divisors(world // tp):
                dp = world // tp // pp
                if (dp > 1 and shape.experts is None) or (tp & (tp - 1) and shape.num_heads % tp):
                    continue
                dcps = _divisors(tp) if shape.latent is not None and shape.indexer is None else [1]
                moe_eps = _divisors(tp) if dp == 1 and shape.experts is not None else [1]
                for dcp in dcps:
                    for moe_ep in moe_eps:
                        yield Layout(pp, dp, tp, moe_ep, redundant, total // world, dcp)


def asked_layouts(shape: ModelShape, machine: MachineModel, request: PlanRequest) -> Iterator[Layout]:
    """Those of `layouts` that have the asked sizes. Unless its size is asked for, all ranks of a tensor-parallel group divide
    latents, or none does."""
    for layout in layouts(shape, machine, request.redundant_experts):
        sizes = (
            (request.tp_size, layout.tp), (request.pp_size, layout.pp), (request.ep_size, layout.dp),
            (request.dcp_size, layout.dcp),
        )  # fmt: skip
        if all(size in (None, own) for size, own in sizes) and (request.dcp_size or layout.dcp in (1, layout.tp)):
            yield layout


def block_size(layout: Layout) -> int:
    """Tokens of a KV block."""
    return BLOCK * layout.dcp


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class Fitting:
    """A layout that starts. costs: of its steps; slots: requests at once in one replica; bytes: as `Plan`'s; rank: the fullest."""

    costs: Costs
    slots: int
    bytes: dict[str, int]
    rank: footprint.RankMemory

    def requests(self, request: PlanRequest) -> int:
        """Of the asked length, that the cache of one replica holds."""
        return footprint.requests_held(self.rank.kv_tokens, self.costs.layout.dp, request.seq_len)


def fitting(shape: ModelShape, machine: MachineModel, request: PlanRequest, layout: Layout) -> Fitting | Rejected:
    """Whether the layout starts and holds a request of the asked length, or why not: it does not divide, spans nodes, does not
    fit."""
    if reason := _illegal(shape, machine, layout) or _without_draft(request.draft, layout):
        return Rejected(layout, reason)
    if request.deterministic and layout.dp > 1:  # which `resolve` refuses
        return Rejected(layout, f"ep {layout.dp} pads the steps of its groups to one size, and deterministic knows no such steps")
    kv = kv_dtype(request.kv_cache_dtype, request.dtype)
    share = -(-request.concurrency // layout.replicas)
    slots = min(max(BATCH_SIZE, -(-share // 8) * 8), 512) if request.max_batch_size is None else request.max_batch_size
    if slots < layout.dp:
        return Rejected(layout, f"ep {layout.dp} runs requests of its own in each group, and max_batch_size is {slots}")
    rank_bytes, rank, short = memory(shape, machine, request, layout, slots, kv)
    if not footprint.requests_held(rank.kv_tokens, layout.dp, request.seq_len):
        return Rejected(layout, _too_small(rank_bytes, rank.kv_tokens // layout.dp, short, request), short)
    priced = machine.deterministic if request.deterministic else machine
    costs = Costs(
        shape, request.dtype, kv, layout, priced, request.strategy, request.exchange, request.quantize_activations
    )  # fmt: skip
    return Fitting(costs, slots, rank_bytes, rank)


def examine(shape: ModelShape, machine: MachineModel, request: PlanRequest, layout: Layout) -> Plan | Rejected:
    """A plan for the layout, or why there is none: it does not start, or misses an objective."""
    fits = fitting(shape, machine, request, layout)
    if isinstance(fits, Rejected):
        return fits
    share = -(-request.concurrency // layout.replicas)
    if layout.dcp > 1 and request.dcp_size is None:
        undivided = fitting(shape, machine, request, replace(layout, dcp=1))
        running = min(share, fits.slots)
        if isinstance(undivided, Fitting) and undivided.requests(request) >= running:
            return Rejected(layout, f"without dcp the cache holds all of {running} requests, and steps are shorter")
    blocks, length = fits.rank.blocks // layout.dp, request.isl + request.osl
    kv_tokens = tokens_kept(fits.rank.windows, blocks, block_size(layout), length) * layout.dp
    limits = Limits(fits.slots, request.max_num_tokens, kv_tokens)
    outcome = burst.run(fits.costs, share, request.isl, request.osl, limits)
    load = steady.run(fits.costs, share, request.isl, request.osl, limits)
    for name, value, at_once, bound in (
        ("TTFT", load.ttft_s * 1e3, outcome.ttft_s * 1e3, request.slo_ttft),
        ("time per token", load.ms_per_token, outcome.ms_per_token, request.slo_tpot),
    ):
        if bound is not None and value > bound * 1e3:
            reason = f"{name} {value:,.1f} ms of a steady load ({at_once:,.1f} ms if all come at once) is over the objective of"
            return Rejected(layout, f"{reason} {bound * 1e3:,.1f} ms")
    return _plan(request, fits, outcome, load)


def _without_draft(draft: DraftNetwork | None, layout: Layout) -> str:
    """Why a network cannot propose drafts in a layout; empty where it can, or there is none."""
    if draft is None:
        return ""
    try:
        for tensor in draft.tensors():
            tensor.local(layout.tp)
    except LayoutError as error:
        return f"tp {layout.tp} does not divide the draft model: {error.held or error.failure}"
    return ""


_UNEVEN = "do not stand evenly on nodes of"


def _illegal(shape: ModelShape, machine: MachineModel, layout: Layout) -> str:
    tp, pp, moe_ep = layout.tp, layout.pp, layout.moe_ep
    experts = shape.experts
    if pp > shape.num_layers:
        return f"pp {pp} exceeds the model's {shape.num_layers} layers"
    for name, size in (("ep", layout.dp), ("moe_ep", moe_ep)):
        if experts is None and size > 1:
            return f"{name} {size} splits experts, and the model has none"
        if experts is not None and experts.count % size:
            return f"{name} {size} does not divide num_experts={experts.count}"
    if layout.dcp > 1 and shape.latent is None:
        return f"dcp {layout.dcp} divides the tokens of latents, and the model caches keys and values"
    if layout.dcp > 1 and shape.indexer is not None:
        return f"dcp {layout.dcp} divides the tokens of latents, and the model's indexer reads all of them"
    if layout.redundant and (reason := _no_copies(experts, layout)):
        return reason
    try:
        for first in set(kind_of(shape)):
            for tensor in layer_tensors(shape, first):
                local_shape(tensor, layout)
    except LayoutError as error:
        return f"tp {tp} does not divide: {error.held or error.failure}"
    per_node, world = machine.gpus_per_node, layout.world
    if tp > per_node:
        network = machine.network
        speed = f"over {network.bandwidth / 1e9:g} GB/s" if network else "without a network"
        return f"tp {tp} spans nodes: {2 * shape.num_layers} all-reduces a token {speed}"
    if world > machine.gpus:
        return f"{world} ranks need more than the machine's {machine.gpus} GPUs"
    if per_node % tp or (world < per_node and per_node % world) or (world > per_node and world % per_node):
        return f"{world} ranks {_UNEVEN} {per_node} GPUs"
    return ""


def _no_copies(experts: Experts | None, layout: Layout) -> str:
    """Why a layer's experts can have no such copies; empty where they can."""
    if experts is None or layout.moe_ep == 1:
        why = "the model has no experts" if experts is None else "only ranks of moe_ep above 1 hold copies"
        return f"redundant_experts {layout.redundant}: {why}"
    most = experts.count * (layout.moe_ep - 1)
    if layout.redundant % layout.moe_ep or layout.redundant > most:
        return f"redundant_experts {layout.redundant} is no multiple of moe_ep {layout.moe_ep} up to {most}"
    return ""


def memory(
    shape: ModelShape, machine: MachineModel, request: PlanRequest, layout: Layout, slots: int, kv: str
) -> tuple[dict[str, int], footprint.RankMemory, int]:  # fmt: skip
    """Bytes of the fullest rank by kind, that rank, and the bytes that are missing for one request of the asked length."""
    total, shape = machine.gpu.memory_bytes, shape.with_drafts(request.max_drafts)
    sizes = footprint.Sizes(
        request.dtype,
        kv,
        slots,
        request.max_num_tokens,
        block_size(layout),
        request.fraction,
        draft=request.draft,
        adapters=request.adapters,
        seq_len=request.seq_len,
        host_tier=request.kv_host_memory > 0,
    )
    rank = footprint.rank_memory(shape, layout, total, sizes)
    needed = blocks_of_request(rank.windows, request.seq_len, block_size(layout)) * rank.block
    short = max(math.ceil((needed - rank.budget) / request.fraction), 0)
    rank_bytes = {
        "weights": rank.weights, "activations_and_context": rank.beside, "graphs": rank.graphs, "kv": rank.kv,
        "unused": max(total - rank.weights - rank.state - rank.beside - rank.graphs - rank.kv, 0), "capacity": total,
        **({"request_state": rank.state} if rank.state else {}),
    }  # fmt: skip
    return rank_bytes, rank, short


def _too_small(rank_bytes: dict[str, int], kv_tokens: int, short: int, request: PlanRequest) -> str:
    """kv_tokens: of one data-parallel group."""
    beside = rank_bytes["activations_and_context"] + rank_bytes["graphs"] + rank_bytes.get("request_state", 0)
    text = f"memory: weights {_gb(rank_bytes['weights'])} and {_gb(beside)} beside them on a GPU of {_gb(rank_bytes['capacity'])}"
    if rank_bytes["weights"] + beside > rank_bytes["capacity"]:
        return f"{text}: {_gb(rank_bytes['weights'] + beside - rank_bytes['capacity'])} too much"
    return f"{text} leave room for {kv_tokens:,} KV tokens, and a request takes {request.seq_len:,}: {_gb(short)} short"


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def _plan(request: PlanRequest, fits: Fitting, outcome: Outcome, load: SteadyLoad) -> Plan:
    costs, layout, machine = fits.costs, fits.costs.layout, fits.costs.machine
    label, interval = costs.label, width(costs, request.isl + request.osl / 2)
    rate = outcome.output_tokens_per_second * request.concurrency / -(-request.concurrency // layout.replicas)
    notes = []
    if request.dtype == "fp8" and machine.gpu.fp8_flops is None:
        notes.append(f"{machine.gpu.name} has no FP8 arithmetic: weights are stored in FP8 and GEMMs run in 16 bit")
    if layout.world > machine.gpus_per_node and layout.pp == 1:
        notes.append("expert parallelism over nodes")
    requests = fits.requests(request) * layout.replicas
    gained = None
    if request.speculation is not None:
        gained = gain(costs, request.speculation, outcome.running, request.isl + request.osl / 2, fits.slots)
    return Plan(
        layout, fits.bytes, fits.rank.kv_tokens, requests, fits.slots,
        Figure.of(outcome.ms_per_token, interval.half, label), Figure.of(outcome.ttft_s * 1e3, interval.half * TTFT_WIDER, label),
        Figure.of(rate, interval.half, label), load, tuple(notes), interval.checked, gained,
    )  # fmt: skip


TTFT_WIDER = 1.5
"""Times as wide as the others' is the interval of the time to the first token: no coefficient is fitted to it."""


Kind = Literal["dense", "experts", "contexts", "latent", "mxfp4"]
LONG_CONTEXT = 4096
"""Tokens of a mean context from which on a figure is one of `contexts`."""


def kind(shape: ModelShape, context: float) -> Kind:
    """The kind of rows that say how wide a figure's interval is. context: mean tokens of a request while it decodes."""
    if shape.quantization is not None and shape.quantization.stored == "MXFP4":
        return "mxfp4"
    if shape.latent is not None:
        return "latent"
    if context >= LONG_CONTEXT:
        return "contexts"
    return "dense" if shape.experts is None else "experts"


@dataclass(frozen=True)
class Width:
    """half: of the interval, as a part of the figure. checked: whether 9 of 10 rows
    whose model or layout neither the fit nor the width had seen were inside such an interval."""

    half: float
    checked: bool


def width(costs: Costs, context: float) -> Width:
    """The interval of a figure by its kind: of the errors of a measured class (its layout left out of the fit, or its model, where
    the fit has not seen it), and at least the committed width of a class that was never measured."""
    widths, shape = coefficients.document()["intervals"], costs.shape
    of_kind = kind(shape, context)
    part = "layout" if [shape.hidden_size, shape.num_layers] in widths["models"] else "model"
    parts = [widths["kinds"][of_kind][part]]
    if costs.label in ("derived", "estimated"):
        parts.append(widths[costs.label])
    linked = costs.layout.tp == 1 or costs.machine.link.startswith("nvlink")
    if not linked:
        parts.append(widths["estimated"])
    coverage = widths["checked"][part].get(of_kind)
    covered = coverage is not None and coverage["inside"] >= 0.9 * coverage["rows"]
    half = max(float(each) for each in parts)
    return Width(half, covered and linked and costs.label in ("measured", "table"))


def nearest(shape: ModelShape, machine: MachineModel, request: PlanRequest, rejected: list[Rejected]) -> list[str]:
    """The smallest changes, one at a time, each of which leads to a plan: of flags and requests first, then of hardware."""
    changes = []
    if plan := closest(shape, machine, request):
        changes.append(f"{_relaxed(plan, request)} would be held by {plan.layout.name}")
    elif tight := [each for each in rejected if each.short]:
        best = min(tight, key=lambda each: each.short)
        changes.append(f"{best.layout.name} is {_gb(best.short)} short on each GPU")
    anyhow = replace(request, tp_size=None, pp_size=None, ep_size=None, dcp_size=None)
    if request.sizes and (free := _first(shape, machine, anyhow)):
        changes.append(f"without {' and '.join(request.sizes)}, {free.name} would run")
    if length := _longest(shape, machine, request):
        changes.append(f"requests of at most {length:,} tokens (--isl and --osl together; --max_seq_len {length}) would fit")
    choices: list[tuple[str, PlanRequest]] = [("", request)]
    if not on_load(request.dtype) and shape.quantization is None and machine.gpu.fp8_flops:
        choices.append(("--dtype fp8", replace(request, dtype="fp8")))
    if request.kv_cache_dtype not in ("fp8", "int8"):
        choices += [(f"{name} --kv_cache_dtype fp8".strip(), replace(other, kv_cache_dtype="fp8")) for name, other in choices[:]]
    hardware: list[tuple[int, str]] = []
    for name, other in choices:
        change = _fewest_gpus(shape, machine, other)
        if change and all(change[1].gpus < gpus for gpus, _ in hardware):  # what needs as many GPUs as a smaller change is no help
            flags, layout = change
            hardware.append((layout.gpus, f"{' '.join(part for part in (name, flags) if part)} would run as {layout.name}"))
    return changes + [change for _, change in sorted(hardware)]


def closest(shape: ModelShape, machine: MachineModel, request: PlanRequest) -> Plan | None:
    """The plan that misses the objectives by the least; None without objectives, or where no layout fits."""
    slower = replace(request, slo_ttft=None, slo_tpot=None)
    if slower == request:
        return None
    verdicts = [examine(shape, machine, slower, layout) for layout in asked_layouts(shape, machine, slower)]
    plans = [verdict for verdict in verdicts if isinstance(verdict, Plan) and math.isfinite(verdict.steady.ttft_s)]

    def over(plan: Plan) -> float:
        bounds = ((plan.steady.ttft_s, request.slo_ttft), (plan.steady.ms_per_token / 1e3, request.slo_tpot))
        return max(value / bound for value, bound in bounds if bound is not None)

    return min(plans, key=over, default=None)


def _relaxed(plan: Plan, request: PlanRequest) -> str:
    """The objectives, as far as they must be relaxed for the plan, as flags."""
    bounds = (("ttft", plan.steady.ttft_s, request.slo_ttft), ("tpot", plan.steady.ms_per_token / 1e3, request.slo_tpot))
    return " ".join(f"--slo_{name} {math.ceil(max(value, bound) * 1e3)}" for name, value, bound in bounds if bound is not None)


def _fewest_gpus(shape: ModelShape, machine: MachineModel, request: PlanRequest) -> tuple[str, Layout] | None:
    """The fewest GPUs, from this machine's on, that hold the model, as flags; and the best layout on them."""
    sizes = [(per_node, 1) for per_node in (1, 2, 4, 8) if machine.gpus_per_node <= per_node <= machine.gpu.gpus_per_node]
    sizes += [(max(machine.gpus_per_node, machine.gpu.gpus_per_node), nodes) for nodes in (2, 4, 8)]
    for per_node, nodes in sizes:
        if per_node * nodes < machine.gpus:
            continue
        network = machine.network or catalogue.network("ib-ndr")
        larger = replace(machine, gpus_per_node=per_node, nodes=nodes, network=network if nodes > 1 else None)
        if layout := _first(shape, larger, request):
            same = (per_node, nodes) == (machine.gpus_per_node, machine.nodes)
            flags = f"--gpus_per_node {per_node}" + (f" --nodes {nodes}" if nodes > 1 else "")
            return "" if same else flags, layout
    return None


def _first(shape: ModelShape, machine: MachineModel, request: PlanRequest) -> Layout | None:
    verdicts = (examine(shape, machine, request, layout) for layout in asked_layouts(shape, machine, request))
    plans = [verdict for verdict in verdicts if isinstance(verdict, Plan)]
    return min(plans, key=lambda plan: _rank(plan, request.goal)).layout if plans else None


def _longest(shape: ModelShape, machine: MachineModel, request: PlanRequest) -> int:
    """Tokens of the longest request that some layout holds, 0 for none."""
    longest = 0
    kv = kv_dtype(request.kv_cache_dtype, request.dtype)
    for layout in asked_layouts(shape, machine, request):
        if not _illegal(shape, machine, layout):
            slots = BATCH_SIZE if request.max_batch_size is None else request.max_batch_size
            _, rank, _ = memory(shape, machine, request, layout, slots, kv)
            longest = max(longest, most_positions(rank.windows, rank.blocks // layout.dp, block_size(layout)))
    return longest if 0 < longest < request.seq_len else 0


def require(result: SearchResult) -> Plan:
    """The best plan. Raises CapacityError with the nearest changes where there is none."""
    if result.plans:
        return result.plans[0]
    binding = result.rejected[0].reason if result.rejected else "there is no layout"
    raise CapacityError("no layout fits", why=binding, next="; ".join(result.changes) or "a larger machine")
