# SPDX-License-Identifier: Apache-2.0
"""Is it well: the topology of a machine, the monitor of servers, and the doctor with its checks.

A server is reached over HTTP only, so that the doctor works when the server does not start. NVML is only read. No torch here,
except in the process that measures pairs of devices. Names are loaded when they are used: the command imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.health.check import Check, Finding, Level
    from phalanx.health.doctor import Report, examine
    from phalanx.health.subject import Subject

_MODULES = {"Check": "check", "Finding": "check", "Level": "check", "Report": "doctor", "Subject": "subject", "examine": "doctor"}

__all__ = ["Check", "Finding", "Level", "Report", "Subject", "examine"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
