# SPDX-License-Identifier: Apache-2.0
"""`RankStore`: the keys through which ranks form their groups, kept by the engine. Requests and replies travel on the ranks' own
connections to the engine, so that only ranks of this engine read or write them. `worker.engine_store` is the ranks' side.
"""

from __future__ import annotations

from collections import defaultdict

from phalanx.executor.protocol import StoreReply, StoreRequest

_WAITING = frozenset({"get", "wait"})  # operations that are answered once all of their keys are set


class RankStore:
    """The key-value store of one engine, with the semantics of torch.distributed's stores. Pure: it returns what to send."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[StoreRequest]] = defaultdict(list)  # by a key that is not set yet

    def receive(self, request: StoreRequest) -> list[tuple[int, StoreReply]]:
        """Do what a rank requests. Returns the replies that can be sent now, each with its rank: the one to this request, unless it
        waits for a key, and those to the requests that waited for the keys which this one sets. Raises ValueError for what no rank
        requests; nothing has changed then."""
        if request.operation in _WAITING:
            return self._answer(request)
        replies = [(request.rank, StoreReply(request.number, self._execute(request)))]
        for key in request.keys:
            if key in self._values:
                for waiting in self._waiting.pop(key, ()):
                    replies += self._answer(waiting)
        return replies

    def _answer(self, request: StoreRequest) -> list[tuple[int, StoreReply]]:
        """The reply to a request that waits for keys; none while one of them is missing."""
        for key in request.keys:
            if key not in self._values:
                self._waiting[key].append(request)
                return []
        values = [self._values[key] for key in request.keys] if request.operation == "get" else []
        return [(request.rank, StoreReply(request.number, values))]

    def _execute(self, request: StoreRequest) -> list[bytes]:
        match request:
            case StoreRequest(operation="set", keys=keys, values=values) if len(keys) == len(values):
                self._values |= zip(keys, values, strict=True)
                return []
            case StoreRequest(operation="append", keys=[key], values=[value]):
                self._values[key] = self._values.get(key, b"") + value
                return []
            case StoreRequest(operation="add", keys=[key], values=[amount]):
                self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
                return [self._values[key]]
            case StoreRequest(operation="compare_set", keys=[key], values=[expected, desired]):
                # A key that is not set is set where nothing was expected; else the answer is what was expected.
                current = self._values.get(key)
                if current == expected or (current is None and not expected):
                    self._values[key] = current = desired
                return [expected if current is None else current]
            case StoreRequest(operation="delete", keys=[key]):
                return [b"1" if self._values.pop(key, None) is not None else b"0"]
            case StoreRequest(operation="check", keys=keys):
                return [b"1" if all(key in self._values for key in keys) else b"0"]
            case StoreRequest(operation="count"):
                return [b"%d" % len(self._values)]
            case _:
                raise ValueError(f"{request.operation} does not take {len(request.keys)} keys and {len(request.values)} values")
