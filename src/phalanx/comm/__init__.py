# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: the `Group` protocol, its implementations, and the all-reduce strategies.

Names load on first use, since they import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.comm.group import Group, ResidualRmsNorm, Solo

__all__ = ["Group", "ResidualRmsNorm", "Solo"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'phalanx.comm' has no attribute {name!r}")
    return getattr(importlib.import_module("phalanx.comm.group"), name)
