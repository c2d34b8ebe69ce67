# SPDX-License-Identifier: Apache-2.0
"""The store of real ranks against torch's own, over the engine's authenticated socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from phalanx.executor import protocol
from phalanx.executor.cluster_keys import ClusterKeys
from phalanx.executor.peer_authentication import PeerAuthenticator
from phalanx.executor.rank_store import RankStore
from phalanx.worker.engine_store import EngineStore

TOKEN = "a token of sixteen bytes or more"


@pytest.fixture
def address() -> Iterator[str]:
    """Of an engine's socket, behind which a store answers two ranks."""
    context: zmq.Context[Any] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    peers = PeerAuthenticator(ClusterKeys(TOKEN), [protocol.store_identity(rank) for rank in range(2)])
    peers.listen(context, router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    store, ended = RankStore(), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if router.poll(10):
                frames = router.recv_multipart(copy=False)
                message = protocol.decode_rank_message(frames[-1].bytes)
                if peers.sender(frames) == protocol.sender_identity(message):
                    for rank, reply in store.receive(message):  # type: ignore[arg-type]
                        router.send_multipart([protocol.store_identity(rank), protocol.encode(reply)])

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    ended.set()
    thread.join()
    router.close()
    context.term()


def close(*stores: EngineStore) -> None:
    for store in stores:
        store._socket.close(linger=0)
        store._context.term()


def operations(store: dist.Store) -> list[object]:
    """What a store answers: written for torch's own store, too, which is the oracle."""
    store.set("a", "1")
    store.set("b", "text")
    return [
        store.get("a"), store.add("counter", 5), store.add("counter", -2), store.get("counter"), store.check(["a", "b"]),
        store.check(["a", "none"]), store.compare_set("a", "0", "2"), store.compare_set("a", "1", "2"), store.get("a"),
        store.compare_set("fresh", "", "first"), store.compare_set("other", "expected", "first"), store.check(["other"]),
        store.append("a", "3"), store.get("a"), store.multi_set(["c", "d"], ["x", "y"]), store.multi_get(["d", "c"]),
        store.delete_key("c"), store.delete_key("c"), store.check(["c"]), store.wait(["a", "b"]),
        store.wait(["a"], timedelta(seconds=1)),
    ]  # fmt: skip


def test_it_answers_as_the_store_of_torch_does(address: str) -> None:
    store = EngineStore(0, address, TOKEN, timeout=10)
    try:
        expected = operations(dist.HashStore())
        assert operations(store) == expected
        assert store.has_extended_api()
        assert operations(dist.PrefixStore("below", store)) == expected, "as torch calls it, from C++"
        assert store.num_keys() == 2 * 5
    finally:
        close(store)


def test_gloo_forms_a_group_through_it(address: str) -> None:
    """gloo's ring of two ranks in one process; threads stand for the processes."""
    stores = [EngineStore(rank, address, TOKEN, timeout=20) for rank in range(2)]

    def total(rank: int) -> float:
        group = dist.ProcessGroupGloo(stores[rank], rank, 2, timeout=timedelta(seconds=20))
        x = torch.tensor([1.0 + rank])
        group.allreduce([x]).wait()
        return float(x)

    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(total, range(2))) == [3.0, 3.0]
    finally:
        close(*stores)


def test_threads_share_it_and_none_waits_for_another(address: str) -> None:
    store, other = EngineStore(0, address, TOKEN, timeout=20), EngineStore(1, address, TOKEN, timeout=20)
    try:
        with ThreadPoolExecutor(5) as pool:
            late = [pool.submit(store.get, f"late/{number}") for number in range(4)]
            begin = time.monotonic()
            assert not store.check(["late/0"])
            assert time.monotonic() - begin < 5
            for number in range(4):
                other.set(f"late/{number}", f"{number}")
            assert [future.result(10) for future in late] == [b"0", b"1", b"2", b"3"]
    finally:
        close(store, other)


def test_a_stranger_neither_reads_nor_forges_a_key(address: str) -> None:
    """Without the token, and with another one, and a second process under the name of a rank that is connected."""
    store = EngineStore(0, address, TOKEN, timeout=10)
    store.set("secret", "value")
    strangers = [
        EngineStore(1, address, None, timeout=0.5), EngineStore(1, address, "another token of sixteen bytes", timeout=0.5),
        EngineStore(0, address, TOKEN, timeout=0.5),
    ]  # fmt: skip
    try:
        for stranger in strangers:
            with pytest.raises(dist.DistStoreError, match=r"did not answer set of key within 0.5 s"):
                stranger.set("key", "forged")
            with pytest.raises(dist.DistStoreError, match=r"did not answer get of secret within 0.5 s"):
                stranger.get("secret")
        assert not store.check(["key"])
        assert store.get("secret") == b"value"
    finally:
        close(store, *strangers)


def test_a_key_that_nobody_sets_is_named(address: str) -> None:
    store = EngineStore(0, address, TOKEN, timeout=0.2)
    try:
        with pytest.raises(dist.DistStoreError, match=r"did not answer get of ranks/7 within 0.2 s"):
            store.get("ranks/7")
        with pytest.raises(dist.DistStoreError, match=r"did not answer wait of below/x within 0.1 s"):
            dist.PrefixStore("below", store).wait(["x"], timedelta(seconds=0.1))
        store.set("ranks/7", "late")
        assert store.get("ranks/7") == b"late", "the late reply to the first request is no reply to the second"
    finally:
        close(store)
