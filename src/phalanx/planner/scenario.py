# SPDX-License-Identifier: Apache-2.0
"""A simulated deployment: replicas, objective; latencies by percentile, goodput, cost, and how many replicas it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.model import ModelShape
from phalanx.engine.limits import SchedulerOptions, depth_of
from phalanx.errors import CapacityError, LayoutError, OptionError
from phalanx.layout import Layout
from phalanx.layout.cache import default_snapshots, group_windows, kv_dtype, request_bytes
from phalanx.layout.draft import network_caches
from phalanx.layout.families import model_cache
from phalanx.layout.memory import HostCounts, copied_blocks, stage_caches, tokens_kept
from phalanx.planner import footprint, search, simulate
from phalanx.planner.arrivals import Arrival
from phalanx.planner.coefficients import document as document_of_coefficients
from phalanx.planner.cost import Costs, MachineModel
from phalanx.planner.search import PlanRequest, Rejected
from phalanx.planner.simulate import NO_FRONTEND, Frontend, Served, SimulationResult
from phalanx.planner.speculation import Speculation

MOST_REPLICAS = 1000


@dataclass(frozen=True)
class Bounds:
    """Seconds, None for no bound; part: of the requests that must hold them."""

    ttft: float | None = None
    tpot: float | None = None
    part: float = 0.99

    def holds(self, served: Served) -> bool:
        within = self.ttft is None or served.ttft <= self.ttft
        return not served.refused and within and (self.tpot is None or served.tpot <= self.tpot)


@dataclass(frozen=True)
class ReplicaSpec:
    """What one replica is: its costs, the limits of its scheduler, and what lies before it. copies: to and from
    host memory. speculation: its drafts, if it has any."""

    costs: Costs
    options: SchedulerOptions
    frontend: Frontend = NO_FRONTEND
    copies: simulate.CopySeconds = simulate.NO_COPIES
    speculation: Speculation | None = None

    @property
    def kv_tokens(self) -> int:
        """That it holds, in requests of full length."""
        options = self.options
        return tokens_kept(options.windows, options.num_blocks, options.block_size, options.max_seq_len)

    @classmethod
    def of(
        cls, shape: ModelShape, machine: MachineModel, request: PlanRequest, layout: Layout, *, prefix_caching: bool = True,
        frontend: Frontend = NO_FRONTEND, sharing: int = 1,
    ) -> ReplicaSpec:  # fmt: skip
        """sharing: replicas that share the host memory of the request, if it has some, as far as a host holds so many. Raises
        LayoutError for a layout that cannot be, CapacityError for one that does not fit."""
        fits = search.fitting(shape, machine, request, layout)
        if isinstance(fits, Rejected):
            if not fits.short:
                raise LayoutError(f"{layout.name} cannot run", why=fits.reason)
            changes = search.nearest(shape, machine, request, [fits])
            raise CapacityError(f"{layout.name} does not fit", why=fits.reason, next="; ".join(changes))
        caches, host = model_cache(shape), HostCounts(0, 0)
        if request.kv_host_memory and prefix_caching:
            kv = kv_dtype(request.kv_cache_dtype, request.dtype)
            sizes = footprint.Sizes(request.dtype, kv, fits.slots, request.max_num_tokens, search.block_size(layout))
            shared = replace(layout, replicas=sharing)
            host = footprint.on_host(shape, shared, machine.gpus_per_node, request.kv_host_memory, sizes)
        options = SchedulerOptions(
            num_blocks=fits.rank.blocks,
            block_size=search.block_size(layout),
            max_batch_size=fits.slots,
            max_num_tokens=request.max_num_tokens,
            max_seq_len=request.seq_len,
            depth=depth_of(layout.pp, returns_tokens=fits.costs.returns_tokens),
            pipeline_stages=layout.pp,
            returns_tokens=fits.costs.returns_tokens,
            max_drafts=0 if request.speculation is None else request.speculation.drafts,
            drafts_keep_kv=request.draft is not None,
            windows=group_windows([*caches, *([] if request.draft is None else network_caches(request.draft, request.dtype))]),
            prefix_caching=prefix_caching,
            state_snapshots=default_snapshots(fits.slots) if prefix_caching and request_bytes(caches) else 0,
            host_blocks=host.blocks,
            host_states=host.states,
            copied_blocks=copied_blocks(max(fits.rank.block, 1)),
        )
        state = max(map(request_bytes, stage_caches(shape, kv_dtype(request.kv_cache_dtype, request.dtype), request.dtype, layout)))
        copies = simulate.CopySeconds(*(size / machine.gpu.pcie_bandwidth for size in (fits.rank.block, state)))
        return cls(fits.costs, options, frontend, copies, request.speculation)

    @property
    def layout(self) -> Layout:
        return self.costs.layout

    def run(self, arrivals: Sequence[Arrival], replicas: int = 1, concurrency: int | None = None) -> SimulationResult:
        """Prefixes are only looked up where the trace tells contents: elsewhere nothing could be found."""
        options = self.options
        if not any(arrival.content for arrival in arrivals[:100]):
            options = SchedulerOptions(**{**vars(options), "prefix_caching": False})
        return simulate.run(
            self.costs, options, arrivals, replicas, concurrency, self.frontend, copies=self.copies,
            speculation=self.speculation,
        )  # fmt: skip


def frontend_of(machine: MachineModel, path_ms: float | None = None, event_us: float | None = None) -> tuple[Frontend, str]:
    """What lies between a client and the engine, and where that is from: as given, else as it was measured on a server with GPUs or
    on one without. Raises OptionError for less than 0."""
    if min(path_ms or 0.0, event_us or 0.0) < 0:
        raise OptionError("a time is below 0", held=f"path_ms={path_ms}, event_us={event_us}", next="give 0 or more")
    name = "gpu" if machine.replays_graphs else "cpu"
    measured = document_of_coefficients()["frontend"][name]
    path = measured["path_ms"] if path_ms is None else path_ms
    event = measured["event_us"] if event_us is None else event_us
    chosen = [each for each, value in (("path_ms", path_ms), ("event_us", event_us)) if value is not None]
    source = f"measured on {measured['machine']}" + (f"; {' and '.join(chosen)} given" if chosen else "")
    return Frontend(1e-3 * path, 1e-6 * event), "given" if len(chosen) == 2 else source


def fewest_replicas(replica: ReplicaSpec, arrivals: Sequence[Arrival], bounds: Bounds) -> int:
    """The smallest number of replicas with which the part of the requests holds the bounds: doubled until it does, then halved in.

    Raises OptionError without bounds, CapacityError where 1,000 do not hold them.
    """
    if bounds.ttft is None and bounds.tpot is None:
        raise OptionError("--find_replicas has no objective", next="give --slo_ttft or --slo_tpot")

    def enough(count: int) -> bool:
        served = replica.run(arrivals, count).served
        return sum(map(bounds.holds, served)) >= bounds.part * len(served)

    low, high = 0, 1
    while not enough(high):
        low, high = high, min(high * 2, MOST_REPLICAS)
        if low == high:
            alone = replica.run(arrivals[:1])
            raise CapacityError(
                f"{MOST_REPLICAS} replicas do not hold the objective",
                held=f"alone, the first request has a TTFT of {alone.served[0].ttft * 1e3:.0f} ms and "
                f"{alone.served[0].tpot * 1e3:.1f} ms per token",
                next="take a layout with a lower latency, or loosen the objective",
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def percentile(values: Sequence[float], part: float) -> float:
    """By linear interpolation between the nearest two, as numpy's default; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * part
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, in ms of seconds."""
    statistics = {"mean": sum(values) / len(values) if values else 0.0}
    statistics |= {f"p{round(part * 100)}": percentile(values, part) for part in (0.5, 0.9, 0.99)}
    return {name: value * 1e3 for name, value in statistics.items()}


def document(
    replica: ReplicaSpec, arrivals: Sequence[Arrival], replicas: int, bounds: Bounds, *, concurrency: int | None = None,
    gpu_hour: float | None = None, trace: str = "", model: str = "", frontend_source: str = "none",
) -> dict[str, Any]:  # fmt: skip
    """The report of one simulation."""
    result = replica.run(arrivals, replicas, concurrency)
    done = [each for each in result.served if not each.refused]
    refused = [each.refused for each in result.served if each.refused]
    gpus = replica.layout.world * replicas
    seconds = result.seconds or 1.0
    measures: dict[str, Callable[[Served], float]] = {
        "ttft_ms": lambda s: s.ttft, "tpot_ms": lambda s: s.tpot, "e2e_ms": lambda s: s.e2e, "queued_ms": lambda s: s.queued,
    }  # fmt: skip
    good = sum(map(bounds.holds, result.served))
    report: dict[str, Any] = {
        "asked": {
            "model": model,
            "trace": trace,
            "layout": replica.layout.as_json(),
            "replicas": replicas,
            "gpus": gpus,
            "requests": len(arrivals),
            "concurrency": concurrency,
            "kv_tokens": replica.kv_tokens,
            "host_blocks": replica.options.host_blocks,
            "max_batch_size": replica.options.max_batch_size,
            "slo_ttft_ms": _ms(bounds.ttft),
            "slo_tpot_ms": _ms(bounds.tpot),
            "slo_part": bounds.part,
        },
        "frontend": {
            "path_ms": 1e3 * replica.frontend.path,
            "event_us": 1e6 * replica.frontend.event,
            "source": frontend_source,
        },
        "seconds": result.seconds,
        "completed": len(done),
        "refused": len(refused),
        "errors": sorted(set(refused))[:3],
        **{name: spread([measure(each) for each in done]) for name, measure in measures.items()},
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": result.generated / seconds,
        "goodput_requests_per_second": good / seconds,
        "within_slo": good / len(result.served) if result.served else 1.0,
        "prefix_hit_rate": result.hits / result.queries if result.queries else 0.0,
        "prompt_tokens": sum(each.input_len for each in done),
        **result.counts,
        "busy": result.busy / (seconds * replicas),
        "simulated_tokens": result.computed + result.hits,
        "cpu_s": result.cpu,
        "simulated_tokens_per_core_second": result.tokens_per_core_second,
        "label": replica.costs.label,
    }
    if gpu_hour is not None:
        price = gpu_hour * gpus * seconds / 3600
        report["cost_per_million_output_tokens"] = price / max(result.generated, 1) * 1e6
    report["samples"] = {"ttft_ms": [each.ttft * 1e3 for each in done], "tpot_ms": [each.tpot * 1e3 for each in done]}
    return report


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    request = report["asked"]
    layout = {name: size for name, size in request["layout"].items() if name not in ("replicas",) and (size > 1 or name == "tp")}
    lines = [
        f"{request['model']}, {request['trace']}: {report['completed']:,} requests, "
        f"{' '.join(f'{n} {s}' for n, s in layout.items())} x {request['replicas']} replicas on "
        f"{request['gpus']} GPUs, {report['seconds']:,.1f} s",
        f"{'':12}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}",
    ]
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queued_ms"):
        values = report[name]
        lines.append(f"{name:12}" + "".join(f"{values[each]:12,.1f}" for each in ("mean", "p50", "p90", "p99")))
    on_host = report["prefix_hits_on_host"] / max(report["prefix_hits"], 1) * report["prefix_hit_rate"]
    host = f" ({on_host:.1%} in host memory)" if request["host_blocks"] else ""
    lines.append(
        f"{report['output_tokens_per_second']:,.0f} output tokens/s, {report['requests_per_second']:.2f} requests/s, busy "
        f"{report['busy']:.0%}, prefix cache {report['prefix_hit_rate']:.1%} of prompt tokens{host}, "
        f"{report['preemptions']} preempted"
    )
    if report["draft_tokens"]:
        lines.append(
            f"speculation: {report['accepted_tokens']:,} of {report['draft_tokens']:,} drafts accepted, "
            f"{report['accepted_tokens'] / max(report['draft_tokens'], 1):.0%}"
        )
    if request["slo_ttft_ms"] is not None or request["slo_tpot_ms"] is not None:
        lines.append(
            f"goodput {report['goodput_requests_per_second']:.2f} requests/s: {report['within_slo']:.1%} within the objective"
        )
    if "cost_per_million_output_tokens" in report:
        lines.append(f"{report['cost_per_million_output_tokens']:.3f} per million output tokens")
    if report["refused"]:
        lines.append(f"refused {report['refused']:,}: {report['errors'][0]}")
    frontend = report["frontend"]
    lines.append(
        f"HTTP path {frontend['path_ms']:.2f} ms a request, {frontend['event_us']:.0f} us a streamed token ({frontend['source']})"
    )
    lines.append(
        f"simulated {report['simulated_tokens']:,} tokens in {report['cpu_s']:.1f} s of a core: "
        f"{report['simulated_tokens_per_core_second']:,.0f} a second; label {report['label']}"
    )
    return "\n".join(lines)
