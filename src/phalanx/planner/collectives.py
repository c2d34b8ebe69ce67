# SPDX-License-Identifier: Apache-2.0
"""What one collective takes on a link: measured where `data/collectives.json` holds the machine, else scaled from it or from a
seed.

Units: bytes of one rank's tensor, microseconds. Each price says how it is known.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from phalanx.hardware.catalogue import GpuSpec, Network
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.exchange import CHALLENGER, ExchangeTable
from phalanx.tables.exchange import INCUMBENT as GATHER
from phalanx.tables.message import Fusion
from phalanx.tables.shipped import seed_for
from phalanx.tables.strategy import INCUMBENT

Label = Literal["measured", "table", "derived", "estimated"]
ORDER: tuple[Label, ...] = ("measured", "table", "derived", "estimated")
"""From the surest to the least sure: the worst part of a figure is the figure's label."""

ROUTED = "ROUTED"
"""The curve of an all-reduce by AUTO whose norm is kept in 16 bit beside the quantized one: in front of experts in FP8, since their
router reads it."""

_DATA = Path(__file__).parent / "data" / "collectives.json"
_SEED_BANDWIDTH = {"nodes": 25e9, "pcie": 25e9, "pcie_p2p": 25e9}
"""One-way bytes per second that the seeds of these link classes stand for (`tables.seed`)."""


def worst(*labels: Label) -> Label:
    return max(labels, key=ORDER.index)


@dataclass(frozen=True)
class Curve:
    """Microseconds of one collective by bytes: `points` (bytes, us) rising, straight in logarithms between them, in bytes
    beyond."""

    points: tuple[tuple[float, float], ...]
    label: Label
    source: str

    def us(self, nbytes: float) -> float:
        sizes = [size for size, _ in self.points]
        if nbytes <= sizes[0]:
            return self.points[0][1]
        (below, start), (above, end) = self.points[-2:]
        if nbytes >= above:
            return end + (end - start) / (above - below) * (nbytes - above)
        at = bisect_left(sizes, nbytes)
        (below, start), (above, end) = self.points[at - 1], self.points[at]
        part = math.log(nbytes / below) / math.log(above / below)
        return float(start * (end / start) ** part)

    def scaled(self, start: float, wire: float, label: Label, source: str) -> Curve:
        """Another machine's: `start` times the time of the smallest message, and `wire` times what larger ones take beyond it."""
        least = self.points[0][1]
        return Curve(tuple((size, least * start + (us - least) * wire) for size, us in self.points), label, source)


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return loaded


@cache
def all_reduce(
    gpu: GpuSpec, link: str, world: int, network: Network | None, strategy: str = "AUTO", hidden: int = 8192
) -> Curve:  # fmt: skip
    """An all-reduce with residual add, RMSNorm and FP8 quantization of `world` ranks. network: where they span nodes. hidden: size
    of a row; as many bytes of shorter rows take less time, and the curve is that of the nearest measured size.

    Measured machines answer for themselves; the same link with another world is scaled by ranks to meet and bytes on the wire, as
    `tables.seed.Seed.scaled` does; another link takes its class's seed, by the link's bandwidth.
    """
    measured = _document()["all_reduce"]
    if network is None and link.startswith("nvlink"):
        worlds = sorted(measured["worlds"][strategy], key=lambda each: abs(math.log(int(each) / world)))
        near = int(worlds[0])
        by_hidden = measured["worlds"][strategy][worlds[0]]
        nearest = min(by_hidden, key=lambda size: abs(math.log(int(size) / hidden)))
        curve = Curve(tuple(map(tuple, by_hidden[nearest])), "table", measured["source"])
        if near == world and gpu.link_bandwidth == measured["link_bandwidth"] and gpu.sm == measured["sm"]:
            return curve
        traffic = (2 * (world - 1) / world) / (2 * (near - 1) / near)
        source = f"{measured['source']}, scaled from {near} ranks at {measured['link_bandwidth'] / 1e9:.0f} GB/s"
        return curve.scaled((3 + world) / (3 + near), traffic * measured["link_bandwidth"] / gpu.link_bandwidth, "derived", source)
    kind = "nodes" if network is not None else link
    seed = seed_for(Fingerprint(gpu.sm, kind, world), Path("/nonexistent"))
    models = seed.models[Fusion.RESIDUAL_RMS_NORM]
    bandwidth = network.bandwidth if network is not None else gpu.link_bandwidth
    slower = _SEED_BANDWIDTH[kind] / bandwidth
    sizes = [1 << power for power in range(11, 31, 2)]
    chosen = [models[INCUMBENT]] if strategy == "NCCL" else list(models.values())
    points = tuple((float(size), min(m.a / 1e9 + m.b / 1e9 * size * slower for m in chosen)) for size in sizes)
    return Curve(points, "estimated", f"seed of class {kind}, at {bandwidth / 1e9:g} GB/s")


@cache
def expert_exchange(gpu: GpuSpec, link: str, world: int, network: Network | None, exchange: str, payload: str, top_k: int) -> Curve:
    """The exchange of expert parallel, once there and the sums back, over `world` dp indices, by the bytes of one index's tokens in
    16 bit. exchange: as the engine's option; payload: one of `tables.exchange.PAYLOADS`; top_k: experts of a token.

    Measured for two indices over NVLink; more are scaled by ranks to meet and by what arrives at an index: all tokens with
    ALL_GATHER, else each token that has one of its experts. Captured steps with ALL_TO_ALL run ALL_GATHER, which is its
    price. Over another link or between nodes: start-up as published for NCCL's kernels, then the wire at 85 percent.
    """
    measured = _document()["expert_exchange"]
    if network is not None or not link.startswith("nvlink"):
        start = 12.0 if network is None else 30.0
        bandwidth = 0.85 * (gpu.link_bandwidth if network is None else network.bandwidth)
        points = tuple(
            (float(size), 2 * (start + size * (world - 1) / bandwidth * 1e6)) for size in (1 << 10, 1 << 16, 1 << 22, 1 << 28)
        )
        return Curve(points, "estimated", "published kernels of other engines; not measured by this project")
    one_sided = exchange == CHALLENGER or (exchange == "AUTO" and ExchangeTable(Fingerprint(gpu.sm, link, world)).has_one_sided)
    name = f"{CHALLENGER} {payload}" if one_sided else GATHER
    curve = Curve(tuple(map(tuple, measured["points"][name])), "table", measured["source"])
    if world == measured["world"] and gpu.link_bandwidth == measured["link_bandwidth"] and gpu.sm == measured["sm"]:
        return curve
    arriving = (world - 1) * (_reach(world, top_k) if one_sided else 1.0)
    wire = arriving / (_reach(measured["world"], top_k) if one_sided else 1.0)
    source = f"{measured['source']}, scaled from {measured['world']} indices at {measured['link_bandwidth'] / 1e9:.0f} GB/s"
    bandwidths = measured["link_bandwidth"] / gpu.link_bandwidth
    return curve.scaled((3 + world) / (3 + measured["world"]), wire * bandwidths, "derived", source)


def _reach(world: int, top_k: int) -> float:
    """The chance that one of `world` indices has an expert of a token, under uniform routing to many experts."""
    return 1 - (1 - 1 / world) ** top_k
