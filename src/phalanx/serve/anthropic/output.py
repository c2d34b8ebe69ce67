# SPDX-License-Identifier: Apache-2.0
"""The answer of Anthropic's Messages API: deltas of a chat's message become blocks, and the documented events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.serve.openai.body import completed_object

Event = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_INVALID = "INVALID_JSON"
"""The key under which Anthropic's documentation has clients return an input that is no JSON object."""


class BlockWriter:
    """Turns the deltas of one answer into blocks and events. message: the body of the answer, which it completes."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self._open = False
        self._text: list[str] = []

    def begin(self, usage: Mapping[str, Any]) -> Iterator[Event]:
        """The first event. usage: that of the chat, so far."""
        self.message["usage"] = _usage(usage)
        yield {"type": "message_start", "message": {**self.message, "content": []}}

    def push(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        """The events of the next delta of a chat's choice."""
        delta = choice["delta"]
        if thought := delta.get("reasoning_content"):
            yield from self._block({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta("thinking_delta", "thinking", thought)
        if text := delta.get("content"):
            yield from self._block({"type": "text", "text": ""})
            yield self._delta("text_delta", "text", text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                yield from self._close()
                yield from self._block({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if function.get("arguments"):
                yield self._delta("input_json_delta", "partial_json", function["arguments"])
        if choice["finish_reason"] is not None:
            self._finish(choice["finish_reason"], choice["stop_reason"])

    def end(self, usage: Mapping[str, Any]) -> Iterator[Event]:
        """The last events. usage: that of the chat."""
        yield from self._close()
        self.message["usage"] = _usage(usage)
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    def _finish(self, reason: str, stopped_by: int | str | None) -> None:
        text = stopped_by if reason == "stop" and isinstance(stopped_by, str) else None
        self.message["stop_reason"] = "stop_sequence" if text is not None else _STOP_REASONS[reason]
        self.message["stop_sequence"] = text

    def _block(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block, unless one of this type is being written."""
        content = self.message["content"]
        if self._open and content[-1]["type"] == block["type"]:
            return
        yield from self._close()
        content.append(block)
        self._open, self._text = True, []
        yield {"type": "content_block_start", "index": len(content) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        self._text.append(text)
        index = len(self.message["content"]) - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}

    def _close(self) -> Iterator[Event]:
        """Complete the block that is being written."""
        if not self._open:
            return
        block, text, self._open = self.message["content"][-1], "".join(self._text), False
        index = len(self.message["content"]) - 1
        if block["type"] == "tool_use":
            value = completed_object(text)
            block["input"] = value if isinstance(value, dict) else {_INVALID: value}
        elif block["type"] == "text":
            block["text"] = text
        else:
            block["thinking"], block["signature"] = text, self.message["id"]
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }  # fmt: skip
