# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from phalanx.engine.messages import Step
from phalanx.engine.ranks.link import Link
from phalanx.engine.ranks.wire import Allocate, Chain, Hello, Pulse, decode_to_engine, encode
from phalanx.errors import StepDiverged


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/s")
    yield socket
    socket.close(linger=0)
    context.term()


def test_a_link_takes_words_and_steps_and_gives_a_pulse(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    link = Link(3, f"ipc://{tmp_path}/s")
    link.send(Hello(3, 0, 1))
    name, frame = router.recv_multipart()
    assert (name, decode_to_engine(frame)) == (b"rank-3", Hello(3, 0, 1))
    assert link.receive(0.01) is None
    chain = Chain()
    router.send_multipart([name, encode(Allocate(5))])
    router.send_multipart([name, *chain.seal(Step(1, []))])
    assert link.receive() == Allocate(5)
    assert link.receive() == Step(1, [])
    assert link.digest == chain.digest
    chain.seal(Step(2, []))
    router.send_multipart([name, *chain.seal(Step(3, []))])
    with pytest.raises(StepDiverged, match="rank 3 was given step 3"):
        link.receive()
    link.begun, link.finished = 2, 1
    link.start_pulse(lambda: {"total": 9}, dict)
    name, frame = router.recv_multipart()
    assert (name, decode_to_engine(frame)) == (b"pulse-rank-3", Pulse(3, 2, 1, {"total": 9}, {}))
    link.close()
