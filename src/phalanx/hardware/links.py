# SPDX-License-Identifier: Apache-2.0
"""Whether GPUs are connected by NVLink, from NVML or, without its Python bindings, from `nvidia-smi`. No torch here."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def nvlink_everywhere(uuids: Sequence[str]) -> bool:
    """Whether each pair of these GPUs is connected by NVLink; False where unknown. uuids: with or without "GPU-"."""
    names = [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in uuids]
    try:
        return _by_nvml(names)
    except Exception:
        return _by_command(names)


def _by_nvml(names: Sequence[str]) -> bool:
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        return all(
            nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
            for a, b in combinations(handles, 2)
        )
    finally:
        nvml.nvmlShutdown()


def _by_command(names: Sequence[str]) -> bool:
    indices = {}
    for line in _lines(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]):
        index, _, uuid = line.partition(", ")
        indices[uuid.strip()] = int(index)
    if not all(name in indices for name in names):
        return False
    return linked_in(_lines(["nvidia-smi", "topo", "-p2p", "n"]), [indices[name] for name in names])


def linked_in(matrix: Sequence[str], indices: Sequence[int]) -> bool:
    """Whether the output of `nvidia-smi topo -p2p n` says OK for each pair of these GPUs."""
    rows = {}
    for line in matrix:
        cells = line.split()
        if len(cells) > 1 and cells[0].startswith("GPU") and cells[1] in ("X", "OK", "NS", "CNS", "GNS", "TNS", "DR", "U"):
            rows[int(cells[0].removeprefix("GPU"))] = cells[1:]
    return all(
        a in rows and b < len(rows[a]) and rows[a][b] == "OK" and b in rows and rows[b][a] == "OK"
        for a, b in combinations(indices, 2)
    )


def _lines(command: list[str]) -> list[str]:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ran.stdout.splitlines() if ran.returncode == 0 else []
