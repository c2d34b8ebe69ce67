# SPDX-License-Identifier: Apache-2.0
"""A server as a RayService of KubeRay: a Ray cluster whose workers hold the ranks, and the application of `deploy.ray_application`.

KubeRay writes the command `ray start` and the probes into the containers, makes the Service NAME-serve-svc, and replaces the
cluster where its description changes.
"""

from __future__ import annotations

from typing import Any

from phalanx.deploy import objects as k
from phalanx.deploy import yaml_text
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.pod import (
    CLOSE_SECONDS,
    PRE_STOP_SECONDS,
    SECRET_KEYS,
    SECRETS,
    drain_seconds,
    environment,
    in_folder,
    labels,
    mounts,
    on_gpu,
    pod,
    ranks_per_pod,
    resources,
)
from phalanx.deploy.serve_flags import KERNELS, ServeFlags, arguments, read_arguments
from phalanx.errors import OptionError

IMPORT_PATH = "phalanx.deploy.ray_application:build"
OBJECT_STORE_BYTES = 80_000_000
"""Ray's smallest object store is 75 MB: Ray starts and watches ranks, and carries no tensors."""
HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
WITHOUT_BUDGET = "KubeRay keeps a worker without a proxy of Ray Serve unready, so a budget could forbid every eviction"
"""Why a server of several workers has no PodDisruptionBudget: only the worker of its replica has a proxy."""
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
OWN_OPTIONS = {"kernel_cache_dir", "api_key_file", "start_timeout"}
"""Options of the server that this manifest sets."""
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


def service(flags: ServeFlags, options: K8sOptions, metadata: k.Meta) -> k.RayService:
    """The RayService. options: of `k8s.resolve`."""
    head = {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0", "object-store-memory": str(OBJECT_STORE_BYTES)}
    worker = {"object-store-memory": str(OBJECT_STORE_BYTES)}
    if on_gpu(flags):
        worker["num-gpus"] = str(ranks_per_pod(flags))
    else:
        worker["num-cpus"] = str(ranks_per_pod(flags))
    workers = flags.engine.nnodes * servers(options)
    group = k.WorkerGroup(
        group_name="ranks", replicas=workers, min_replicas=workers, max_replicas=workers, ray_start_params=worker,
        template=_template(flags, options, head=False),
    )  # fmt: skip
    cluster = k.RayClusterSpec(
        head_group_spec=k.HeadGroup(ray_start_params=head, template=_template(flags, options, head=True)),
        worker_group_specs=[group],
    )
    spec = k.RayServiceSpec(serve_config_v2=_serve_config(flags, options), ray_cluster_config=cluster)
    return k.RayService(metadata=metadata, spec=spec)


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
    http = {"host": "0.0.0.0", "port": flags.serving.port}
    return yaml_text.dumps([{"http_options": http, "applications": [application]}])


def read_serve_config(text: str, *, folder: bool) -> tuple[ServeFlags, dict[str, Any]]:
    """The server's options in a serveConfigV2, and those of the manifest. Raises OptionError for what is none of ours."""
    try:
        (config,) = yaml_text.loads(text, what="serveConfigV2")
        (application,) = config["applications"]
        words, count = application["args"]["arguments"], application["args"]["servers"]
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError("serveConfigV2 is not understood", why=str(error)) from None
    flags, own = read_arguments(words, folder=folder, own=OWN_OPTIONS)
    return flags, {"pod_replicas": count, "startup_seconds": own.get("start_timeout")}


def _template(flags: ServeFlags, options: K8sOptions, *, head: bool) -> k.PodTemplate:
    """A pod of Ray: without a command and probes, which KubeRay writes."""
    gpus = on_gpu(flags) and not head
    ports = {**HEAD_PORTS, "serve": flags.serving.port} if head else {"serve": flags.serving.port}
    container = k.Container(
        name="ray-head" if head else "ray-worker", image=options.image, env=environment(options),
        ports=[k.ContainerPort(name=name, container_port=port) for name, port in ports.items()],
        resources=resources(flags, options, gpus=gpus), security_context=k.ContainerSecurity(), volume_mounts=mounts(options),
    )  # fmt: skip
    return pod(options, container, grace=PRE_STOP_SECONDS + drain_seconds(flags) + CLOSE_SECONDS, gpus=gpus)


def around(flags: ServeFlags, options: K8sOptions, meta: k.Meta, api_meta: k.Meta) -> list[k.Object]:
    """What stands around a RayService. KubeRay reaches the head's dashboard; Ray's ports are open to the pods of the service."""
    assert options.name is not None
    own_pods = k.LabelSelector(match_labels=labels(options.name))
    result: list[k.Object] = []
    if options.disruption_budget:  # of servers on one worker each, so that every worker has a replica and is ready
        # Pods of KubeRay have no number that a share could be taken of.
        pods = 1 + flags.engine.nnodes * servers(options)
        budget = k.PodDisruptionBudgetSpec(min_available=pods - 1, selector=own_pods)
        result.append(k.PodDisruptionBudget(metadata=meta, spec=budget))
    if options.network_policy:
        operator = k.Peer(namespace_selector=k.AnyNamespace(), pod_selector=k.LabelSelector(match_labels=OPERATOR))
        rules = [
            k.Ingress(ports=[k.PolicyPort(port="serve")]), k.Ingress(from_=[k.Peer(pod_selector=own_pods)]),
            k.Ingress(from_=[operator], ports=[k.PolicyPort(port="dashboard")]),
        ]  # fmt: skip
        result.append(k.NetworkPolicy(metadata=api_meta, spec=k.NetworkPolicySpec(pod_selector=own_pods, ingress=rules)))
    return result
