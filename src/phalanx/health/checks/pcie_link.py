# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU's PCIe link has its full width, and under load its generation."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject

BUSY = 10
"""Percent of utilization from which a link must run at its full generation: idle ones are slowed down to save power."""


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.devices.gpus:
        inspect = f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE && lspci -vv -s {gpu.pci}"
        if gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width:
            findings.append(
                warning(
                    f"GPU {gpu.index} runs on {gpu.pcie_width} of {gpu.max_pcie_width} PCIe lanes",
                    "look at slot, riser and BIOS",
                    inspect,
                    width=gpu.pcie_width,
                    most=gpu.max_pcie_width,
                )
            )
        busy = (gpu.utilization or 0) >= BUSY
        if busy and gpu.pcie_generation and gpu.max_pcie_generation and gpu.pcie_generation < gpu.max_pcie_generation:
            findings.append(
                warning(
                    f"GPU {gpu.index} runs at PCIe {gpu.pcie_generation} of {gpu.max_pcie_generation} under load",
                    "look at slot, riser and BIOS",
                    inspect,
                    generation=gpu.pcie_generation,
                    most=gpu.max_pcie_generation,
                )
            )
    return findings or [ok("PCIe links have their full width")]


CHECK = Check(
    name="pcie_link",
    what="width and generation of each PCIe link",
    why="a riser or a BIOS setting leaves 4 of 16 lanes: loads, and TP without NVLink, get several times slower",
    cure="mend slot, riser or BIOS",
    threads=("https://github.com/vllm-project/vllm/issues/732", "https://github.com/turboderp-org/exllamav2/issues/734"),
    examine=examine,
    needs=(Need.GPU,),
)
