# SPDX-License-Identifier: Apache-2.0
"""Memory near a GPU: the NUMA node of a PCI device, and pages of that node. Linux only: elsewhere the system places memory.

Nothing here moves a page: a policy decides where those are taken that have not been touched yet.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call by architecture; libnuma, which wraps it, is on few hosts."""
_PREFERRED = 1
_MASK_BITS = 64


def node_of(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node to which a PCI device is attached, such as "0000:1b:00.0"; None where the kernel names none."""
    try:
        node = int((devices / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, size: int, node: int) -> str:
    """Let the pages of this memory come from a node while it has free ones, and then from others. Returns why that was refused;
    empty where it was not."""
    number = _MBIND.get(platform.machine())
    if number is None or platform.system() != "Linux" or node >= _MASK_BITS - 1:
        return f"not known for node {node} of {platform.system()} on {platform.machine()}"
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-address // page) * page, (address + size) // page * page  # of whole pages
    if last <= first:
        return ""
    libc, mask, bits = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1 << node), ctypes.c_ulong(_MASK_BITS)
    if libc.syscall(number, ctypes.c_void_p(first), ctypes.c_ulong(last - first), _PREFERRED, ctypes.byref(mask), bits, 0):
        return os.strerror(ctypes.get_errno())
    return ""
