# SPDX-License-Identifier: Apache-2.0
"""What can be decided without Ray; tests/acceptance/test_ray_hosts.py has a real cluster."""

from __future__ import annotations

import socket
import sys
import time
from types import SimpleNamespace

import pytest

from phalanx.config.sources import ray_address
from phalanx.deploy import ray_cluster
from phalanx.deploy.ray_cluster import RayHost, connect, impossible, in_order, need_of_host
from phalanx.errors import LayoutError, OptionError


def host(address: str, gpus: float, free: float | None = None) -> RayHost:
    return RayHost(f"id of {address}", address, {"GPU": gpus, "CPU": 64.0}, {"GPU": gpus if free is None else free, "CPU": 64.0})


def test_a_host_reserves_a_gpu_or_a_core_for_each_of_its_ranks():
    assert need_of_host("cuda", 8) == {"GPU": 8.0}
    assert need_of_host("cpu", 2) == {"CPU": 2.0}


def test_what_hosts_can_hold_is_no_error():
    assert impossible([host("10.0.0.1", 8), host("10.0.0.2", 8), host("10.0.0.3", 0)], 2, {"GPU": 8.0}) is None


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            [host("10.0.0.10", 8), host("10.0.0.9", 4)],
            "no placement group: 2 hosts with 8 GPU each; 10.0.0.9: 4 GPU (4 free); 10.0.0.10: 8 GPU (8 free); "
            "only 1 host of the Ray cluster has 8 GPU; run `ray start",
        ),
        (
            [host("10.0.0.1", 8), host("10.0.0.2", 8, free=2)],
            "10.0.0.2: 8 GPU (2 free); only 1 of the 2 hosts with 8 GPU has them free; end what holds them",
        ),
        ([], "the cluster has no live host; only 0 hosts of the Ray cluster have 8 GPU"),
    ],
)
def test_the_resource_and_every_host_are_named(hosts, message):
    error = impossible(hosts, 2, {"GPU": 8.0})
    assert isinstance(error, LayoutError)
    assert message in str(error)


def test_hosts_are_ordered_by_address_and_the_engines_own_leads():
    hosts = [host(address, 8) for address in ("10.0.0.10", "10.0.0.9", "fd00::1", "a-name", "10.0.0.2")]
    assert [one.address for one in in_order(hosts, "10.0.0.9")] == ["10.0.0.9", "10.0.0.2", "10.0.0.10", "fd00::1", "a-name"]
    assert next(one.address for one in in_order(hosts, "10.9.9.9")) == "10.0.0.2"


def test_without_the_package_ray_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"needs the package ray; .*pip install 'ray\[serve\]"):
        connect()


class Disconnected:
    """In the place of the package ray, in a process that has not joined a cluster."""

    @staticmethod
    def is_initialized() -> bool:
        return False


@pytest.fixture
def address(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", Disconnected)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return lambda value: monkeypatch.setenv("RAY_ADDRESS", value)


def test_no_cluster_a_silent_head_and_a_client_address_are_told_apart(address):
    address("")
    assert ray_address() is None
    with pytest.raises(LayoutError, match=r"this host belongs to no Ray cluster; .*`ray start --head --port=6379`"):
        connect()
    address("ray://10.0.0.1:10001")
    with pytest.raises(LayoutError, match="is an address of Ray Client"):
        connect()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address(f"127.0.0.1:{port}")
    with pytest.raises(LayoutError, match=rf"the head of the Ray cluster at 127.0.0.1:{port} does not answer; .*refused"):
        connect()


def test_a_group_that_ray_does_not_make_is_named_at_the_deadline_and_removed(monkeypatch, caplog):
    """Its resources are free, so it is waited for: hosts under load answer late."""
    removed = []
    group = SimpleNamespace(
        placement_group=lambda bundles, strategy: (bundles, strategy),
        placement_group_table=lambda group: {"state": "PENDING", "stats": {"scheduling_state": "QUEUED"}},
        remove_placement_group=removed.append,
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=SimpleNamespace(placement_group=group)))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(placement_group=group))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", group)
    monkeypatch.setattr(ray_cluster, "live_hosts", lambda: [host("10.0.0.1", 8), host("10.0.0.2", 8)])
    for name in ("MAKING_SECONDS", "_POLL_SECONDS", "_REMOVAL_SECONDS"):
        monkeypatch.setattr(ray_cluster, name, 0.05)
    with pytest.raises(LayoutError, match="no placement group was made; Ray says QUEUED"):
        ray_cluster.place(2, {"GPU": 8.0}, time.monotonic())
    (line,) = caplog.messages
    assert "it says QUEUED; hosts: 10.0.0.1, 10.0.0.2; waiting" in line
    assert removed == [([{"GPU": 8.0}] * 2, "STRICT_SPREAD")]
