# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel's log has errors of the GPUs."""

from __future__ import annotations

import re

from phalanx.health.check import Check, Finding, Need, error, note, ok, skipped
from phalanx.health.subject import Subject

XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
MEANINGS = {
    13: "a kernel read or wrote a wrong address (the program's fault)",
    31: "a page fault of a kernel (the program's fault)",
    43: "the program ended with an error",
    45: "the program was ended",
    48: "an uncorrected memory error",
    63: "a row is to be remapped",
    64: "remapping a row failed",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    145: "an NVLink error",
    149: "an NVLink error",
}
OF_PROGRAMS = {13, 31, 43, 45}
"""A program's own faults: a healthy machine may have them."""


def examine(subject: Subject) -> list[Finding]:
    text = subject.host.run(["dmesg"])
    if text is None:
        return [skipped("the kernel's log cannot be read by this user")]
    entries: dict[tuple[str, int], list[str]] = {}
    for bus, number, detail in XID.findall(text):
        entries.setdefault((bus, int(number)), []).append(detail)
    findings = []
    for (bus, number), details in entries.items():
        meaning = MEANINGS.get(number, "see NVIDIA's list")
        summary = f"Xid {number} of {bus}, {len(details)} times: {meaning}"
        if number in OF_PROGRAMS:
            findings.append(note(summary, xid=number))
        else:
            cure = (
                "take the GPU out of service, and reset or replace it"
                if number in (48, 63, 64, 79, 95)
                else "look it up, and reset the GPU where it returns"
            )
            findings.append(error(summary, cure, "dmesg | grep -i xid", f"nvidia-smi -q -i {bus}", xid=number, count=len(details)))
    return findings or [ok("the kernel's log has no Xid")]


CHECK = Check(
    name="xid",
    what="errors of the GPUs in the kernel's log",
    why="a GPU that has fallen off the bus, or whose NVLink fails, hangs every rank",
    cure="reset or replace the GPU",
    threads=(
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
        "https://github.com/vllm-project/vllm/issues/30112",
        "https://github.com/marin-community/marin/issues/8934",
    ),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"\bXid\b", r"unspecified launch failure", r"illegal memory", r"CUDA error", r"hardware", r"fallen off"),
)
