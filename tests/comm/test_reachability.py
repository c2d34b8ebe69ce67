# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.comm import reachability
from phalanx.comm.reachability import require_mutual
from phalanx.deploy.ray_serve import free_ports
from phalanx.errors import EngineError


class MemoryStore:
    """`get` waits for the key, as torch's stores do."""

    def __init__(self, **values: str) -> None:
        self._values = dict(values)
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=10), key
            return self._values[key].encode()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(reachability, "CONNECT_SECONDS", 0.5)


def test_hosts_that_reach_each_other_go_on():
    store = MemoryStore()
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(require_mutual, store, node, 3, "127.0.0.1") for node in range(3)]:
            future.result(10)


def test_strangers_that_connect_keep_no_host_out():
    """They hold more connections than there are hosts."""
    store, strangers = MemoryStore(), []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(require_mutual, store, 0, 2, "127.0.0.1")
        host, port = store.get("reachability/0").decode().split(":")
        for _ in range(20):
            strangers.append(socket.create_connection((host, int(port)), timeout=2))
        second = pool.submit(require_mutual, store, 1, 2, "127.0.0.1")
        first.result(10)
        second.result(10)
    for stranger in strangers:
        stranger.close()


def test_the_direction_that_fails_is_named():
    port = free_ports()
    store = MemoryStore()
    store.set("reachability/1", f"127.0.0.1:{port}")
    with pytest.raises(
        EngineError, match=rf"^node 0 \(127.0.0.1\) cannot connect to node 1 at 127.0.0.1:{port}; Connection refused"
    ):
        require_mutual(store, 0, 2, "127.0.0.1")


def test_a_host_that_drops_packets_is_told_from_one_that_refuses(monkeypatch):
    def drop(address, timeout):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", drop)
    store = MemoryStore(**{"reachability/1": "10.0.0.1:5"})
    with pytest.raises(
        EngineError, match=r"^node 0 \(127.0.0.1\) cannot connect to node 1 at 10.0.0.1:5; .*a firewall drops the packets"
    ):
        require_mutual(store, 0, 2, "127.0.0.1")
