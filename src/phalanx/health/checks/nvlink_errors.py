# SPDX-License-Identifier: Apache-2.0
"""Whether NVLink repeats or loses data."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject

REPLAYS = 1000
"""Replays that a link may count: each is a repeated packet, and a healthy link has some over weeks."""


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.devices.gpus:
        for link in gpu.links:
            serious = {
                name: count for name, count in link.errors.items() if name == "recovery" or (name == "replay" and count > REPLAYS)
            }
            if serious:
                named = ", ".join(f"{count} {name}" for name, count in serious.items())
                findings.append(
                    warning(
                        f"NVLink {link.index} of GPU {gpu.index} counts {named} errors",
                        "reset the GPU; replace cable, bridge or GPU where they rise again",
                        f"nvidia-smi nvlink -e -i {gpu.index}",
                        link=link.index,
                        **link.errors,
                    )
                )
    return findings or [ok("no NVLink repeats or recovers more than it may")]


CHECK = Check(
    name="nvlink_errors",
    what="error counters of NVLink",
    why="a link that recovers again and again halts all traffic for milliseconds each time, and ends in Xid 74",
    cure="reset the GPU, or replace the part",
    threads=(
        "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1355",
        "https://docs.nvidia.com/deploy/xid-errors/index.html",
    ),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"[Nn][Vv][Ll]ink", r"Xid"),
)
