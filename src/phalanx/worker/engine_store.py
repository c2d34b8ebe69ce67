# SPDX-License-Identifier: Apache-2.0
"""`EngineStore`: the store of torch.distributed through which ranks form their groups, kept by the engine (`executor.rank_store`).

torch's own TCPStore listens at a port and takes requests from whoever connects. This one has no port: requests travel on an
authenticated connection of the rank to the engine.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import zmq
from torch._C._distributed_c10d import Store  # torch.distributed has the same name, untyped
from torch.distributed import DistStoreError

from phalanx.executor.protocol import (
    MAX_STORE_REPLY,
    StoreOperation,
    StoreReply,
    StoreRequest,
    dealer,
    decode_to_rank,
    encode,
    store_identity,
)

_TURN_SECONDS = 0.02
"""How long a thread that waits for its reply lets others go unread: threads share the socket, and read each other's replies."""


class EngineStore(Store):
    """One per rank process; any thread may use it. `address`, `cluster_token`: as of `EngineChannel`. `timeout`: the limit of one
    request in seconds. Methods have the semantics of torch.distributed.Store, and raise DistStoreError when the time is up.

    torch's threads call the methods from C++: keep the object for as long as there are groups.
    """

    def __init__(self, rank: int, address: str, cluster_token: str | None = None, *, timeout: float = 300) -> None:
        super().__init__()
        self._seconds = timeout
        self._rank = rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, address, store_identity(rank), cluster_token, max_frame=MAX_STORE_REPLY)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._lock = threading.Lock()  # around the socket and what follows
        self._number = 0
        self._replies: dict[int, list[bytes]] = {}
        self._expected: set[int] = set()

    def _request(
        self, operation: StoreOperation, keys: Sequence[str], values: Sequence[bytes] = (), timeout: timedelta | None = None
    ) -> list[bytes]:  # fmt: skip
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        with self._lock:
            self._number += 1
            number = self._number
            self._expected.add(number)
        frame, sent = encode(StoreRequest(self._rank, number, operation, list(keys), list(values))), False
        try:
            while True:
                with self._lock:
                    sent = sent or self._sends(frame)
                    self._read()
                    if number in self._replies:
                        return self._replies.pop(number)
                if time.monotonic() >= deadline:
                    raise DistStoreError(f"the store did not answer {operation} of {', '.join(keys)} within {seconds:g} s")
                select.select([self._descriptor], [], [], _TURN_SECONDS)
        finally:
            with self._lock:
                self._expected.discard(number)
                self._replies.pop(number, None)

    def _sends(self, frame: bytes) -> bool:
        """Whether the socket takes the frame: one that the engine has refused does not."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        """Take in the replies that have come; those that nobody waits for any more are dropped."""
        while self._socket.poll(0):
            try:
                reply = decode_to_rank(self._socket.recv())
            except msgspec.DecodeError:
                continue
            if isinstance(reply, StoreReply) and reply.number in self._expected:
                self._replies[reply.number] = reply.values

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._request("get", [key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", [key], [b"%d" % amount])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._request("compare_set", [key], [_bytes(expected), _bytes(desired)])[0]

    def check(self, keys: list[str]) -> bool:
        return self._request("check", keys)[0] == b"1"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._request("wait", keys, timeout=timeout)

    def append(self, key: str, value: str | bytes) -> None:
        self._request("append", [key], [_bytes(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._request("get", keys)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self._request("set", keys, [_bytes(value) for value in values])

    def delete_key(self, key: str) -> bool:
        return self._request("delete", [key])[0] == b"1"

    def num_keys(self) -> int:
        return int(self._request("count", [])[0])

    # By these names torch calls them from C++.
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> EngineStore:
        """For use by another thread: this store is safe for all of them."""
        return self


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
