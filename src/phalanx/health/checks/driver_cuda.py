# SPDX-License-Identifier: Apache-2.0
"""Whether the driver is new enough for the CUDA that torch was built with."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from phalanx.health.check import Check, Finding, Need, error, ok, skipped
from phalanx.health.subject import Subject

LIBRARY = re.compile(r"^cuda: Optional\[str\] = '([\d.]+)'|^cuda = '([\d.]+)'", re.MULTILINE)


def examine(subject: Subject) -> Finding:
    built = torch_cuda()
    if built is None:
        gpus = len(subject.devices.gpus)
        return error(
            f"torch is built without CUDA, and this host has {gpus} GPU{'s' * (gpus != 1)}",
            "install torch with CUDA",
            "pip install --force-reinstall torch",
        )
    if subject.devices.cuda is None:
        return skipped("NVML does not say which CUDA the driver supports")
    major, minor = divmod(subject.devices.cuda, 1000)
    supported = (major, minor // 10)
    wanted = tuple(int(part) for part in built.split(".")[:2])
    facts = {"driver": subject.devices.driver, "supports": ".".join(map(str, supported)), "torch": built}
    if wanted[0] > supported[0]:
        return error(
            f"torch is built for CUDA {built}, and driver {subject.devices.driver} supports CUDA {facts['supports']}",
            f"install a driver that supports CUDA {wanted[0]}, or torch for CUDA {supported[0]}",
            f"pip install torch --index-url .../cu{supported[0]}x",
            **facts,
        )
    return ok(f"torch is built for CUDA {built}, and the driver supports {facts['supports']}", **facts)


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    match = LIBRARY.search((Path(spec.origin).parent / "version.py").read_text())
    return None if match is None else match[1] or match[2]


CHECK = Check(
    name="driver_cuda",
    what="the driver's CUDA against torch's",
    why="a driver of an older CUDA: error 803 or 804, 'forward compatibility was attempted'",
    cure="upgrade the driver, or install torch for its CUDA",
    threads=(
        "https://github.com/gpustack/gpustack/issues/4678",
        "https://github.com/llm-d/llm-d/issues/706",
        "https://github.com/vllm-project/vllm/issues/33447",
        "https://github.com/vllm-project/vllm/issues/4940",
    ),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(
        r"forward compatibility",
        r"\b80[34]\b",
        r"driver version is insufficient",
        r"unsupported toolchain",
        r"not compiled with CUDA",
    ),
)
