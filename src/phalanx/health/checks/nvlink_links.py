# SPDX-License-Identifier: Apache-2.0
"""Whether links of NVLink are down that should be up."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    gpus = [gpu for gpu in subject.devices.gpus if gpu.links]
    if not gpus:
        return [ok("these GPUs have no NVLink, or NVML does not say")]
    counts = {gpu.index: len(gpu.active_links) for gpu in gpus}
    most = max(counts.values())
    findings = []
    for gpu in gpus:
        inactive = [link.index for link in gpu.links if not link.active]
        if counts[gpu.index] < most:
            findings.append(
                error(
                    f"GPU {gpu.index} has {counts[gpu.index]} active NVLinks, and GPU {max(counts, key=lambda i: counts[i])} has"
                    f" {most}: links {', '.join(map(str, inactive))} are down",
                    "reset the GPUs; reseat them, or check the bridges, where it returns",
                    "nvidia-smi nvlink --status",
                    active=counts[gpu.index],
                    most=most,
                )
            )
    linked_to_nobody = most == 0 and len(gpus) > 1
    if linked_to_nobody and any(
        subject.devices.pair(a, b).p2p.get("nvlink") not in (None, "not supported") for a in gpus for b in gpus if a.index < b.index
    ):
        findings.append(error("every NVLink is down", "check bridges and the fabric manager", "nvidia-smi nvlink --status"))
    if findings:
        return findings
    off = sum(not link.active for link in gpus[0].links)
    if off and most:
        return [ok(f"{most} of {most + off} NVLinks are active on every GPU, as a board with bridges has them", active=most)]
    return [ok(f"{most} NVLinks are active on every GPU", active=most)]


CHECK = Check(
    name="nvlink_links",
    what="the state of each NVLink",
    why="a link that is down on one GPU slows every collective: NVLink traffic stays below 100 GB/s",
    cure="reset or reseat the GPU",
    threads=(
        "https://github.com/Azure/azurehpc-health-checks/issues/73",
        "https://github.com/Azure/azurehpc-health-checks/issues/162",
        "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1150",
    ),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"[Nn][Vv][Ll]ink", r"peer access"),
)
