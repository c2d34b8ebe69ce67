# SPDX-License-Identifier: Apache-2.0
"""A module of tests in Triton's interpreter, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys


def interpreted(module: str, *arguments: str) -> str:
    """What the module prints when it is executed there, in a process of its own: Triton asks once, as it is imported. An
    error in it is one here."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
