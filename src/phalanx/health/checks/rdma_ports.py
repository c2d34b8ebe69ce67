# SPDX-License-Identifier: Apache-2.0
"""Whether the RDMA ports between hosts are up."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, note, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    devices = subject.host.rdma_devices
    if not devices:
        return [
            note(
                "this host has no RDMA device: hosts exchange data over TCP, which suits PP and not TP",
                "keep TP inside a host",
                "phalanx topo",
            )
        ]
    findings = []
    up = []
    for device in devices:
        folder = subject.host.path(f"/sys/class/infiniband/{device}/ports")
        for port in sorted(folder.iterdir()) if folder.is_dir() else []:
            state = subject.host.read(f"/sys/class/infiniband/{device}/ports/{port.name}/state") or ""
            rate = subject.host.read(f"/sys/class/infiniband/{device}/ports/{port.name}/rate") or "?"
            if "ACTIVE" in state:
                up.append(f"{device} {rate}")
            else:
                findings.append(f"port {port.name} of {device} is {state.partition(': ')[2] or state or 'unknown'}")
    if findings and not up:
        return [error(f"no RDMA port is active: {'; '.join(findings)}", "check cables, switch and subnet manager", "ibstat")]
    if findings:
        return [note(f"{len(up)} RDMA ports are active; {'; '.join(findings)}", "plug in or leave unused", "ibstat")]
    peer_memory = subject.host.path("/sys/module/nvidia_peermem").exists() or subject.host.path("/sys/module/nv_peer_mem").exists()
    if subject.devices.gpus and not peer_memory:
        return [
            note(
                f"{', '.join(up)}; without the module nvidia_peermem data goes through host memory, unless DMA-BUF is used",
                "load it",
                "modprobe nvidia-peermem",
            )
        ]
    return [ok(", ".join(up))]


CHECK = Check(
    name="rdma_ports",
    what="InfiniBand and RoCE ports, where there are several hosts",
    why="NCCL falls back to TCP, an order of magnitude slower, without a word",
    cure="bring the ports up",
    threads=("https://github.com/NVIDIA/nccl-tests/issues/206", "https://github.com/NVIDIA/nccl/issues/1191"),
    examine=examine,
    needs=(Need.HOSTS,),
    symptoms=(r"ibv_", r"IB ", r"infiniband"),
)
