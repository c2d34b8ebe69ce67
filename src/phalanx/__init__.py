# SPDX-License-Identifier: Apache-2.0
"""Phalanx serves large language models on many GPUs.

    from phalanx import LLM, SamplingParams

    llm = LLM("demo", tensor_parallel_size=2)
    print(llm.generate("What is a rank?", SamplingParams(temperature=0)).outputs[0].text)

Names are imported on first use, so that `import phalanx.planner` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.version import __version__

if TYPE_CHECKING:
    from phalanx.config import SamplingParams
    from phalanx.errors import PhalanxError
    from phalanx.serve import LLM, CompletionOutput, RequestOutput

__all__ = ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "PhalanxError", "__version__"]

_MODULES = {
    "LLM": "phalanx.serve", "RequestOutput": "phalanx.serve", "CompletionOutput": "phalanx.serve",
    "SamplingParams": "phalanx.config", "PhalanxError": "phalanx.errors",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
