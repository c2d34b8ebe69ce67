# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec

from phalanx.engine.messages import Stats


def test_what_rank_0_counts_arrives_parted() -> None:
    sent = Stats(steps=4)
    sent.allreduce = {"ONESHOT/NONE": 3, "eager/steps": 2, "prompt graph/padding": 7}
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Stats)
    assert said.allreduce == {"ONESHOT/NONE": 3}
    assert said.ran == {"eager/steps": 2, "prompt graph/padding": 7}
    assert said.steps == 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Stats) == said
