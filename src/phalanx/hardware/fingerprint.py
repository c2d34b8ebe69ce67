# SPDX-License-Identifier: Apache-2.0
"""The machine for which a measurement is valid: SM version, link class and world size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from phalanx.errors import OptionError

LINKS = {
    "nvlink": "every pair of GPUs reaches each other over NVLink, without multicast",
    "nvlink_multicast": "NVLink through switches that multicast",
    "pcie_p2p": "every pair of GPUs reaches each other's memory over PCIe",
    "pcie": "at least one pair of GPUs on this host cannot reach each other's memory",
    "nodes": "the ranks run on several hosts",
    "shm": "CPU ranks of one host that share memory",
}

_TEXT = re.compile(r"sm(\d+)\.([a-z0-9_]+)\.tp(\d+)")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The key of a tuning table. sm: compute capability x 10 (90 is Hopper), 0 for CPU ranks. link: one of LINKS. world: ranks."""

    sm: int
    link: str
    world: int

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise OptionError(f"link class {self.link!r} is unknown", next=f"use one of {', '.join(LINKS)}")
        if self.sm < 0 or self.world < 1:
            raise OptionError(f"sm={self.sm}, world={self.world} is not a machine", next="use sm >= 0 and world >= 1")

    def __str__(self) -> str:
        return f"sm{self.sm}.{self.link}.tp{self.world}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """The inverse of str(). Raises OptionError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise OptionError(f"{text!r} is not a fingerprint of a machine", next="write it like sm90.nvlink.tp4")
        return cls(int(match[1]), match[2], int(match[3]))

    @property
    def on_gpu(self) -> bool:
        return self.link != "shm"

    @property
    def peers_reach(self) -> bool:
        """Whether every rank can read and write every other rank's memory."""
        return self.link in ("nvlink", "nvlink_multicast", "pcie_p2p", "shm")


def link_class(*, device: str, hosts: int = 1, peer_access: bool = False, nvlink: bool = False, multicast: bool = False) -> str:
    """The link class of a group, from facts that must be equal on every rank of the group.

    device: "cuda" or "cpu". hosts: number of hosts. peer_access: every pair of GPUs can map each other's memory. nvlink: every pair
    does so over NVLink. multicast: multicast of the NVLink switches is usable.
    """
    if hosts > 1:
        return "nodes"
    if device == "cpu":
        return "shm"
    if not peer_access:
        return "pcie"
    if not nvlink:
        return "pcie_p2p"
    return "nvlink_multicast" if multicast else "nvlink"
