# SPDX-License-Identifier: Apache-2.0
"""The two formats in which models write tool calls, and the structural tags that enforce them.

`hermes` (Qwen 2, 2.5 and 3, Hermes): each call is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`; text may
precede the first.
`llama` (Llama 3.1 and later, JSON): the whole answer is `{"name": ..., "parameters": {...}}`; "; " joins several.

The format of a model is detected by its chat template: rendered with a tool, the template describes the format to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.errors import RequestError
from phalanx.serve.openai.schema.chat import Function, NamedTool, Tool
from phalanx.serve.tokenizer import Tokenizer

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_PROBE = "phalanx_probe"
_LLAMA_FORMAT = re.compile(r'\{\s*"name"\s*:[^{}]*"parameters"\s*:\s*[^{\s]')
"""`{"name": function name, "parameters": dictionary of ...}`, and not a tool's own description."""
_WHITESPACE = 2
"""Limit of white-space characters in a row in an enforced call, so that the model cannot write white space forever."""


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    begin, end: the text around the JSON of a call. arguments: the key of its arguments. between: the separator of calls.
    """

    name: Literal["hermes", "llama"]
    begin: str
    end: str
    arguments: str
    between: str

    def opening(self, function: str) -> str:
        """The text of a call up to its arguments."""
        return f'{self.begin}{{"name": "{function}", "{self.arguments}": '

    def closing(self) -> str:
        return "}" + self.end


HERMES = ToolFormat("hermes", begin="<tool_call>\n", end="\n</tool_call>", arguments="arguments", between="\n")
LLAMA = ToolFormat("llama", begin="", end="", arguments="parameters", between="; ")


def detect(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the tokenizer's chat template describes; None if it has no tools, or describes another format."""
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}}
    try:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool])
    except RequestError:
        return None
    if _PROBE not in prompt:
        return None
    if "<tool_call>" in prompt:
        return None if "<function=" in prompt else HERMES
    return LLAMA if _LLAMA_FORMAT.search(prompt) else None


def forced_call_tag(
    tool_format: ToolFormat, tools: Sequence[Tool], choice: Literal["required"] | NamedTool, *, parallel: bool
) -> str:
    """The structural tag (JSON) that allows one or more calls and nothing else."""
    forced = choice.function.name if isinstance(choice, NamedTool) else None
    tags = [_tag(tool_format, tool.function) for tool in tools if forced in (None, tool.function.name)]
    layout = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": tool_format.between,
        "at_least_one": True,
        "stop_after_first": forced is not None or not parallel,
    }
    return _structural(layout)


def strict_call_tag(tool_format: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> str:
    """The structural tag (JSON) that allows any text, but only valid calls. Without `parallel`, the first call ends the answer."""
    layout = {
        "type": "triggered_tags",
        "triggers": [tool_format.begin.strip() or '{"name":'],
        "tags": [_tag(tool_format, tool.function) for tool in tools],
        "stop_after_first": not parallel,
    }
    return _structural(layout)


def _structural(layout: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": layout})


def _tag(tool_format: ToolFormat, function: Function) -> dict[str, Any]:
    schema = function.parameters or ANY_OBJECT
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _WHITESPACE}
    return {"type": "tag", "begin": tool_format.opening(function.name), "content": content, "end": tool_format.closing()}
