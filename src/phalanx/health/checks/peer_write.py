# SPDX-License-Identifier: Apache-2.0
"""Whether what one GPU writes into another's memory arrives there."""

from __future__ import annotations

from phalanx.health import pairs
from phalanx.health.check import Check, Finding, Need, error, ok, skipped, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    if subject.servers:
        return [skipped("a running server has the GPUs: copies would disturb it")]
    results = subject.measured if subject.measured is not None else pairs.measure(len(subject.devices.gpus), quick=True)
    if results.hung is not None:
        a, b = results.hung
        return [
            error(
                f"copying from GPU {a} to GPU {b} hangs: {results.failure}",
                "look for Xid errors, turn off ACS and the IOMMU; until then keep NCCL off peer access",
                "export NCCL_P2P_DISABLE=1",
                "dmesg | grep -i -e xid -e iommu",
            )
        ]
    if results.failure:
        return [skipped(f"pairs cannot be measured: {results.failure}")]
    findings = []
    for pair in results.pairs:
        names = f"from GPU {pair.source} to GPU {pair.target}"
        if not pair.verified:
            findings.append(
                error(
                    f"data copied {names} arrives damaged: {pair.failure}",
                    "turn off ACS and the IOMMU for the GPUs' bridges; until then keep NCCL off peer access",
                    "export NCCL_P2P_DISABLE=1",
                    "nvidia-smi topo -p2p rw",
                )
            )
    best = max((pair.bytes_per_s for pair in results.pairs), default=0.0)
    for pair in results.pairs:
        nvlink = _nvlink_rate(subject, pair.source, pair.target)
        if pair.verified and nvlink and pair.bytes_per_s < nvlink / 2:
            findings.append(
                warning(
                    f"{pair.bytes_per_s / 1e9:.0f} GB/s are reached from GPU {pair.source} to GPU {pair.target}, and their NVLinks"
                    f" signal {nvlink / 1e9:.0f} GB/s",
                    "look at the links and the fabric",
                    "nvidia-smi nvlink --status",
                    "phalanx topo",
                )
            )
    return findings or [ok(f"{len(results.pairs)} directions verified, up to {best / 1e9:.0f} GB/s")]


def _nvlink_rate(subject: Subject, a: int, b: int) -> float:
    gpus = subject.devices.gpus
    if max(a, b) >= len(gpus) or not subject.devices.pair(gpus[a], gpus[b]).nvlink:
        return 0.0
    rates = [gpus[place].nvlink_bytes_per_s for place in (a, b)]
    switched = all(link.remote_is_switch for link in gpus[a].active_links)
    return min(rates) if switched or len(gpus) == 2 else 0.0


CHECK = Check(
    name="peer_write",
    what="write and verify between each pair of GPUs",
    why="drivers and bridges that claim peer access and lose data: wrong output, or a hang in the first collective",
    cure="turn off ACS and the IOMMU; NCCL_P2P_DISABLE=1 as a stopgap",
    threads=(
        "https://github.com/NVIDIA/nccl/issues/2079",
        "https://github.com/NVIDIA/nccl/issues/631",
        "https://github.com/NVIDIA/nccl/issues/257",
        "https://github.com/vllm-project/vllm/issues/33041",
        "https://github.com/vllm-project/vllm/issues/5458",
    ),
    examine=examine,
    needs=(Need.PAIR,),
    symptoms=(r"NCCL", r"stands still", r"did not come up", r"illegal memory", r"peer"),
    slow=True,
)
