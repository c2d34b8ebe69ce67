# SPDX-License-Identifier: Apache-2.0
"""Tool calls: the formats in which models write them, the grammars that enforce these, and the parser for streams."""

from phalanx.serve.openai.tools.calls import CallReader
from phalanx.serve.openai.tools.formats import ToolFormat, detect

__all__ = ["CallReader", "ToolFormat", "detect"]
