# SPDX-License-Identifier: Apache-2.0
"""The GPUs that CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER leave. What CUDA reads past in silence is an error here.

An entry is NVML's index (the order of `nvidia-smi` and of the PCI bus), the UUID of a GPU, or the UUID of a MIG instance. A UUID
may be cut short. Ranks are given the UUIDs, so that CUDA cannot number the GPUs otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.errors import OptionError
from phalanx.hardware.nvml import Ailment, Gpu

ENDS = ("", "-1", "NoDevFiles")
"""Entries that end the list, as CUDA and batch systems use them: GPUs that come behind, or all, are hidden on purpose."""
ORDERS = ("", "PCI_BUS_ID", "FASTEST_FIRST")
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


HARMLESS = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS", "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
)  # fmt: skip
"""Variables of CUDA whose names begin as those two, and which choose no GPU."""


def is_unknown(name: str, _: str = "") -> bool:
    """Whether a variable looks as if it chose GPUs, and CUDA does not know it: CUDA_VISIBLE_DEVICE, cuda_visible_devices."""
    return name.upper().startswith(("CUDA_VISIBLE", "CUDA_DEVICE")) and name not in (VISIBLE, ORDER, *HARMLESS)


def choose(
    gpus: Sequence[Gpu], visible: str | None, *, order: str | None = None, ailing: Mapping[int, Ailment] | None = None
) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES of this value leaves, in its order; None leaves all. In MIG mode CUDA offers the first
    instance in place of the GPU.

    order: the value of CUDA_DEVICE_ORDER. ailing: NVML's index -> why a GPU cannot be used. Raises OptionError for an entry that
    names no GPU here, several, one that ails, or one again.
    """
    if order not in (None, *ORDERS):
        raise OptionError(f"{ORDER}={order} is no order", next=f"unset it, or use one of {', '.join(ORDERS[1:])}")
    if visible is None:
        return [_offered(gpu) for gpu in gpus if gpu.instances is None or gpu.instances]
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in ENDS:
            break
        if entry.isdigit() and order == "FASTEST_FIRST" and len({gpu.name for gpu in gpus}) > 1:
            raise OptionError(
                f"{VISIBLE}={visible} is ambiguous with {ORDER}=FASTEST_FIRST", held=_listing(gpus),
                why="the GPUs differ, and that order is known to CUDA alone", next=f"name the UUIDs, or unset {ORDER}",
            )  # fmt: skip
        gpu = _named(gpus, entry, visible, ailing or {})
        if gpu in chosen:
            raise OptionError(f"{VISIBLE}={visible} names {entry} twice", next="name each GPU once")
        chosen.append(gpu)
    return chosen


def _named(gpus: Sequence[Gpu], entry: str, visible: str, ailing: Mapping[int, Ailment]) -> Gpu:
    each = [*gpus, *(instance for gpu in gpus for instance in gpu.instances or ())]
    if entry.isdigit():
        fits = [gpu for gpu in gpus if gpu.index == int(entry)]
        ill = [ailment for index, ailment in ailing.items() if index == int(entry)]
    else:
        fits = [gpu for gpu in each if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
        ill = [ailment for ailment in ailing.values() if entry.startswith("GPU-") and f"({entry}" in ailment.what]
    if ill and not fits:
        number = "GPU " if entry.isdigit() else ""
        raise OptionError(f"{VISIBLE}={visible} names {number}{entry}", held=str(ill[0]), next="name others")
    if len(fits) != 1:
        raise OptionError(
            f"{VISIBLE}={visible} names {entry!r}, which is {'more than one GPU' if fits else 'no GPU of this host'}",
            held=_listing(each), next="name indices or UUIDs of `nvidia-smi -L`, or unset the variable",
        )  # fmt: skip
    if fits[0].instances is not None and not fits[0].instances:
        raise OptionError(
            f"{VISIBLE}={visible} names GPU {fits[0].index}, which is in MIG mode and has no instance",
            next=f"create one (nvidia-smi mig -i {fits[0].index} -cgi PROFILE -C), or turn MIG off",
        )  # fmt: skip
    return _offered(fits[0])


def _offered(gpu: Gpu) -> Gpu:
    return gpu.instances[0] if gpu.instances else gpu


def _listing(gpus: Sequence[Gpu]) -> str:
    return f"this host has {', '.join(f'{gpu.index} {gpu.uuid}' for gpu in gpus) or 'none'}"
