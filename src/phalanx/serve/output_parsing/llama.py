# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3.1 and later as JSON: the whole answer is `{"name": ..., "parameters": {...}}`; "; " joins several.

`<|python_tag|>` may stand before them.
"""

from __future__ import annotations

from phalanx.serve.output_parsing.events import BLANK, Events, Functions
from phalanx.serve.output_parsing.json_call import CallObject, JsonCallParser
from phalanx.serve.output_parsing.markers import Markers

MARKERS = ("<|python_tag|>",)


class LlamaJsonParser(JsonCallParser):
    """The parser of these calls. After any other text, the rest is content."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(functions)
        self._tag = markers.encode(MARKERS[0])
        self._only_calls = True

    def _between(self, *, final: bool) -> Events:
        if not self._only_calls:
            yield from self._content(self._text)
            self._text = ""
            return False
        rest = self._text.lstrip(BLANK + (";" if self._calls else ""))
        if rest.startswith(self._tag):
            rest = rest[len(self._tag) :].lstrip(BLANK)
        if rest.startswith("{"):
            self._prefix, self._text = self._text[: len(self._text) - len(rest)], rest
            self._object = CallObject(self._functions)
            return True
        if rest if final else not self._tag.startswith(rest):
            self._only_calls = False
            return True
        if final and not self._calls:
            yield from self._content(self._text)
            self._text = ""
        return False

    def _rejected(self) -> None:
        self._only_calls = False
