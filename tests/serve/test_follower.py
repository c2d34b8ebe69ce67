# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket

import httpx
import pytest

from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy.ray_serve import free_ports
from phalanx.errors import OptionError
from phalanx.serve import follower
from phalanx.serve.connections.listen import bind
from phalanx.serve.follower import FollowerStatus, run_follower
from phalanx.version import __version__


def engine(**options):
    return EngineOptions.of(model="demo", nnodes=2, tensor_parallel_size=2, node_rank=1, start_timeout=1.0, **options)


def test_a_host_without_the_api_server_answers_probes():
    sockets = bind("127.0.0.1", 0)
    status = FollowerStatus(3, sockets)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{sockets[0].getsockname()[1]}") as client:
            assert (client.get("/live").status_code, client.get("/live").json()["node"]) == (200, 3)
            answer = client.get("/ready")
            assert (answer.status_code, answer.json()["reason"]) == (503, "this host has not joined the engine")
            status.joined.set()
            assert client.get("/ready?full=1").status_code == client.get("/health").status_code == 200
            assert client.get("/version").json() == {"version": __version__}
            assert "the API server runs on node 0" in client.get("/v1/models").json()["error"]["message"]
            assert client.post("/v1/completions").status_code == 501
    finally:
        status.close()


@pytest.fixture
def joins(monkeypatch):
    """Instead of hosting ranks: what probes answer once the engine has answered."""
    answers = []

    def join(options, *, local_rank, joined=lambda: None):
        joined()
        port = answers[0]
        answers.append(None if port is None else httpx.get(f"http://127.0.0.1:{port}/ready").status_code)
        return 7

    monkeypatch.setattr(follower, "join", join)
    return answers


def test_it_answers_while_the_node_runs(joins):
    joins.append(free_ports())
    assert run_follower(engine(), ServeOptions.of(host="127.0.0.1", port=joins[0]), 0) == 7
    assert joins[1] == 200


def test_an_address_of_another_host_becomes_its_own(joins, caplog):
    joins.append(free_ports())
    assert run_follower(engine(), ServeOptions.of(host="192.0.2.1", port=joins[0]), 0) == 7
    assert joins[1] == 200
    assert f"probes are answered at 127.0.0.1:{joins[0]}" in caplog.text


def test_without_a_route_to_the_engine_it_says_so(joins, monkeypatch):
    def unreachable(peer):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr("phalanx.executor.node.address_towards", unreachable)
    with pytest.raises(OptionError, match=r"^no route leads to master_addr=127\.0\.0\.1; Network is unreachable; check"):
        run_follower(engine(), ServeOptions.of(host="192.0.2.1", port=free_ports()), 0)


def test_only_the_first_process_of_a_host_answers(joins):
    joins.append(None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serving = ServeOptions.of(host="127.0.0.1", port=taken.getsockname()[1])
        assert run_follower(engine(), serving, 1) == 7
        with pytest.raises(OptionError, match="another process listens"):
            run_follower(engine(), serving, 0)
