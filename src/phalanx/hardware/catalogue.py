# SPDX-License-Identifier: Apache-2.0
"""GPUs, nodes and networks that a plan may be made for, from `data/gpus.json`: each figure with its source and date.

A figure that no source was read for is absent, and a GPU without a figure that the planner needs cannot be planned for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError
from phalanx.hardware.nvml import Gpu

_DATA = Path(__file__).parent / "data" / "gpus.json"

DRIVER_BYTES = 645_000_000
"""What nvidia-smi reports beyond what CUDA offers, where no start of the project told: as much as on H200, the most of those that
did."""

MEANINGLESS = {"NVIDIA", "TESLA", "GEFORCE", "QUADRO", "SXM", "GENERATION", "BLACKWELL", "SERVER", "WORKSTATION", "EDITION"}
"""Words of product names that do not tell a GPU from another one of the catalogue."""

NEEDED = ("memory_bytes", "memory_bandwidth", "bf16_flops", "link_bandwidth", "link", "pcie_bandwidth")


@dataclass(frozen=True)
class GpuSpec:
    """One GPU of the catalogue. Bytes; bytes, operations per second; watts. Links in one direction.

    memory_bytes: what CUDA offers. fp8_flops: None where there is no FP8 arithmetic. link: the link class between the GPUs of a
    node, as `hardware.fingerprint.LINKS` names it. sources: field -> where it was read, and when.
    """

    name: str
    sm: int
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: str
    link_bandwidth: float
    pcie_bandwidth: float
    power: float | None
    gpus_per_node: int
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def flops(self, dtype: str) -> float:
        """Dense peak of a GEMM in "fp8", else of one in 16 bit; without FP8 arithmetic that of 16 bit for both."""
        return self.fp8_flops if dtype == "fp8" and self.fp8_flops else self.bf16_flops


@dataclass(frozen=True)
class Network:
    """Between nodes: bytes per second and GPU in one direction."""

    name: str
    bandwidth: float
    source: str


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return loaded


def names() -> list[str]:
    """Every GPU of the catalogue."""
    return list(_document()["gpus"])


def networks() -> list[str]:
    return list(_document()["networks"])


def missing(name: str) -> list[str]:
    """The figures that the planner needs and no source was read for."""
    return [figure for figure in NEEDED if figure not in _document()["gpus"][name]]


@cache
def gpu(name: str) -> GpuSpec:
    """The GPU of a name, in either case, or as NVML names it. Raises OptionError with the known names, with the figures that are
    missing, or for a GPU that Phalanx does not run on."""
    known = {each.lower(): each for each in names()}
    spelled = known.get(name.lower().replace("_", "-")) or of_name(name)
    if spelled is None and (why := _document()["unsupported"].get(name.upper())):
        raise OptionError(f"gpu {name.upper()} is not supported", why=why, next=f"known: {', '.join(names())}")
    if spelled is None:
        raise OptionError(f"gpu {name!r} is not in the catalogue", next=f"known: {', '.join(names())}")
    if lacks := missing(spelled):
        raise OptionError(
            f"gpu {spelled} cannot be planned for", why=f"no source was read for its {', '.join(lacks)}",
            next="measure such a machine with `phalanx plan calibrate`, or name another GPU",
        )  # fmt: skip
    document = _document()
    entry = document["gpus"][spelled]
    value = {figure: fact["value"] for figure, fact in entry.items() if isinstance(fact, dict)}
    sources = {figure: _source(document, fact["source"]) for figure, fact in entry.items() if isinstance(fact, dict)}
    return GpuSpec(
        spelled, entry["sm"], value["memory_bytes"] - driver_bytes(spelled), value["memory_bandwidth"], value["bf16_flops"],
        value.get("fp8_flops"), value["link"], value["link_bandwidth"], value["pcie_bandwidth"], value.get("power"),
        document["gpus_per_node"][spelled], sources,
    )  # fmt: skip


def driver_bytes(name: str) -> int:
    """What nvidia-smi reports of a GPU's memory beyond what CUDA offers."""
    entry = _document()["gpus"].get(name, {})
    offered = entry.get("cuda_memory_bytes")
    return int(entry["memory_bytes"]["value"] - offered["value"]) if offered else DRIVER_BYTES


def network(name: str) -> Network:
    """The network of a name, in either case. Raises OptionError with the known names."""
    spelled = {each.lower(): each for each in networks()}.get(name.lower().replace("_", "-"))
    if spelled is None:
        raise OptionError(f"network {name!r} is not in the catalogue", next=f"known: {', '.join(networks())}")
    entry = _document()["networks"][spelled]
    return Network(spelled, entry["bandwidth"]["value"], _source(_document(), entry["bandwidth"]["source"]))


def of_name(product: str) -> str | None:
    """The catalogue's name of a GPU that NVML names so ("NVIDIA H100 80GB HBM3"); None for one that it does not hold.

    A word that is neither the entry's nor without meaning makes it another product: a laptop's GPU, a "D", a "Max-Q", a vGPU.
    """
    words = set(product.upper().replace("-", " ").replace("SXM4", "SXM").replace("SXM5", "SXM").split())
    matches = {name: {word.upper() for word in entry["match"]} for name, entry in _document()["gpus"].items()}
    fits = {name: match for name, match in matches.items() if match <= words and words - match <= MEANINGLESS}
    return max(fits, key=lambda name: len(fits[name]), default=None)


def at_hand(gpus: Sequence[Gpu]) -> str | None:
    """The catalogue's name of the GPUs of this host; None where there are none, several kinds, or an unknown one."""
    kinds = {of_name(gpu.name) for gpu in gpus}
    return kinds.pop() if len(kinds) == 1 else None


def _source(document: dict[str, Any], name: str) -> str:
    source = document["sources"][name]
    return f"{source['where']} ({source['date']}; read {source['read']})"
