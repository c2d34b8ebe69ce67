# SPDX-License-Identifier: Apache-2.0
"""Whether an environment variable slows or changes collectives."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, note, ok, warning
from phalanx.health.subject import Subject

SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "waits for every kernel: steps get several times slower"),
    "NCCL_P2P_DISABLE": ("1", "sends what GPUs exchange through host memory: TP gets several times slower"),
    "NCCL_SHM_DISABLE": ("1", "sends what ranks of one host exchange over the network"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks every collective on all ranks: steps get slower"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "waits for every collective on the host, and excludes CUDA graphs"),
}
LOUD = {"NCCL_DEBUG": ("INFO", "TRACE")}
PINNED = ("NCCL_ALGO", "NCCL_PROTO")


def examine(subject: Subject) -> list[Finding]:
    environment = subject.host.environment
    findings = []
    for name, (value, effect) in SLOW.items():
        if environment.get(name) == value:
            findings.append(
                warning(
                    f"{name}={value} {effect}", f"unset {name}, unless it works around a fault of this machine", f"unset {name}"
                )
            )
    several_hosts = subject.options is not None and subject.options.nnodes > 1
    if environment.get("NCCL_IB_DISABLE") == "1" and several_hosts and subject.host.rdma_devices:
        summary = f"NCCL_IB_DISABLE=1 keeps NCCL off {', '.join(subject.host.rdma_devices)}: hosts exchange data over TCP"
        findings.append(warning(summary, "unset it", "unset NCCL_IB_DISABLE"))
    for name in PINNED:
        if name in environment:
            findings.append(
                note(f"{name}={environment[name]} pins NCCL's own choice", f"unset {name} where it was set for another machine")
            )
    for name, values in LOUD.items():
        if environment.get(name) in values:
            findings.append(
                note(f"{name}={environment[name]} writes a log line for each communicator", f"unset {name} in production")
            )
    return findings or [ok("no variable slows collectives")]


CHECK = Check(
    name="variables",
    what="variables of NCCL, torch and CUDA",
    why="a stopgap of another day, such as NCCL_P2P_DISABLE=1, stays in a profile or an image and makes TP slow",
    cure="unset what is not needed",
    threads=("https://github.com/vllm-project/vllm/issues/5484", "https://github.com/NVIDIA/nccl/issues/631"),
    examine=examine,
)
