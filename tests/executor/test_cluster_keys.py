# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import zmq
from zmq.utils import z85

from phalanx.errors import OptionError
from phalanx.executor.cluster_keys import ClusterKeys


def test_every_host_derives_the_same_keys_and_each_name_has_its_own() -> None:
    keys = ClusterKeys("one token of a test")
    assert keys.public_key("rank-0") == ClusterKeys("one token of a test").public_key("rank-0")
    secrets = {keys.secret_key(name) for name in ("engine", "node-1", "rank-1", "heartbeat-rank-1")}
    secrets.add(ClusterKeys("another token of a test").secret_key("engine"))
    assert len(secrets) == 5
    assert all(len(z85.decode(secret)) == 32 for secret in secrets)


def test_a_zmq_without_curve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(OptionError, match="needs ZeroMQ with CURVE"):
        ClusterKeys("one token of a test")
