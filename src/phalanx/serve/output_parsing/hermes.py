# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Hermes and Qwen 2, 2.5 and 3: each is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`.

Text may stand before the first, and between them.
"""

from __future__ import annotations

from phalanx.serve.output_parsing.events import Events, Functions, first_of, overlap
from phalanx.serve.output_parsing.json_call import CallObject, JsonCallParser
from phalanx.serve.output_parsing.markers import Markers

MARKERS = ("<tool_call>", "</tool_call>")


class HermesParser(JsonCallParser):
    """The parser of these calls. The closing tag of a call may be missing."""

    def __init__(self, functions: Functions, markers: Markers) -> None:
        super().__init__(functions)
        self._opening, self._closing = map(markers.encode, MARKERS)
        self._closes = False  # a call has begun, and its closing tag has not come yet

    def _between(self, *, final: bool) -> Events:
        tags = (self._opening, self._closing) if self._closes else (self._opening,)
        match = first_of(self._text, *tags)
        if match is None:
            ready = len(self._text) - (0 if final else overlap(self._text, *tags))
            yield from self._content(self._text[:ready])
            self._text = self._text[ready:]
            return False
        at, tag = match
        yield from self._content(self._text[:at])
        self._text = self._text[at + len(tag) :]
        if tag == self._closing:
            self._closes, self._blank = False, ""
        else:
            self._object, self._prefix = CallObject(self._functions), self._opening
            self._closes = True
        return True

    def _rejected(self) -> None:
        if self._prefix:
            self._closes = False  # the closing tag of a call that is content is content, too
