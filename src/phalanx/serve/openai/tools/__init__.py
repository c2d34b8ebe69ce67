# SPDX-License-Identifier: Apache-2.0
"""Tool calls: how models write them, how they are held to it, and how they are read while they stream."""

from phalanx.serve.openai.tools.calls import CallReader
from phalanx.serve.openai.tools.formats import ToolFormat, detect

__all__ = ["CallReader", "ToolFormat", "detect"]
