# SPDX-License-Identifier: Apache-2.0
"""A RayService has as many workers as its servers have nodes; what Ray does itself is no option."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy import k8s, ray_service
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.serve_flags import ServeFlags, read_arguments
from phalanx.errors import OptionError


def flags(**values: Any) -> ServeFlags:
    engine = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "nnodes": 2, **values}
    return ServeFlags(EngineOptions.of(model="meta-llama/Meta-Llama-3-405B", **engine), ServeOptions.of(port=8080))


def objects(server: ServeFlags | None = None, **options: Any) -> dict[str, Any]:
    text = k8s.text(server or flags(), K8sOptions.of(image="phalanx:1-ray", with_="ray", name="llama", **options))
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_a_cluster_with_a_worker_for_each_node_of_each_server():
    cluster = objects(pod_replicas=3)["RayService"]["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (6, 6, 6)
    assert group["rayStartParams"]["num-gpus"] == "8"
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert "resources" not in head
    assert {"name": "serve", "containerPort": 8080} in head["ports"]
    # KubeRay writes these.
    assert not {"command", "args", "livenessProbe", "readinessProbe"} & (worker.keys() | head.keys())
    assert head["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_application_gets_the_servers_arguments():
    config = yaml.safe_load(
        objects(pod_replicas=2, api_key_secret="key", startup_seconds=900)["RayService"]["spec"]["serveConfigV2"]
    )
    assert config["http_options"] == {"host": "::", "port": 8080}
    (application,) = config["applications"]
    assert application["import_path"] == "phalanx.deploy.ray_application:build"
    assert application["args"]["servers"] == 2
    engine, serving = read_arguments(application["args"]["arguments"])
    assert engine.start_timeout == 900  # a replica waits so long for its server
    assert engine.kernel_cache_dir == "/cache/kernels"
    assert serving.api_key_file == "/etc/phalanx/api-key/api-key"
    assert engine.model_copy(update={"start_timeout": 600.0, "kernel_cache_dir": None}) == flags().engine


def test_on_cpu_ranks_reserve_cores():
    (group,) = objects(flags(device="cpu"))["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["rayStartParams"]["num-cpus"] == "8"
    assert "num-gpus" not in group["rayStartParams"]


def test_who_may_connect_and_how_many_may_be_evicted():
    every = objects(flags(pipeline_parallel_size=1, nnodes=1), pod_replicas=2)
    assert every["PodDisruptionBudget"]["spec"]["minAvailable"] == 2  # of a head and two workers, which are all ready
    api, group, dashboard = every["NetworkPolicy"]["spec"]["ingress"]
    assert api == {"ports": [{"protocol": "TCP", "port": "serve"}]}
    assert group["from"] == [{"podSelector": every["NetworkPolicy"]["spec"]["podSelector"]}]
    assert dashboard["from"][0]["podSelector"]["matchLabels"] == ray_service.OPERATOR
    assert "Service" not in every  # KubeRay makes it


def test_workers_that_are_never_ready_have_no_budget():
    """Of the workers of a server on several nodes, KubeRay makes only that of the replica ready: a head and one worker of two are
    available, and a budget of pods - 1 would forbid every eviction."""
    assert "PodDisruptionBudget" not in objects(pod_replicas=1)
    text = k8s.text(flags(), K8sOptions.of(image="phalanx:1-ray", with_="ray"))
    assert "# disruption_budget = False: KubeRay keeps a worker without a proxy of Ray Serve unready" in text
    assert "# needs: an image with the extra ray: docker build --build-arg EXTRAS=gpu,ray" in text


@pytest.mark.parametrize(
    ("server", "options", "problem"),
    [
        ({}, {"autoscale": "hpa"}, "autoscale has no effect with ray"),
        ({}, {"service_monitor": True}, "service_monitor has no effect with ray"),
        ({}, {"max_surge": 0}, "max_surge has no effect with ray"),
        ({}, {"exclusive_topology": "rack"}, "exclusive_topology has no effect with ray"),
        ({}, {"cluster_token_secret": "t"}, "a token of its own"),
        ({}, {"endpoint_picker": "p"}, "endpoint_picker has no effect with ray"),
        ({"start_timeout": 30.0}, {}, "startup_seconds"),
        ({"insecure_cluster": True}, {}, "insecure_cluster"),
    ],
)
def test_what_ray_does_itself_is_an_error(server, options, problem):
    with pytest.raises(OptionError, match=problem):
        objects(flags(**server), **options)
