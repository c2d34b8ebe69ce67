# SPDX-License-Identifier: Apache-2.0
"""Whether NVML, and so the driver, can be reached."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, error, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    devices, host = subject.devices, subject.host
    nodes = sorted(host.path("/dev").glob("nvidia[0-9]*"))
    wanted = subject.options is not None and subject.options.device == "cuda"
    if not devices.failure:
        return ok(f"driver {devices.driver}, {devices.present} GPUs", driver=devices.driver)
    if "mismatch" in devices.failure.lower():
        return error(
            f"the driver's kernel module and its library differ in version: {devices.failure}",
            "load the module of the installed version: restart the host",
            "reboot",
        )
    if nodes:
        denied = [node for node in nodes if not _readable(node)]
        if denied:
            return error(
                f"{denied[0].name} cannot be opened by this user",
                "give the container its GPUs, or the user its group",
                "docker run --gpus all ...",
            )
        cure = "install the driver's libraries in the container: the NVIDIA container toolkit mounts them"
        return error(
            f"{len(nodes)} GPUs are on this host, and NVML cannot be reached: {devices.failure}", cure, "docker run --gpus all ..."
        )
    if wanted:
        return error(
            f"device='cuda', and this host shows no GPU: {devices.failure}",
            "start the container with its GPUs, or use device='cpu'",
            "docker run --gpus all ...",
            "phalanx serve ... --device cpu",
        )
    return ok("no GPU on this host, and none is asked for")


def _readable(node: object) -> bool:
    try:
        with open(str(node), "rb"):
            return True
    except PermissionError:
        return False
    except OSError:
        return True


CHECK = Check(
    name="driver",
    what="NVML and the driver's version",
    why="an upgrade of the driver without a restart, or a container without its libraries: no GPU is seen",
    cure="restart after an upgrade; start containers with --gpus all",
    threads=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/171", "https://github.com/vllm-project/vllm/issues/4940"),
    examine=examine,
    symptoms=(r"NVML", r"no GPU", r"No CUDA", r"nvidia-smi", r"mismatch", r"'cuda'"),
)
