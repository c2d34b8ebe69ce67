# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from phalanx.engine.messages import Step
from phalanx.errors import StepDiverged
from phalanx.executor.protocol import Allocate, Chain, Hello, RankHeartbeat, RankPlace, decode_rank_message, encode
from phalanx.layout.rank_progress import ALL_REDUCE
from phalanx.worker import channel as channel_module
from phalanx.worker import engine_store
from phalanx.worker.channel import EngineChannel


@pytest.fixture
def channel(router: zmq.Socket[bytes], tmp_path: Path) -> Iterator[EngineChannel]:
    """Connected: the engine's end has its first word."""
    channel = EngineChannel(3, f"ipc://{tmp_path}/s")
    channel.send(Hello(3, 0, 1))
    name, frame = router.recv_multipart()
    assert (name, decode_rank_message(frame)) == (b"rank-3", Hello(3, 0, 1))
    yield channel
    channel.close()


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/s")
    yield socket
    socket.close(linger=0)
    context.term()


def test_a_channel_receives_messages_and_steps_and_sends_heartbeats(router: zmq.Socket[bytes], channel: EngineChannel) -> None:
    name = b"rank-3"
    assert channel.receive(0.01) is None
    chain = Chain()
    router.send_multipart([name, encode(Allocate(5))])
    router.send_multipart([name, *chain.seal(Step(1, []))])
    assert channel.receive() == Allocate(5)
    assert channel.receive() == Step(1, [])
    assert channel.digest == chain.digest
    chain.seal(Step(2, []))
    router.send_multipart([name, *chain.seal(Step(3, []))])
    with pytest.raises(StepDiverged, match="rank 3 received step 3"):
        channel.receive()
    channel.progress.begin(2)
    channel.progress.layer = 4
    channel.progress.marker("tp").enter(ALL_REDUCE)
    channel.progress.finished = 1
    channel.start_heartbeat(lambda: {"total": 9}, lambda: ({"A/B": 4}, {"eager/steps": 5}))
    name, frame = router.recv_multipart()
    assert (name, decode_rank_message(frame)) == (
        b"heartbeat-rank-3",
        RankHeartbeat(3, RankPlace(2, 1, 4, True, False, b"\0\4\0\0"), {"total": 9}, {"A/B": 4}, {"eager/steps": 5}),
    )


@pytest.mark.parametrize("socket", ["steps", "store"])
def test_a_frame_beyond_the_limit_ends_its_connection(
    router: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: str
) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_TO_RANK", 4096)
    monkeypatch.setattr(engine_store, "MAX_STORE_REPLY", 4096)
    address = f"ipc://{tmp_path}/s"
    end = EngineChannel(3, address) if socket == "steps" else engine_store.EngineStore(3, address, timeout=10)
    end._socket.send(b"first")
    name, _ = router.recv_multipart()
    for size in (4096, 4097):
        router.send_multipart([name, bytes(size)])
    assert end._socket.recv() == bytes(4096)
    assert not end._socket.poll(200)
    end._socket.close(linger=0)
    end._context.term()


def test_a_wait_of_less_than_a_millisecond_ends_and_a_message_ends_it_sooner(
    router: zmq.Socket[bytes], channel: EngineChannel
) -> None:
    name = b"rank-3"
    begin = time.perf_counter()
    assert [channel.receive(100e-6) for _ in range(20)] == [None] * 20
    assert time.perf_counter() - begin < 5.0
    later = threading.Timer(0.1, lambda: router.send_multipart([name, encode(Allocate(5))]))
    later.start()
    begin = time.perf_counter()
    assert channel.receive(60.0) == Allocate(5)
    assert time.perf_counter() - begin < 30.0
    later.join()
    for blocks in range(3):  # several that came together are all taken
        router.send_multipart([name, encode(Allocate(blocks))])
    assert [channel.receive(60.0) for _ in range(3)] == [Allocate(blocks) for blocks in range(3)]
