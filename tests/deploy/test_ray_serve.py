# SPDX-License-Identifier: Apache-2.0
"""What is decided before anything is deployed, and the health of a replica; tests/acceptance/test_ray_hosts.py deploys one."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy.ray_serve import Replica, Scaling, deployment_options, free_ports, require_deployable
from phalanx.errors import EngineError, OptionError


def engine(**options):
    return EngineOptions.of(model="demo", **options)


def test_a_replica_reserves_the_gpus_of_its_ranks_and_takes_what_the_server_queues():
    options = deployment_options(engine(tensor_parallel_size=4, max_batch_size=16), ServeOptions(), Scaling(2, 2), "cuda")
    assert options["ray_actor_options"] == {"num_cpus": 0, "num_gpus": 4}
    assert options["num_replicas"] == 2
    assert options["max_ongoing_requests"] == 16 + 8 * 16 + 8
    assert options["graceful_shutdown_timeout_s"] > ServeOptions().shutdown_timeout
    assert deployment_options(engine(tensor_parallel_size=2), ServeOptions(), Scaling(), "cpu")["ray_actor_options"] == {
        "num_cpus": 2
    }


def test_a_replica_of_several_hosts_reserves_nothing_itself():
    options = deployment_options(engine(tensor_parallel_size=4, nnodes=2), ServeOptions(), Scaling(), "cuda")
    assert options["ray_actor_options"] == {"num_cpus": 0}


def test_replicas_scale_on_running_requests():
    options = deployment_options(engine(max_batch_size=16), ServeOptions(), Scaling(0, 3), "cuda")
    scaling = {"min_replicas": 0, "max_replicas": 3, "initial_replicas": 1, "target_ongoing_requests": 16}
    assert options["autoscaling_config"] == scaling
    options = deployment_options(engine(), ServeOptions(), Scaling(1, 3, target=5), "cuda")
    assert options["autoscaling_config"]["target_ongoing_requests"] == 5


@pytest.mark.parametrize("numbers", [(2, 1), (-1, 1), (0, 0), (1, 2, 0)])
def test_numbers_of_replicas_that_do_not_fit_are_refused(numbers):
    with pytest.raises(OptionError):
        Scaling(*numbers)


@pytest.mark.parametrize(
    "options",
    [
        {"node_rank": 1},
        {"master_addr": "host0"},
        {"launcher": "local"},
        {"cluster_token": "a token of sixteen bytes"},
        {"api_key": "k"},
    ],
)
def test_what_ray_sets_and_what_it_would_store_is_refused(options):
    values = {name: value for name, value in options.items() if name in EngineOptions.model_fields}
    serving = {name: value for name, value in options.items() if name not in values}
    with pytest.raises(OptionError, match=f"^{next(iter(options))} is not possible with ray-serve"):
        require_deployable(engine(**values), ServeOptions.of(**serving))


def test_free_ports_follow_each_other():
    port = free_ports(2)
    for number in (port, port + 1):
        with socket.socket() as one:
            one.bind(("127.0.0.1", number))


def test_a_replica_without_its_server_is_not_healthy():
    replica = Replica.__new__(Replica)
    replica._server = SimpleNamespace(alive=False, process=SimpleNamespace(returncode=-9))
    with pytest.raises(EngineError, match=r"^the server of this replica was killed by SIGKILL"):
        replica.check_health()
    del replica._server  # nothing to stop
