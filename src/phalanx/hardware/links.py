# SPDX-License-Identifier: Apache-2.0
"""Whether GPUs are connected by NVLink, from NVML. No torch here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from phalanx.log import get_logger

logger = get_logger(__name__)


def nvlink_everywhere(uuids: Sequence[str], nvml: Any = None) -> bool:
    """Whether each pair of these GPUs is connected by NVLink; False where unknown, and the log says why. uuids: with or without
    "GPU-". nvml: the module pynvml, or one with the same functions."""
    names = [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in uuids]
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByUUID(name) for name in names]
            return all(nvml.nvmlDeviceGetP2PStatus(a, b, _NVLINK) == _OK for a, b in combinations(handles, 2))
        finally:
            nvml.nvmlShutdown()
    except Exception as error:
        logger.warning("GPUs are taken to have no NVLink: NVML does not say (%s: %s)", type(error).__name__, error)
        return False


_NVLINK, _OK = 2, 0
"""NVML_P2P_CAPS_INDEX_NVLINK and NVML_P2P_STATUS_OK."""
