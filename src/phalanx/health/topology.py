# SPDX-License-Identifier: Apache-2.0
"""`phalanx topo`: how the GPUs of this host are joined, what that costs the model that is named, and the advice that follows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.config.model import ModelShape
from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.probe import cores
from phalanx.health.check import size
from phalanx.health.devices import Device, Devices
from phalanx.health.pairs import Measurements
from phalanx.health.subject import Subject
from phalanx.layout import Layout
from phalanx.layout.weights import weight_bytes
from phalanx.tables.message import Fusion
from phalanx.tables.shipped import find, table_for

ALLREDUCES_PER_LAYER = 2
"""Behind the attention's output projection, and behind the MLP's down projection."""
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane in one direction, by generation, after line coding."""


@dataclass(frozen=True)
class Price:
    """What the all-reduces of one decoded token cost at a TP size. source: a measured table, or an estimate of the link's class."""

    tp: int
    link: str
    per_token_s: float
    per_call_s: float
    calls: int
    source: str


@dataclass(frozen=True)
class Topology:
    """Everything that the page shows."""

    devices: Devices
    measurements: Measurements | None
    network: list[dict[str, str]]
    host: dict[str, Any]
    model: str = ""
    prices: tuple[Price, ...] = ()
    advice: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For scripts."""
        gpus = [
            {**asdict(gpu), "holders": len(gpu.holders or ()), "reasons": sorted(gpu.reasons or ()), "cpus": sorted(gpu.cpus or ())}
            for gpu in self.devices.gpus
        ]
        links = [{"a": a, "b": b, "kind": pair.kind, **asdict(pair)} for (a, b), pair in self.devices.pairs.items()]
        measured = None if self.measurements is None else asdict(self.measurements)
        return {
            "gpus": gpus,
            "pairs": links,
            "measured": measured,
            "network": self.network,
            "host": self.host,
            "model": self.model,
            "prices": [asdict(price) for price in self.prices],
            "advice": list(self.advice),
            "failures": self.failures,
        }


def survey(subject: Subject, measurements: Measurements | None) -> Topology:
    """Gather the facts. measurements None: pairs were not measured."""
    devices, host = subject.devices, subject.host
    shape = subject.model_shape
    prices = (
        tuple(prices_of(shape, devices, subject.options.nnodes if subject.options is not None else 1)) if shape is not None else ()
    )
    failures = {"GPUs": devices.unusable} if devices.unusable and (devices.present or devices.failure) else {}
    if measurements is not None and measurements.failure:
        failures["pairs"] = measurements.failure
    limit = host.limits().memory
    facts = {
        "name": host.name,
        "cores": cores(host.root),
        "memory": psutil.virtual_memory().total if limit is None else min(psutil.virtual_memory().total, int(limit.amount)),
        "numa": numa_nodes(subject),
        "shm": _shm(subject),
    }
    name = subject.options.model if subject.options is not None else ""
    return Topology(
        devices,
        measurements,
        network_of(subject),
        facts,
        name,
        prices,
        tuple(advice(devices, measurements, shape, name, prices, subject)),
        failures,
    )


def numa_nodes(subject: Subject) -> dict[str, str]:
    """NUMA node -> its cores, as the kernel lists them."""
    folder = subject.host.path("/sys/devices/system/node")
    names = sorted(entry.name for entry in folder.glob("node[0-9]*")) if folder.is_dir() else []
    return {name.removeprefix("node"): subject.host.read(f"/sys/devices/system/node/{name}/cpulist") or "" for name in names}


def network_of(subject: Subject) -> list[dict[str, str]]:
    """Network cards: name, kind, rate, state, addresses."""
    entries = []
    for name, addresses in subject.host.interfaces().items():
        stats = psutil.net_if_stats().get(name)
        rate = f"{stats.speed} Mbit/s" if stats is not None and 0 < stats.speed < 65535 else "?"
        state = "up" if stats is not None and stats.isup else "down"
        entries.append(
            {
                "name": name,
                "kind": "ethernet" if name != "lo" else "loopback",
                "rate": rate,
                "state": state,
                "addresses": ", ".join(addresses),
            }
        )
    for device in subject.host.rdma_devices:
        rate = subject.host.read(f"/sys/class/infiniband/{device}/ports/1/rate") or "?"
        state = (subject.host.read(f"/sys/class/infiniband/{device}/ports/1/state") or "?").rpartition(": ")[2].lower()
        entries.append({"name": device, "kind": "RDMA", "rate": rate, "state": state, "addresses": ""})
    return entries


def _shm(subject: Subject) -> int | None:
    try:
        return subject.host.space("/dev/shm").total
    except OSError:
        return None


def link_of(devices: Devices, gpus: tuple[Device, ...]) -> str:
    """The link class of these GPUs, as the all-reduce tables name it. Multicast is not used by any of our strategies."""
    pairs = [devices.pair(a, b) for a in gpus for b in gpus if a.index < b.index]
    return link_class(device="cuda", peer_access=all(pair.peer_access for pair in pairs), nvlink=all(pair.nvlink for pair in pairs))


def prices_of(shape: ModelShape, devices: Devices, nodes: int = 1) -> list[Price]:
    """The all-reduces of one decoded token at each TP size that GPUs and model allow; without GPUs over Hopper's usual links."""
    if devices.gpus:
        largest = len(devices.gpus)
        cases = [(tp, link_of(devices, devices.gpus[:tp]), devices.gpus[0].sm) for tp in (2, 4, 8) if tp <= largest]
    else:
        cases = [(tp, link, 90) for link in ("nvlink", "pcie_p2p") for tp in (2, 4)]
    if nodes > 1 and devices.gpus:
        cases.append((len(devices.gpus) * nodes, "nodes", devices.gpus[0].sm))
    return [price_of(shape, tp, link, sm) for tp, link, sm in cases if shape.num_heads % tp == 0]


def price_of(shape: ModelShape, tp: int, link: str, sm: int) -> Price:
    """By the shipped table of the machine's class where there is one, else by its class alone."""
    fingerprint = Fingerprint(sm, link, tp)
    dtype = "bf16" if shape.dtype == "fp32" else shape.dtype
    table = table_for(fingerprint)
    seed = table.seed
    _, us = seed.choose(dtype, Fusion.RESIDUAL_RMS_NORM, 1, shape.hidden_size)
    calls = ALLREDUCES_PER_LAYER * shape.num_layers
    source = f"measured: table of {fingerprint}" if find(fingerprint) is not None else f"estimate: {seed.origin}"
    return Price(tp, link, calls * us * 1e-6, us * 1e-6, calls, source)


def advice(
    devices: Devices,
    measurements: Measurements | None,
    shape: ModelShape | None,
    model: str,
    prices: tuple[Price, ...],
    subject: Subject,
) -> list[str]:
    """Sentences, each with the figure behind it."""
    lines = []
    gpus = devices.gpus
    if not gpus:
        lines.append("No GPU: CPU ranks share memory, and `phalanx serve MODEL` runs on the cores of this host.")
    elif len(gpus) == 1:
        lines.append("One GPU: a model that fits needs no link; FP8 halves its weights.")
    else:
        lines += _advice_on_links(devices, measurements)
    for price in prices:
        named = model or "the model"
        lines.append(
            f"TP {price.tp} over {price.link} costs {price.per_token_s * 1e3:.2f} ms a token for {named}: {price.calls} all-reduces"
            f" of {price.per_call_s * 1e6:.1f} us ({price.source})."
        )
    if shape is not None:
        lines.append(_advice_on_size(shape, model, gpus))
    rdma = subject.host.rdma_devices
    lines.append(
        f"Between hosts: {', '.join(rdma)} (RDMA); TP stays inside a host, PP goes between them."
        if rdma
        else "Between hosts: no InfiniBand or RoCE here, so only PP, whose messages are small, goes over the network."
    )
    return lines


def _advice_on_links(devices: Devices, measurements: Measurements | None) -> list[str]:
    gpus = devices.gpus
    pairs = {(a.index, b.index): devices.pair(a, b) for a in gpus for b in gpus if a.index < b.index}
    rates = [pair.bytes_per_s for pair in measurements.pairs] if measurements is not None else []
    figure = (
        f"{min(rates) / 1e9:.0f} GB/s measured in the slowest direction"
        if rates
        else f"{rate_of(gpus[0]) / 1e9:.0f} GB/s signalled"
        if rate_of(gpus[0])
        else "NVML does not say its rate"
    )
    linked = [pair for pair in pairs.values() if pair.nvlink]
    if len(linked) == len(pairs):
        return [f"Use TP over NVLink: every pair has it ({figure})."]
    if linked:
        groups = ", ".join(f"{a}-{b}" for (a, b), pair in pairs.items() if pair.nvlink)
        return [f"Use TP inside NVLink pairs ({groups}), and PP between them: the other pairs go over PCIe ({figure})."]
    if all(pair.peer_access for pair in pairs.values()):
        return [f"Avoid TP, use PP: the GPUs are joined over PCIe ({figure})."]
    return [f"Avoid TP, use PP: some pairs have no peer access, and go through host memory ({figure})."]


def _advice_on_size(shape: ModelShape, model: str, gpus: tuple[Device, ...]) -> str:
    (total,) = weight_bytes(shape, "bf16", Layout())
    if not gpus:
        return (
            f"{model}: {total / 1e9:.1f} GB of weights; `phalanx doctor {model} --tp_size N` says whether they fit on the machine"
            " where it runs."
        )
    smallest = min(gpu.total for gpu in gpus)
    least = next((f"at least {count}" for count in (1, 2, 4, 8, 16, 32) if total / count < 0.8 * smallest), "more than 32")
    return (
        f"{model}: {total / 1e9:.1f} GB of weights need {least} GPUs of {size(smallest)}; the smallest TP that fits costs"
        " the least."
    )


def rate_of(gpu: Device) -> float:
    """Bytes per second that a GPU's links signal in one direction: NVLink where there is any, else PCIe; 0 where unknown."""
    if gpu.active_links:
        return gpu.nvlink_bytes_per_s
    return (gpu.max_pcie_width or 0) * PCIE_LANE.get(gpu.max_pcie_generation or 0, 0.0)


def show(topology: Topology) -> RenderableType:
    """The page."""
    parts: list[RenderableType] = [_host_line(topology)]
    if topology.devices.gpus:
        parts += [_gpu_table(topology.devices), _matrix(topology)]
    for what, failure in topology.failures.items():
        parts.append(Text(f"{what}: {failure}", "dim"))
    parts.append(_network_table(topology))
    parts += [Text(f"- {line}") for line in topology.advice]
    return Group(*parts)


def _host_line(topology: Topology) -> Text:
    host = topology.host
    numa = "; ".join(f"NUMA {node}: cores {cpus}" for node, cpus in host["numa"].items())
    shm = f", /dev/shm {size(host['shm'])}" if host["shm"] is not None else ""
    return Text(f"{host['name']}: {host['cores']} cores, {size(host['memory'])} of memory{shm}{'; ' + numa if numa else ''}")


def _gpu_table(devices: Devices) -> Table:
    table = Table("GPU", "name", "memory", "NVLink", "signalled", "PCIe", "NUMA", "fabric", box=None)
    for gpu in devices.gpus:
        active = gpu.active_links
        nvlink = (
            f"{len(active)} of {len(gpu.links)} up" + (f", generation {active[0].version}" if active and active[0].version else "")
            if gpu.links
            else "?"
            if any(devices.pair(gpu, other).nvlink for other in devices.gpus)
            else "none"
        )
        pcie = f"{gpu.pcie_generation or '?'}/{gpu.max_pcie_generation or '?'} x{gpu.pcie_width or '?'}/{gpu.max_pcie_width or '?'}"
        rate = f"{rate_of(gpu) / 1e9:.0f} GB/s" if rate_of(gpu) else "?"
        table.add_row(
            str(gpu.index),
            gpu.name,
            size(gpu.total),
            nvlink,
            rate,
            pcie,
            "?" if gpu.numa_node is None else str(gpu.numa_node),
            gpu.fabric or "?",
        )
    return table


def _matrix(topology: Topology) -> Table:
    """From each GPU (row) to each (column): the kind of link, and where it was measured GB/s and us."""
    gpus = topology.devices.gpus
    table = Table("from \\ to", *(f"GPU{gpu.index}" for gpu in gpus), box=None)
    results = {} if topology.measurements is None else {(pair.source, pair.target): pair for pair in topology.measurements.pairs}
    for row, a in enumerate(gpus):
        cells = []
        for column, b in enumerate(gpus):
            if a is b:
                cells.append("X")
                continue
            pair = topology.devices.pair(a, b)
            kind = f"NV{len(a.active_links) or ''}" if pair.nvlink else pair.kind
            result = results.get((row, column))
            if result is not None:
                state = "" if result.verified else " DAMAGED"
                kind += f" {result.bytes_per_s / 1e9:.0f} GB/s {result.latency_s * 1e6:.1f} us{state}"
            elif not pair.peer_access:
                kind += " no peer access"
            cells.append(kind)
        table.add_row(f"GPU{a.index}", *cells)
    return table


def _network_table(topology: Topology) -> Table:
    table = Table("network", "kind", "rate", "state", "addresses", box=None)
    for entry in topology.network:
        table.add_row(*entry.values())
    return table


def dumps(topology: Topology) -> str:
    return json.dumps(topology.document(), indent=2, default=str)
