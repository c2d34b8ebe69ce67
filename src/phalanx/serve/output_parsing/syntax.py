# SPDX-License-Identifier: Apache-2.0
"""`CallSyntax`: how a model writes tool calls, as an example of the text. Grammars are made of it, and the parsers of tags."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from phalanx.serve.structured_output.parameters import ParameterParts

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_PLACEHOLDERS = re.compile("NAME|KEY|VALUE")


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written: `before` all, then each call as `begin`, its arguments and `end`, with `between` two of them, then
    `after`.

    - begin: "NAME" stands for the function, "INDEX" for the number of the call.
    - trigger: the text that begins a call in free text; the beginning of `before + begin`.
    - between: None if there can be only one call.
    - parameter: how one argument is written, with "KEY" and "VALUE"; white space around VALUE belongs to the format, and strings
      have no quotes. "": the arguments are one object.
    - quote: what stands around the strings of that object, whose keys are bare (`structured_output.bare_objects`). "": it is JSON.
    """

    begin: str
    end: str
    trigger: str
    between: str | None
    before: str = ""
    after: str = ""
    parameter: str = ""
    quote: str = ""

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The tags without placeholders: those that may be special tokens of a vocabulary."""
        tags = _TAG.findall(f"{self.before} {self.begin} {self.parameter} {self.end} {self.after}")
        return tuple(dict.fromkeys(tag for tag in tags if _PLACEHOLDERS.search(tag) is None))

    @cached_property
    def parts(self) -> ParameterParts:
        """The parts of `parameter`, which is not ""."""
        return ParameterParts.of(self.parameter)
