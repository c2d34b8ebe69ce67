# SPDX-License-Identifier: Apache-2.0
"""A server as a RayService of KubeRay: a Ray cluster whose workers hold the ranks, and the application of `deploy.ray_application`.

KubeRay writes the command `ray start` and the probes into the containers, makes the Service NAME-serve-svc, and replaces the
cluster where its description changes.
"""

from __future__ import annotations

from phalanx.deploy import yaml_text
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.pod import (
    CLOSE_SECONDS,
    PRE_STOP_SECONDS,
    SECRET_KEYS,
    SECRETS,
    Fields,
    disruption_budget,
    drain_seconds,
    environment,
    in_folder,
    labels,
    mounts,
    network_policy,
    on_gpu,
    pod,
    ranks_per_pod,
    resources,
    security,
    some,
)
from phalanx.deploy.serve_flags import KERNELS, ServeFlags, arguments
from phalanx.errors import OptionError

IMPORT_PATH = "phalanx.deploy.ray_application:build"
OBJECT_STORE_BYTES = 80_000_000
"""Ray's smallest object store is 75 MB: Ray starts and watches ranks, and carries no tensors."""
HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
WITHOUT_BUDGET = "KubeRay keeps a worker without a proxy of Ray Serve unready, so a budget could forbid every eviction"
"""Why a server of several workers has no PodDisruptionBudget: only the worker of its replica has a proxy."""
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
_NOT_WITH_RAY = {
    "max_surge": "KubeRay replaces a cluster as one", "exclusive_topology": "Ray places the ranks",
    "cluster_token_secret": "each server makes a token of its own", "service_monitor": "a scrape would reach any server",
    "autoscale": "phalanx deploy ray-serve has min_replicas and max_replicas", "endpoint_picker": "Ray Serve spreads the requests",
}  # fmt: skip


def require_possible(flags: ServeFlags, options: K8sOptions) -> None:
    """Raise OptionError for options that have no effect, or another meaning, with Ray."""
    for name, why in _NOT_WITH_RAY.items():
        if getattr(options, name) != K8sOptions.model_fields[name].default:
            raise OptionError(f"{name} has no effect with ray", why=why, next="leave it out")
    if flags.engine.start_timeout != type(flags.engine).model_fields["start_timeout"].default:
        raise OptionError("start_timeout has no effect with ray", why="it is startup_seconds there", next="give startup_seconds")
    if flags.engine.insecure_cluster:
        raise OptionError("insecure_cluster has no effect with ray", why=_NOT_WITH_RAY["cluster_token_secret"], next="leave it out")


def service(flags: ServeFlags, options: K8sOptions, metadata: Fields) -> Fields:
    """The RayService. options: of `k8s.resolve`."""
    # "" is every address of both families for the dashboard, `::` for Ray Serve.
    head = {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "", "object-store-memory": str(OBJECT_STORE_BYTES)}
    device = "num-gpus" if on_gpu(flags) else "num-cpus"
    worker = {"object-store-memory": str(OBJECT_STORE_BYTES), device: str(ranks_per_pod(flags))}
    workers = flags.engine.nnodes * servers(options)
    group = {
        "groupName": "ranks", "replicas": workers, "minReplicas": workers, "maxReplicas": workers, "rayStartParams": worker,
        "template": _template(flags, options, head=False),
    }  # fmt: skip
    cluster = {
        "headGroupSpec": {"rayStartParams": head, "template": _template(flags, options, head=True)}, "workerGroupSpecs": [group]
    }  # fmt: skip
    spec = {"serveConfigV2": _serve_config(flags, options), "rayClusterConfig": cluster}
    return {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": metadata, "spec": spec}


def servers(options: K8sOptions) -> int:
    assert options.pod_replicas is not None
    return options.pod_replicas


def _serve_config(flags: ServeFlags, options: K8sOptions) -> str:
    own = {"kernel_cache_dir": KERNELS, "start_timeout": str(options.startup_seconds)}
    if options.api_key_secret is not None:
        own["api_key_file"] = f"{SECRETS}/api-key/{SECRET_KEYS['api_key_secret']}"
    application = {
        "name": options.name, "import_path": IMPORT_PATH, "route_prefix": "/",
        "args": {"arguments": arguments(flags, folder=in_folder(options), own=own), "servers": servers(options)},
    }  # fmt: skip
    http = {"host": "::", "port": flags.serving.port}
    return yaml_text.dumps([{"http_options": http, "applications": [application]}])


def _template(flags: ServeFlags, options: K8sOptions, *, head: bool) -> Fields:
    """A pod of Ray: without a command and probes, which KubeRay writes."""
    gpus = on_gpu(flags) and not head
    ports = {**HEAD_PORTS, "serve": flags.serving.port} if head else {"serve": flags.serving.port}
    container = {
        "name": "ray-head" if head else "ray-worker", "image": options.image, "env": environment(options),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        **some(resources=resources(flags, options, gpus=gpus)), "securityContext": security(), "volumeMounts": mounts(options),
    }  # fmt: skip
    return pod(options, container, grace=PRE_STOP_SECONDS + drain_seconds(flags) + CLOSE_SECONDS, gpus=gpus)


def around(flags: ServeFlags, options: K8sOptions, meta: Fields, api_meta: Fields) -> list[Fields]:
    """What stands around a RayService. KubeRay reaches the head's dashboard; Ray's ports are open to the pods of the service."""
    assert options.name is not None
    own_pods = {"matchLabels": labels(options.name)}
    result: list[Fields] = []
    if options.disruption_budget:  # of servers on one worker each, so that every worker has a replica and is ready
        # Pods of KubeRay have no number that a share could be taken of.
        pods = 1 + flags.engine.nnodes * servers(options)
        result.append(disruption_budget(meta, {"minAvailable": pods - 1, "selector": own_pods}))
    if options.network_policy:
        operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
        rules: list[Fields] = [
            {"ports": [{"protocol": "TCP", "port": "serve"}]}, {"from": [{"podSelector": own_pods}]},
            {"from": [operator], "ports": [{"protocol": "TCP", "port": "dashboard"}]},
        ]  # fmt: skip
        result.append(network_policy(api_meta, own_pods, rules))
    return result
