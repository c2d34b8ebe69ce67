# SPDX-License-Identifier: Apache-2.0
"""The output of a response: deltas of a chat's message become items, and the documented events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.serve.openai.responses.conversation import new_id

Event = dict[str, Any]


class ResponseWriter:
    """Turns the deltas of one answer into output items and events. response: the body of the response, which it completes."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._number = -1
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    @property
    def _item(self) -> dict[str, Any] | None:
        """The item that is being written."""
        last = self.response["output"][-1] if self.response["output"] else None
        return last if last is not None and last["status"] == "in_progress" else None

    @property
    def in_call(self) -> bool:
        """Whether the item that is being written is a call."""
        return self._item is not None and self._item["type"] == "function_call"

    def begin(self) -> Iterator[Event]:
        """The first two events."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=_snapshot(self.response))

    def push(self, choice: dict[str, Any]) -> Iterator[Event]:
        """The events of the next delta of a chat's choice."""
        delta = choice["delta"]
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            yield from self._reasoning(thought)
        logprobs = [_logprob(one) for one in (choice.get("logprobs") or {}).get("content") or ()]
        if delta.get("content"):
            yield from self._message(delta["content"], logprobs)
        elif logprobs:
            self._logprobs += logprobs
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def end(
        self,
        status: str,
        usage: dict[str, Any] | None,
        *,
        now: float,
        error: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> Iterator[Event]:
        """The last events. status: "completed", or why not: "incomplete" (cut off), "cancelled" or "failed".

        reason: that of `incomplete_details`. OpenAI has none for a call that a stop string cut off.
        """
        if not self.response["output"] and status == "completed":
            yield from self._message("", [])
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "usage": _usage(usage), "error": error}
        if status == "completed":
            self.response["completed_at"] = int(now)
        if reason is not None:
            self.response["incomplete_details"] = {"reason": reason}
        name = {"completed": "completed", "failed": "failed"}.get(status, "incomplete")
        yield self._event(f"response.{name}", response=_snapshot(self.response))

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _at(self) -> dict[str, Any]:
        item = self.response["output"][-1]
        return {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"id": new_id(kind), "type": kind, "status": "in_progress", **fields}
        self.response["output"].append(item)
        self._text, self._logprobs = [], []
        yield self._event(
            "response.output_item.added", output_index=len(self.response["output"]) - 1, item={**item, **_empty(item)}
        )

    def _message(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._open("message", role="assistant", content=[part])
            yield self._event("response.content_part.added", **self._at(), content_index=0, part={**part, "logprobs": []})
        if text:
            logprobs = [*self._logprobs, *logprobs]
            self._logprobs = []
            self._text.append(text)
            self.response["output"][-1]["content"][0]["logprobs"] += logprobs
            yield self._event("response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            yield from self._open("reasoning", summary=[], content=[part])
            yield self._event("response.content_part.added", **self._at(), content_index=0, part=dict(part))
        self._text.append(text)
        yield self._event("response.reasoning_text.delta", **self._at(), content_index=0, delta=text)

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            yield from self._open("function_call", call_id=call["id"], name=function["name"], arguments="")
        if function.get("arguments"):
            self._text.append(function["arguments"])
            yield self._event("response.function_call_arguments.delta", **self._at(), delta=function["arguments"])

    def _close(self, status: str) -> Iterator[Event]:
        """Complete the item that is being written."""
        item, text = self._item, "".join(self._text)
        if item is None:
            return
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", **self._at(), name=item["name"], arguments=text)
        else:
            part = item["content"][0]
            part["text"] = text
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
                yield self._event(
                    "response.output_text.done", **self._at(), content_index=0, text=text, logprobs=list(part["logprobs"])
                )
            else:
                yield self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text)
            yield self._event("response.content_part.done", **self._at(), content_index=0, part=dict(part))
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._at()["output_index"], item=dict(item))


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """What an item has when it begins: parts are added by events of their own."""
    return {"content": []} if "content" in item else {}


def _snapshot(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "output": list(response["output"])}


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    tops = [{**top, "bytes": top["bytes"] or []} for top in entry["top_logprobs"]]
    return {**entry, "bytes": entry["bytes"] or [], "top_logprobs": tops}


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
