# SPDX-License-Identifier: Apache-2.0
"""Whether links of NVLink are down that should be up."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok
from phalanx.health.devices import Device
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    gpus = [gpu for gpu in subject.devices.gpus if gpu.links]
    if not gpus:
        return [ok("these GPUs have no NVLink, or NVML does not say")]
    counts = {gpu.index: len(gpu.active_links) for gpu in gpus}
    best = max(counts, key=lambda index: counts[index])
    findings = [_fewer(gpu, best, counts[best]) for gpu in gpus if counts[gpu.index] < counts[best]]
    if not counts[best] and _should_be_linked(subject, gpus):
        findings.append(error("every NVLink is down", "check bridges and the fabric manager", "nvidia-smi nvlink --status"))
    off = sum(not link.active for link in gpus[0].links)
    if off and counts[best]:
        by_design = f"{counts[best]} of {counts[best] + off} NVLinks are active on every GPU, as a board with bridges has them"
        return findings or [ok(by_design, active=counts[best])]
    return findings or [ok(f"{counts[best]} NVLinks are active on every GPU", active=counts[best])]


def _fewer(gpu: Device, best: int, most: int) -> Finding:
    down = [str(link.index) for link in gpu.links if not link.active]
    named = f"link {down[0]} is down" if len(down) == 1 else f"links {', '.join(down)} are down"
    return error(
        f"GPU {gpu.index} has {len(gpu.active_links)} active NVLinks, and GPU {best} has {most}: {named}",
        "reset the GPUs; reseat them, or check the bridges, where it returns",
        "nvidia-smi nvlink --status",
        active=len(gpu.active_links),
        most=most,
    )


def _should_be_linked(subject: Subject, gpus: list[Device]) -> bool:
    """Whether NVML names a reason other than the kind of GPU for which a pair has no NVLink. A guest may show links as inactive
    that work: then the pairs say so."""
    states = [subject.devices.pair(a, b).p2p.get("nvlink") for a in gpus for b in gpus if a.index < b.index]
    return any(state not in (None, "ok", "not supported", "GPU not supported") for state in states)


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
