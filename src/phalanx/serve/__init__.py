# SPDX-License-Identifier: Apache-2.0
"""Who asks: offline use and the HTTP API. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.serve.llm import LLM
    from phalanx.serve.outputs import CompletionOutput, RequestOutput

__all__ = ["LLM", "RequestOutput", "CompletionOutput"]

_HOMES = {"LLM": "phalanx.serve.llm", "RequestOutput": "phalanx.serve.outputs", "CompletionOutput": "phalanx.serve.outputs"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
