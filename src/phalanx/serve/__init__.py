# SPDX-License-Identifier: Apache-2.0
"""The two front ends of the engine: offline use and the HTTP API. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.serve.llm import LLM
    from phalanx.serve.outputs import CompletionOutput, RequestOutput

__all__ = ["LLM", "RequestOutput", "CompletionOutput"]

_MODULES = {"LLM": "phalanx.serve.llm", "RequestOutput": "phalanx.serve.outputs", "CompletionOutput": "phalanx.serve.outputs"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'phalanx.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
