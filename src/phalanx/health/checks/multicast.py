# SPDX-License-Identifier: Apache-2.0
"""Whether NVLink multicast is offered; what is used without it."""

from __future__ import annotations

import ctypes

from phalanx.health.check import Check, Finding, Need, note, ok, skipped
from phalanx.health.subject import Subject

MULTICAST_SUPPORTED = 132
"""CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h. The attribute is read; no multicast object is created."""


def examine(_: Subject) -> Finding:
    supported = attribute()
    if supported is None:
        return skipped("the driver's library cannot be asked for it")
    if supported:
        return ok("NVLink multicast is offered; Phalanx's ONESHOT and TWOSHOT do without it")
    return note("NVLink multicast is not offered here; ONESHOT and TWOSHOT do without it, and only NCCL's NVLS is unavailable")


def attribute() -> bool | None:
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


CHECK = Check(
    name="multicast",
    what="the driver's attribute for NVLink multicast",
    why="fused all-reduces that need multicast crash or slow down where bridges or containers do not offer it",
    cure="none is needed: ONESHOT and TWOSHOT do without it",
    threads=(
        "https://github.com/vllm-project/vllm/issues/48071",
        "https://github.com/vllm-project/vllm/issues/34891",
        "https://github.com/vllm-project/vllm/issues/51986",
    ),
    examine=examine,
    needs=(Need.PAIR,),
    symptoms=(r"multicast", r"NVLS"),
)
