# SPDX-License-Identifier: Apache-2.0
"""From the text of a Kubernetes manifest to the options that make it.

Every option is read from the field that carries it, and then the manifest is made again: text that no options make, as one that was
edited by hand, is an error that names the first field that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from phalanx.deploy import k8s, yaml_text
from phalanx.deploy import objects as k
from phalanx.deploy.budget import PROBE_SECONDS
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.pod import SET_BY_MANIFEST
from phalanx.deploy.ray_service import read_serve_config
from phalanx.deploy.serve_flags import ServeFlags, read_arguments
from phalanx.errors import OptionError

Workload = k.Deployment | k.LeaderWorkerSet | k.RayService
One = TypeVar("One", bound=k.Object)


class Deployed(NamedTuple):
    """The options of a manifest; those of `options` are as `k8s.resolve` leaves them."""

    flags: ServeFlags
    options: K8sOptions


def read_manifest(text: str) -> Deployed:
    """The options of a manifest of `k8s.text`; comments do not count. Raises OptionError for what is none."""
    documents = yaml_text.loads(text, what="the manifest")
    objects = [k.read(document) for document in documents]
    workload = _workload(objects)
    template = _template(workload)
    container = template.spec.containers[0]
    volumes = {volume.name: volume for volume in template.spec.volumes}
    folder = "models" in volumes
    own: dict[str, Any] = {}
    if isinstance(workload, k.RayService):
        flags, own = read_serve_config(workload.spec.serve_config_v2, folder=folder)
    else:
        flags, _ = read_arguments(container.args or [], folder=folder, own=SET_BY_MANIFEST)
    values = {**_of_pod(template.spec, container), **_of_volumes(volumes), **_of_objects(objects, workload), **own}
    deployed = Deployed(flags, K8sOptions.of(**values))
    again = [each.document() for each in k8s.objects(flags, k8s.resolve(flags, deployed.options).options)]
    if difference := next(_differences(again, documents, "manifest"), None):
        raise OptionError("the manifest has been changed", why=difference, next="change the options, and write it again")
    return deployed


def _workload(objects: list[k.Object]) -> Workload:
    workloads = [each for each in objects if isinstance(each, (k.Deployment, k.LeaderWorkerSet, k.RayService))]
    if len(workloads) != 1:
        raise OptionError(f"the manifest has {len(workloads)} workloads", why="that of a server has one")
    return workloads[0]


def _template(workload: Workload) -> k.PodTemplate:
    if isinstance(workload, k.RayService):
        return workload.spec.ray_cluster_config.worker_group_specs[0].template
    if isinstance(workload, k.LeaderWorkerSet):
        return workload.spec.leader_worker_template.leader_template
    return workload.spec.template


def _of_pod(spec: k.PodSpec, container: k.Container) -> dict[str, Any]:
    resources = container.resources or k.Resources()
    limits, requests = resources.limits or {}, resources.requests or {}
    env = {variable.name: variable for variable in container.env or []}
    token = env["HF_TOKEN"].value_from if "HF_TOKEN" in env else None
    values: dict[str, Any] = {
        "image": container.image, "runtime_class": spec.runtime_class_name,
        "cpu": requests.get("cpu"), "memory": limits.get("memory"),
        "image_pull_secret": spec.image_pull_secrets[0].name if spec.image_pull_secrets else None,
        "node_selector": tuple(f"{name}={value}" for name, value in (spec.node_selector or {}).items()),
        "hub_token_secret": token.secret_key_ref.name if token else None,
        "env": tuple(
            f"{each.name}={(each.value or '').replace('$$', '$')}"
            for each in container.env or [] if each.name not in ("HOME", "HF_HOME", "HF_TOKEN")
        ),
    }  # fmt: skip
    if container.startup_probe is not None:
        values["startup_seconds"] = container.startup_probe.failure_threshold * PROBE_SECONDS
    if gpus := [name for name in limits if name != "memory"]:
        values["gpu_resource"] = gpus[0]
    return values


def _of_volumes(volumes: dict[str, k.Volume]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("model", "cache"):
        volume = volumes.get(name if name == "cache" else "models")
        if volume is not None and volume.persistent_volume_claim is not None:
            values[f"{name}_claim"] = volume.persistent_volume_claim.claim_name
        if volume is not None and volume.host_path is not None:
            values[f"{name}_host_path"] = volume.host_path.path
    for name, option in (("api-key", "api_key_secret"), ("cluster-token", "cluster_token_secret")):
        volume = volumes.get(name)
        if volume is not None and volume.secret is not None:
            values[option] = volume.secret.secret_name
    shm = volumes.get("shm")
    values["shm_size"] = shm.empty_dir.size_limit if shm is not None and shm.empty_dir is not None else None
    return values


def _of_objects(objects: list[k.Object], workload: Workload) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": workload.metadata.name, "namespace": workload.metadata.namespace,
        "exclusive_topology": (workload.metadata.annotations or {}).get(f"{k8s.LWS}/exclusive-topology"),
        "disruption_budget": _only(objects, k.PodDisruptionBudget) is not None,
        "network_policy": _only(objects, k.NetworkPolicy) is not None,
        "service_monitor": _only(objects, k.ServiceMonitor) is not None,
    }  # fmt: skip
    if isinstance(workload, k.RayService):
        values["with_"] = "ray"
    elif isinstance(workload, k.LeaderWorkerSet):
        rolling = workload.spec.rollout_strategy.rolling_update_configuration
        values |= {"pod_replicas": workload.spec.replicas, "max_surge": rolling.max_surge}
    else:
        values |= {"pod_replicas": workload.spec.replicas, "max_surge": workload.spec.strategy.rolling_update.max_surge}
    if claim := _only(objects, k.ResourceClaimTemplate):
        values |= {"dra": True, "device_class": claim.spec.spec.devices.requests[0].exactly.device_class_name}
    if hpa := _only(objects, k.HorizontalPodAutoscaler):
        target = hpa.spec.metrics[0].pods.target.average_value
        values |= {
            "autoscale": "hpa",
            "min_replicas": hpa.spec.min_replicas,
            "max_replicas": hpa.spec.max_replicas,
            "queue_target": target,
        }
    if keda := _only(objects, k.ScaledObject):
        trigger = keda.spec.triggers[0].metadata
        values |= {"autoscale": "keda", "min_replicas": keda.spec.min_replica_count, "max_replicas": keda.spec.max_replica_count,
                   "queue_target": trigger.threshold, "prometheus_url": trigger.server_address}  # fmt: skip
    if pool := _only(objects, k.InferencePool):
        picker = pool.spec.endpoint_picker_ref
        values |= {"endpoint_picker": picker.name, "endpoint_picker_port": picker.port.number}
    return values


def _only(objects: list[k.Object], kind: type[One]) -> One | None:
    return next((each for each in objects if isinstance(each, kind)), None)


def _differences(expected: Any, actual: Any, where: str) -> Iterator[str]:
    """Where two documents differ, as "spec.replicas is 3, and these options make 2"."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name in [*expected, *(name for name in actual if name not in expected)]:
            yield from _differences(expected.get(name), actual.get(name), f"{where}.{name}")
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            label = one.get("kind") or one.get("name") if isinstance(one, dict) else None
            yield from _differences(one, other, f"{where}[{label or index}]")
    elif expected != actual:
        yield f"{where} is {_short(actual)}, and its options make {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
