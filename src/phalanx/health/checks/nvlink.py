# SPDX-License-Identifier: Apache-2.0
"""What joins GPUs: NVLink, the fabric, peer access and multicast."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from phalanx.health import pairs
from phalanx.health.check import Finding, Need, check, error, note, ok, skipped, warning
from phalanx.health.devices import Device
from phalanx.health.subject import Subject


@check(
    why="a link that is down on one GPU slows every collective: NVLink traffic stays below 100 GB/s",
    cure="reset or reseat the GPU",
    threads=(
        "Azure/azurehpc-health-checks/issues/73",
        "Azure/azurehpc-health-checks/issues/162",
        "NVIDIA/open-gpu-kernel-modules/issues/1150",
    ),
    needs=(Need.GPU,),
    symptoms=(r"[Nn][Vv][Ll]ink", r"peer access"),
)
def nvlink_links(subject: Subject) -> list[Finding]:
    """the state of each NVLink"""
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


REPLAYS = 1000
"""Replays that a link may count: each is a repeated packet, and a healthy link has some over weeks."""


@check(
    why="a link that recovers again and again halts all traffic for milliseconds each time, and ends in Xid 74",
    cure="reset the GPU, or replace the part",
    threads=("NVIDIA/open-gpu-kernel-modules/issues/1355", "https://docs.nvidia.com/deploy/xid-errors/index.html"),
    needs=(Need.GPU,),
    symptoms=(r"[Nn][Vv][Ll]ink", r"Xid"),
    fine="no NVLink repeats or recovers more than it may",
)
def nvlink_errors(subject: Subject) -> Iterator[Finding]:
    """error counters of NVLink"""
    for gpu in subject.devices.gpus:
        for link in gpu.links:
            serious = {
                name: count for name, count in link.errors.items() if name == "recovery" or (name == "replay" and count > REPLAYS)
            }
            if serious:
                named = ", ".join(f"{count} {name}" for name, count in serious.items())
                yield warning(
                    f"NVLink {link.index} of GPU {gpu.index} counts {named} errors",
                    "reset the GPU; replace cable, bridge or GPU where they rise again",
                    f"nvidia-smi nvlink -e -i {gpu.index}",
                    link=link.index,
                    **link.errors,
                )


SYSTEM_NOT_READY = 802


@check(
    why="without its manager, or with one of another version, CUDA answers 'system not yet initialized' (802)",
    cure="start the fabric manager of the driver's version",
    threads=(
        "huggingface/huggingface_hub/issues/4128",
        "pytorch/pytorch/issues/35710",
        "gpustack/gpustack/issues/4154",
        "ollama/ollama/issues/12136",
    ),
    needs=(Need.GPU,),
    symptoms=(r"\b802\b", r"system not yet initialized", r"SystemNotReady"),
)
def fabric(subject: Subject) -> Finding:
    """the state of the NVSwitch fabric"""
    # By NVML's state, and by what CUDA itself answers: a guest may show a state that its host manages, and work.
    states = {gpu.index: gpu.fabric for gpu in subject.devices.gpus if gpu.fabric not in (None, "not supported")}
    failed = [gpu for gpu in subject.devices.gpus if gpu.fabric == "completed" and gpu.fabric_status]
    status = cuda_status()
    waiting = {index: state for index, state in states.items() if state != "completed"}
    if status == SYSTEM_NOT_READY or (waiting and status is None):
        named = ", ".join(f"GPU {index} {state}" for index, state in (waiting or states).items()) or "NVML does not say its state"
        return error(
            f"the fabric is not up ({named}), and CUDA fails with error 802 until it is",
            "start the fabric manager of the driver's version, and wait until it is done",
            "systemctl start nvidia-fabricmanager",
            "nvidia-smi -q | grep -A3 Fabric",
        )
    if failed:
        named = ", ".join(f"GPU {gpu.index} status {gpu.fabric_status}" for gpu in failed)
        cure = "install the fabric manager of the driver's version, and restart it"
        return error(f"registration in the fabric failed: {named}", cure, "systemctl restart nvidia-fabricmanager")
    if waiting:
        return note(f"NVML shows the fabric as {next(iter(waiting.values()))}, and CUDA works: the host manages it")
    return ok(
        f"{len(states)} GPUs are registered in the fabric" if states else "these GPUs need no fabric manager, or NVML does not say"
    )


def cuda_status() -> int | None:
    """What cuInit answers (0: success), which makes no context; None without the driver's library."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return None


@check(
    why="tensor parallelism over PCIe is slower than one GPU, and without peer access slower still",
    cure="use PP over PCIe, TP over NVLink",
    threads=(
        "vllm-project/vllm/issues/5484",
        "vllm-project/vllm/issues/732",
        "vllm-project/vllm/issues/4238",
        "turboderp-org/exllamav2/issues/734",
    ),
    needs=(Need.PAIR,),
    symptoms=(r"peer access", r"[Pp]2[Pp]", r"NCCL", r"did not come up"),
)
def peer_class(subject: Subject) -> Finding:
    """how the GPUs of a layout are joined"""
    gpus = subject.gpus_in_use
    pairs = [(a, b, subject.devices.pair(a, b)) for a in gpus for b in gpus if a.index < b.index]
    if not pairs:
        return ok("one GPU is used")
    tp = subject.options.tensor_parallel_size if subject.options is not None else 1
    slow = [(a, b, pair) for a, b, pair in pairs if not pair.nvlink]
    if not slow:
        return ok(f"all {len(pairs)} pairs have NVLink")
    a, b, pair = slow[0]
    more = f", and {len(slow) - 1} other pairs" if len(slow) > 1 else ""
    named = f"GPU {a.index} and GPU {b.index} are joined over PCIe ({pair.kind}){more}"
    if not pair.peer_access:
        named = f"GPU {a.index} and GPU {b.index} have no peer access ({pair.p2p.get('read', 'unknown')}){more}"
    if tp > 1:
        options = subject.options
        assert options is not None
        cure = "use PP instead of TP over these, or GPUs that have NVLink; `phalanx topo MODEL` shows the price"
        return warning(
            f"{named}, and TP {tp} sums tensors over them twice a layer",
            cure,
            f"phalanx serve {options.model} --tp_size 1 --pp_size {tp}",
        )
    return note(f"{named}: prefer PP to TP over them", "`phalanx topo MODEL` shows the price of TP", "phalanx topo")


@check(
    why="drivers and bridges that claim peer access and lose data: wrong output, or a hang in the first collective",
    cure="turn off ACS and the IOMMU; NCCL_P2P_DISABLE=1 as a stopgap",
    threads=(
        "NVIDIA/nccl/issues/2079",
        "NVIDIA/nccl/issues/631",
        "NVIDIA/nccl/issues/257",
        "vllm-project/vllm/issues/33041",
        "vllm-project/vllm/issues/5458",
    ),
    needs=(Need.PAIR,),
    symptoms=(r"NCCL", r"stands still", r"did not come up", r"illegal memory", r"peer"),
    slow=True,
)
def peer_write(subject: Subject) -> list[Finding]:
    """write and verify between each pair of GPUs"""
    if subject.servers:
        return [skipped("a running server has the GPUs: copies would disturb it")]
    results = (
        subject.measured
        if subject.measured is not None
        else pairs.measure(len(subject.devices.gpus), quick=True, visible=subject.devices.uuids)
    )
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


MULTICAST_SUPPORTED = 132
"""CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h. The attribute is read; no multicast object is created."""


@check(
    why="fused all-reduces that need multicast crash or slow down where bridges or containers do not offer it",
    cure="none is needed: ONESHOT and TWOSHOT do without it",
    threads=("vllm-project/vllm/issues/48071", "vllm-project/vllm/issues/34891", "vllm-project/vllm/issues/51986"),
    needs=(Need.PAIR,),
    symptoms=(r"multicast", r"NVLS"),
)
def multicast(_: Subject) -> Finding:
    """the driver's attribute for NVLink multicast"""
    supported = multicast_offered()
    if supported is None:
        return skipped("the driver's library cannot be asked for it")
    if supported:
        return ok("NVLink multicast is offered; Phalanx's ONESHOT and TWOSHOT do without it")
    return note("NVLink multicast is not offered here; ONESHOT and TWOSHOT do without it, and only NCCL's NVLS is unavailable")


def multicast_offered() -> bool | None:
    """Whether every device offers multicast; None where the driver cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    answers = []
    for device in range(count.value):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), MULTICAST_SUPPORTED, device):
            return None
        answers.append(bool(value.value))
    return all(answers)
