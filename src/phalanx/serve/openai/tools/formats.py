# SPDX-License-Identifier: Apache-2.0
"""How a model writes tool calls: the two formats, and the guides that hold a model to them.

`hermes` (Qwen 2, 2.5 and 3, Hermes): each call is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`; text may stand
before the first.
`llama` (Llama 3.1 and later, JSON): the whole answer is `{"name": ..., "parameters": {...}}`; several are joined by "; ".

Which one a model was taught is read off its chat template: the template is rendered with a tool, and what it then tells the model
names the format.
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
_LLAMA_SAYS = re.compile(r'\{\s*"name"\s*:[^{}]*"parameters"\s*:\s*[^{\s]')
"""`{"name": function name, "parameters": dictionary of ...}`, and not a tool's own description."""
_WHITESPACE = 2
"""White space in a row that a guided call may hold: a model that is held to a grammar must not idle in blanks."""


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    begin, end: what stands around a call's JSON. arguments: the key of its arguments. between: what separates calls.
    """

    name: Literal["hermes", "llama"]
    begin: str
    end: str
    arguments: str
    between: str

    def opening(self, function: str) -> str:
        """A call's text up to its arguments."""
        return f'{self.begin}{{"name": "{function}", "{self.arguments}": '

    def closing(self) -> str:
        return "}" + self.end


HERMES = ToolFormat("hermes", begin="<tool_call>\n", end="\n</tool_call>", arguments="arguments", between="\n")
LLAMA = ToolFormat("llama", begin="", end="", arguments="parameters", between="; ")


def detect(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the tokenizer's chat template teaches; None when it knows no tools, or teaches another format."""
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}}
    try:
        said = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[tool])
    except RequestError:
        return None
    if _PROBE not in said:
        return None
    if "<tool_call>" in said:
        return None if "<function=" in said else HERMES
    return LLAMA if _LLAMA_SAYS.search(said) else None


def forced_call_tag(how: ToolFormat, tools: Sequence[Tool], choice: Literal["required"] | NamedTool, *, parallel: bool) -> str:
    """The structural tag (JSON) under which a model writes one or more calls and nothing else."""
    named = choice.function.name if isinstance(choice, NamedTool) else None
    tags = [_tag(how, tool.function) for tool in tools if named in (None, tool.function.name)]
    layout = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": how.between,
        "at_least_one": True,
        "stop_after_first": named is not None or not parallel,
    }
    return _structural(layout)


def strict_call_tag(how: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> str:
    """The structural tag (JSON) under which a model writes what it likes, but once it begins a call, a valid one; without
    `parallel` the first call ends the answer."""
    layout = {
        "type": "triggered_tags",
        "triggers": [how.begin.strip() or '{"name":'],
        "tags": [_tag(how, tool.function) for tool in tools],
        "stop_after_first": not parallel,
    }
    return _structural(layout)


def _structural(layout: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": layout})


def _tag(how: ToolFormat, function: Function) -> dict[str, Any]:
    schema = function.parameters or ANY_OBJECT
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _WHITESPACE}
    return {"type": "tag", "begin": how.opening(function.name), "content": content, "end": how.closing()}
