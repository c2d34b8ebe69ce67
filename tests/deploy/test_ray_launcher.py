# SPDX-License-Identifier: Apache-2.0
"""The launcher's decisions, and the agent of a host in this process; tests/acceptance/test_ray_hosts.py has a real cluster."""

from __future__ import annotations

import pytest

from phalanx.config.options import EngineOptions
from phalanx.deploy import ray_launcher
from phalanx.deploy.ray_launcher import NodeAgent, RayLauncher, actor_error
from phalanx.errors import EngineError, NodeLost, PhalanxError
from phalanx.executor.launcher import ClusterLauncher


def options(**changes):
    return EngineOptions(model="demo", device="cpu", tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, **changes)


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr("phalanx.deploy.ray_cluster.connect", lambda: None)
    return lambda **changes: RayLauncher(options(**changes))


def test_it_is_a_launcher_that_finds_the_hosts_itself(launcher):
    one = launcher()
    assert isinstance(one, ClusterLauncher)
    assert not one.on_this_host
    one.stop(0)
    one.stop(0)
    assert one.ended() == []


def test_a_given_address_of_the_engine_is_taken(launcher):
    assert launcher(master_addr="10.0.0.7").engine_address() == "10.0.0.7"


@pytest.mark.parametrize(
    ("reason", "kind", "message"),
    [
        ("The actor died because its node has died.", NodeLost, r"^node 1 \(10.0.0.2\) is gone; Ray reports: The actor died"),
        ("failed to import phalanx.deploy on the worker. ModuleNotFoundError: No module named 'phalanx'", EngineError,
         r"^node 1 \(10.0.0.2\) cannot run Phalanx; .*No module named 'phalanx'; install the same phalanx"),
    ],
)  # fmt: skip
def test_an_actor_that_ended_without_a_word_is_named_with_its_host(reason, kind, message):
    with pytest.raises(kind, match=message):
        raise actor_error("node 1 (10.0.0.2)", reason)


def test_an_agent_gives_the_error_of_its_host_back(monkeypatch):
    ends = []
    monkeypatch.setattr(ray_launcher.threading, "Timer", lambda seconds, act, arguments: ends.append(arguments) or NoTimer())
    values = options(master_addr="127.0.0.1").model_dump(mode="json", exclude={"node_rank", "cluster_token", "cluster_token_file"})
    agent = NodeAgent(1)
    wire = agent.run({**values, "model": "/no/such/folder", "launcher": "local"}, "a token of sixteen bytes", {})
    assert "/no/such/folder" in str(PhalanxError.from_wire(wire))
    assert ends == [(0,)]
    agent.dump_stacks(2)  # no rank runs: nothing happens


class NoTimer:
    def start(self):
        pass
