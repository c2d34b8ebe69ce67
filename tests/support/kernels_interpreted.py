# SPDX-License-Identifier: Apache-2.0
"""A module of tests in Triton's interpreter, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def interpreted(module: str, *arguments: str) -> str:
    """What the module prints when it runs in the interpreter, in a process of its own: Triton decides once, when it is imported. An
    error there is an error here."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def let_loops_begin_anywhere() -> None:
    """The interpreter's scalars are arrays of one element, which numpy no longer accepts as an integer, as a loop's bounds need."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched
