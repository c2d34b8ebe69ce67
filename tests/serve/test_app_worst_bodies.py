# SPDX-License-Identifier: Apache-2.0
"""The worst bodies of each route: none delays the tokens of a stream beside it by more than 100 ms. All at once:
test_app_bodies_beside_streams.py.

The delay of a body is the least of several tries, because other tests run on this machine beside this one and delay the stream,
too: a try can be too long for a reason of theirs, and none is too short. What a body itself delays is there in every try.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from phalanx.serve.openai.body import MAX_BODY_BYTES
from tests.serve.conftest import LENGTH
from tests.support.serve_processes import Served, fake_server
from tests.support.serve_worst_bodies import BODIES, FILLED_BODIES, PLAIN, TEMPLATE, Filled, fill, plain, post

MAX_GAP_SECONDS = 0.1
TRIES = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("bodies")
    # The fake ranks compute in Python, inside the engine's process: what one step makes them do must be short.
    engine = {"max_batch_size": 64, "max_num_tokens": 1024}
    with fake_server(
        folder,
        tiny_model,
        fake={"latency": 0.005, "num_blocks": 40_000},
        engine=engine,
        chat_template=TEMPLATE,
    ) as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def filled(served) -> Filled:
    return fill(served)


class Stream:
    """A stream of tokens on a raw connection, whose longest gap is measured on a thread."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.gap, self.ended = 0.0, False
        self._connection = post(served, PLAIN, plain(stream=True, max_tokens=LENGTH - 100, ignore_eos=True))
        self._connection.recv(65536)
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self) -> None:
        latest = time.monotonic()
        with contextlib.suppress(OSError):  # the connection is closed
            while data := self._connection.recv(65536):
                now = time.monotonic()
                self.gap, latest = max(self.gap, now - latest), now
                if b"[DONE]" in data:
                    break
        self.ended = True

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def gap_beside(served: Served, path: str, body: str) -> tuple[float, int]:
    """The longest gap of a stream beside this request, in seconds, and the status of the answer."""
    stream = Stream(served)
    try:
        with post(served, path, body) as connection:
            status = int(connection.recv(65536).split()[1])
            while connection.recv(1 << 20):
                pass
        time.sleep(0.05)
        assert not stream.ended
    finally:
        stream.close()
    return stream.gap, status


@pytest.mark.parametrize("name", BODIES)
def test_tokens_beside(served, name):
    _tokens_beside(served, name, *BODIES[name]())


@pytest.mark.parametrize("name", FILLED_BODIES)
def test_tokens_beside_stored_responses(served, filled, name):
    _tokens_beside(served, name, *FILLED_BODIES[name](filled))


def _tokens_beside(served: Served, name: str, path: str, body: str) -> None:
    assert len(body) <= MAX_BODY_BYTES
    gaps = []
    while len(gaps) < TRIES and (not gaps or min(gaps) > MAX_GAP_SECONDS):
        gap, status = gap_beside(served, path, body)
        gaps.append(gap)
        assert status in (200, 400), status
    print(f"GAP {name}: {status} {min(gaps) * 1000:.0f} ms {[round(1000 * g) for g in gaps]}")
    assert min(gaps) <= MAX_GAP_SECONDS, f"gaps of {[round(1000 * gap) for gap in gaps]} ms"
