# SPDX-License-Identifier: Apache-2.0
"""Many mixed requests: memory of server and engine stays flat, and every answer has the right status. 20,000 of them over a real
model are sent by `benchmarks/serve/soak.py`, by the same code."""

from __future__ import annotations

import random

import psutil
import pytest

from benchmarks.serve.soak import DEMO, TEMPLATE, Mix, soak
from tests.support.serve_processes import MODEL, fake_server

pytestmark = pytest.mark.usefixtures("forked_python")

REQUESTS, EVERY, WARM_UP = 700, 70, 4
FLAT = 8 * 2**20
LARGEST = 2**20


def test_mixed_requests(tmp_path):
    engine = {"max_batch_size": 32, "max_seq_len": 2048}
    with fake_server(tmp_path, DEMO, engine=engine, chat_template=str(TEMPLATE), max_stored_responses=60) as served:
        served.wait_ready()
        mix = Mix(MODEL, random.Random(3), largest=LARGEST)
        amounts = {"requests": REQUESTS, "every": EVERY, "warm_up": WARM_UP, "clients": 16}
        for state in soak(served.url, psutil.Process(served.process.pid), mix, **amounts):
            assert state.idle
        assert not state.wrong
        grown = state.grown(WARM_UP)
        assert {"phalanx server", "phalanx engine"} <= grown.keys()
        assert "phalanx large bodies" in grown, "bodies were read in a process of their own"
        assert all(size < FLAT for size in grown.values()), [state.samples, grown]
        print(f"GROWN {grown}")
        assert "Traceback" not in served.log
