# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests of a server: options in, text out. Pure: the same options give the same bytes.

resolve the options -> workload (Deployment | LeaderWorkerSet) -> what stands around it -> YAML
"""

from __future__ import annotations

import re
from typing import NamedTuple

from phalanx.config.sources import ALIASES
from phalanx.deploy import ray_service, yaml_text
from phalanx.deploy.budget import PROBE_SECONDS, require_memory, shm_quantity, startup
from phalanx.deploy.options import LONGEST_NAME, K8sOptions, require_once
from phalanx.deploy.pod import (
    SECRET_KEYS,
    Fields,
    disruption_budget,
    in_folder,
    labels,
    network_policy,
    on_gpu,
    ranks_per_pod,
    some,
    template,
)
from phalanx.deploy.serve_flags import ServeFlags, require_portable
from phalanx.errors import OptionError
from phalanx.metrics import PICKER_PREFIX

LWS = "leaderworkerset.sigs.k8s.io"
SCRAPE_INTERVAL = "15s"
SCRAPERS = ("service_monitor", "autoscale", "endpoint_picker")
"""Options whose objects have /metrics read by another program, which knows no API key."""
KEDA_POLLING_SECONDS = 15
SCALE_DOWN_SECONDS = 360
"""Without a longer queue, until a server is taken away: longer than the gaps of usual traffic, since a start takes minutes."""


class ResolvedK8sOptions(NamedTuple):
    """K8sOptions without None for what a manifest must say, and the reasons of automatic choices."""

    options: K8sOptions
    reasons: tuple[str, ...]


def resolve(flags: ServeFlags, options: K8sOptions) -> ResolvedK8sOptions:
    """Replace what is chosen automatically. Raises OptionError or LayoutError for options that make no working manifest."""
    _require_consistent(flags, options)
    require_portable(flags, folder=in_folder(options))
    engine = flags.engine
    source = _source(flags, options)
    budget = startup(engine, source)
    reasons = [f"startup_seconds: {budget.reason}"] if options.startup_seconds is None else []
    gpu, ranks = on_gpu(flags), ranks_per_pod(flags)
    name = options.name or name_of(engine.model)
    token = options.cluster_token_secret
    if engine.nnodes > 1 and not engine.insecure_cluster and options.with_ == "none":
        token = token or f"{name}-cluster-token"
    disruption_budget = options.disruption_budget
    if options.with_ == "ray" and engine.nnodes > 1 and disruption_budget:
        disruption_budget = False
        reasons.append(f"disruption_budget: {ray_service.WITHOUT_BUDGET}")
    if options.shm_size is None:
        reasons.append(f"shm_size: {ranks} ranks on {'GPUs' if gpu else 'CPU'}")
    values = {
        "name": name, "startup_seconds": options.startup_seconds or budget.seconds, "cluster_token_secret": token,
        "shm_size": options.shm_size or shm_quantity(ranks, gpu=gpu),
        "pod_replicas": options.pod_replicas or (1 if options.autoscale == "none" else None),
        "disruption_budget": disruption_budget,
    }  # fmt: skip
    resolved = options.model_copy(update=values)
    _require_sizes(flags, resolved)
    return ResolvedK8sOptions(resolved, tuple(reasons))


def name_of(model: str) -> str:
    """The name of the objects for a model, as "meta-llama-3-70b" for "meta-llama/Meta-Llama-3-70B"."""
    stem = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rpartition("/")[2].lower()).strip("-")
    stem = stem if stem[:1].isalpha() else f"model-{stem}"
    return stem[:LONGEST_NAME].strip("-")


def _source(flags: ServeFlags, options: K8sOptions) -> str:
    """Where the weights come from, as `budget` names it."""
    if options.model_claim is not None:
        return "a claim"
    if options.model_host_path is not None:
        return "a folder of the node"
    return "" if flags.engine.model == "demo" else "the Hub"


def _require_consistent(flags: ServeFlags, options: K8sOptions) -> None:
    engine = flags.engine
    if options.with_ == "ray":
        ray_service.require_possible(flags, options)
    for one, other in (("model_claim", "model_host_path"), ("cache_claim", "cache_host_path")):
        if getattr(options, one) is not None and getattr(options, other) is not None:
            raise OptionError(f"{one} and {other} exclude each other", next="give one of them")
    several, gpu, scaled = engine.nnodes > 1, on_gpu(flags), options.autoscale != "none"
    needs = {
        "cluster_token_secret": (several and not engine.insecure_cluster, "nnodes > 1 without insecure_cluster"),
        "exclusive_topology": (several, "nnodes > 1"),
        "gpu_resource": (gpu and not options.dra, "GPUs, without dra"), "dra": (gpu, "GPUs"), "device_class": (options.dra, "dra"),
        "pod_replicas": (not scaled, "autoscale none: a scaler sets the number, within min_replicas and max_replicas"),
        "min_replicas": (scaled, "autoscale"), "max_replicas": (scaled, "autoscale"), "queue_target": (scaled, "autoscale"),
        "prometheus_url": (options.autoscale == "keda", "autoscale keda"),
        "endpoint_picker_port": (options.endpoint_picker is not None, "endpoint_picker"),
    }  # fmt: skip
    for name, (holds, need) in needs.items():
        if not holds and getattr(options, name) != K8sOptions.model_fields[name].default:
            raise OptionError(f"{name} has no effect", why=f"it needs {need}", next="leave it out")
    if options.autoscale == "keda" and options.prometheus_url is None:
        raise OptionError("autoscale=keda needs prometheus_url", why="KEDA asks Prometheus for the waiting requests")
    if options.min_replicas > options.max_replicas:
        raise OptionError(f"min_replicas={options.min_replicas} is above max_replicas={options.max_replicas}")
    if options.endpoint_picker is not None and flags.serving.metrics_prefix != PICKER_PREFIX:
        raise OptionError(
            f"endpoint_picker needs metrics_prefix={PICKER_PREFIX}", why="the picker reads metrics by these names",
            next=f"add --metrics_prefix {PICKER_PREFIX}",
        )  # fmt: skip
    scraper = next((name for name in SCRAPERS if getattr(options, name) != K8sOptions.model_fields[name].default), None)
    if scraper is not None and options.api_key_secret is not None and not flags.serving.open_metrics:
        raise OptionError(
            f"{scraper} cannot read /metrics with api_key_secret", why="its requests have no API key: each would be refused (401)",
            next="add --open_metrics",
        )  # fmt: skip
    for name in ("env", "node_selector"):
        require_once(name, getattr(options, name))


def _require_sizes(flags: ServeFlags, options: K8sOptions) -> None:
    assert options.startup_seconds is not None
    assert options.shm_size is not None
    start_timeout = flags.engine.start_timeout
    if options.startup_seconds % PROBE_SECONDS:
        raise OptionError(
            f"startup_seconds={options.startup_seconds} is no multiple of {PROBE_SECONDS}", why="the probe has this period"
        )
    if options.startup_seconds < start_timeout:
        raise OptionError(
            f"startup_seconds={options.startup_seconds} is below start_timeout={start_timeout:g}",
            why="the pod would be ended before the engine says what it waits for", next="raise it, or lower start_timeout",
        )  # fmt: skip
    require_memory(options.memory, options.shm_size, flags.engine)


def objects(flags: ServeFlags, options: K8sOptions) -> list[Fields]:
    """The objects of a server. options: of `resolve`."""
    result: list[Fields] = [_claim_template(flags, options)] if options.dra else []
    if options.with_ == "ray":
        result.append(ray_service.service(flags, options, _meta(options)))
        return result + ray_service.around(flags, options, _meta(options), _meta(options, "-api"))
    pods = {"matchLabels": labels(_name(options))}
    result += [_workload(flags, options), _service(flags, options)]
    if options.disruption_budget:
        result.append(disruption_budget(_meta(options), {"maxUnavailable": 1, "selector": pods}))
    if options.network_policy:
        result += _policies(flags, options)
    if options.service_monitor:
        endpoint = {"port": "http", "path": "/metrics", "interval": SCRAPE_INTERVAL}
        # The job is then "phalanx", which dashboards/alerts.yaml selects.
        spec = {"jobLabel": "app.kubernetes.io/name", "selector": pods, "endpoints": [endpoint]}
        result.append(_object("monitoring.coreos.com/v1", "ServiceMonitor", _meta(options), spec))
    if options.autoscale != "none":
        result.append(_scaler(flags, options))
    if options.endpoint_picker is not None:
        port = {"number": options.endpoint_picker_port}
        pool = {
            "selector": {"matchLabels": _servers(flags, options)}, "targetPorts": [{"number": flags.serving.port}],
            "endpointPickerRef": {"name": options.endpoint_picker, "port": port, "failureMode": "FailOpen"},
        }  # fmt: skip
        result.append(_object("inference.networking.k8s.io/v1", "InferencePool", _meta(options), pool))
    return result


def manifest(flags: ServeFlags, options: K8sOptions) -> tuple[list[Fields], list[str]]:
    """The objects, and comments with the reasons of automatic choices and the Secrets to create. Raises as `resolve`."""
    resolved = resolve(flags, options)
    return objects(flags, resolved.options), comments(flags, resolved)


def text(flags: ServeFlags, options: K8sOptions) -> str:
    """The manifest as YAML."""
    documents, lines = manifest(flags, options)
    return yaml_text.dumps(documents, comments=lines)


def comments(flags: ServeFlags, resolved: ResolvedK8sOptions) -> list[str]:
    """What a reader of the manifest must know: commands that create its Secrets, reasons."""
    options, lines = resolved.options, []
    if options.with_ == "ray":
        lines.append("needs: an image with the extra ray: docker build --build-arg EXTRAS=gpu,ray")
    namespace = f" -n {options.namespace}" if options.namespace else ""
    for option, key in SECRET_KEYS.items():
        if (secret := getattr(options, option)) is not None:
            source = "$(openssl rand -hex 32)" if option == "cluster_token_secret" else "..."
            lines.append(f'needs: kubectl{namespace} create secret generic {secret} --from-literal={key}="{source}"')
    pods = flags.engine.nnodes * (options.pod_replicas or options.max_replicas)
    if options.cache_claim is not None and pods > 1:
        lines.append(f"needs: the claim {options.cache_claim} with access mode ReadWriteMany, for {pods} pods")
    short = {long: each for each, long in ALIASES.items()}
    for line in resolved.reasons:
        name, _, reason = line.partition(": ")
        lines.append(f"{short.get(name, name)} = {getattr(options, name)}: {reason}")
    return lines


def _name(options: K8sOptions) -> str:
    assert options.name is not None
    return options.name


def _meta(options: K8sOptions, suffix: str = "", annotations: dict[str, str] | None = None) -> Fields:
    name = _name(options)
    return {
        "name": name + suffix, **some(namespace=options.namespace), "labels": labels(name), **some(annotations=annotations)
    }  # fmt: skip


def _object(api: str, kind: str, metadata: Fields, spec: Fields) -> Fields:
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _servers(flags: ServeFlags, options: K8sOptions) -> dict[str, str]:
    """Labels of the pods that answer requests: the leader of each group."""
    name = _name(options)
    return {f"{LWS}/name": name, f"{LWS}/worker-index": "0"} if flags.engine.nnodes > 1 else labels(name)


WORKLOADS = {True: ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"), False: ("apps/v1", "Deployment")}
"""apiVersion and kind of a server, by whether it has several nodes."""


def _workload(flags: ServeFlags, options: K8sOptions) -> Fields:
    assert options.startup_seconds is not None
    several = flags.engine.nnodes > 1
    replicas = some(replicas=options.pod_replicas)
    rolling = {"maxSurge": options.max_surge, "maxUnavailable": 0 if options.max_surge else 1}
    if not several:
        spec = {
            **replicas,
            # Kubernetes' 600 s would call the start of a large model a failure.
            "progressDeadlineSeconds": options.startup_seconds + 60,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
            "selector": {"matchLabels": labels(_name(options))}, "template": template(flags, options, "single"),
        }  # fmt: skip
        return _object(*WORKLOADS[False], _meta(options), spec)
    annotations = {f"{LWS}/exclusive-topology": options.exclusive_topology} if options.exclusive_topology else None
    spec = {
        **replicas,
        # A leader is ready only when its followers have joined, so waiting for it would never end.
        "startupPolicy": "LeaderCreated", "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": {
            "size": flags.engine.nnodes, "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": template(flags, options, "leader"), "workerTemplate": template(flags, options, "follower"),
        },
    }  # fmt: skip
    return _object(*WORKLOADS[True], _meta(options, annotations=annotations), spec)


def _service(flags: ServeFlags, options: K8sOptions) -> Fields:
    """In front of the servers. Its name has a suffix: a LeaderWorkerSet makes a headless Service of its own name."""
    port = {"name": "http", "port": flags.serving.port, "targetPort": "http", "protocol": "TCP"}
    return _object("v1", "Service", _meta(options, "-api"), {"selector": _servers(flags, options), "ports": [port]})


def _claim_template(flags: ServeFlags, options: K8sOptions) -> Fields:
    devices = {"deviceClassName": options.device_class, "count": ranks_per_pod(flags)}
    spec = {"spec": {"devices": {"requests": [{"name": "gpus", "exactly": devices}]}}}
    return _object("resource.k8s.io/v1", "ResourceClaimTemplate", _meta(options, "-gpus"), spec)


def _policies(flags: ServeFlags, options: K8sOptions) -> list[Fields]:
    """The API port is open to everybody; every port of a group, to the pods of that group.

    A policy cannot say "of the same group", so that each group has one: as many as there can be during an update.
    """
    api = [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    policies = [network_policy(_meta(options, "-api"), {"matchLabels": _servers(flags, options)}, api)]
    if flags.engine.nnodes == 1:
        return policies
    for index in range((options.pod_replicas or options.max_replicas) + options.max_surge):
        group = {"matchLabels": {f"{LWS}/name": _name(options), f"{LWS}/group-index": str(index)}}
        policies.append(network_policy(_meta(options, f"-group-{index}"), group, [{"from": [{"podSelector": group}]}]))
    return policies


def _scaler(flags: ServeFlags, options: K8sOptions) -> Fields:
    api, kind = WORKLOADS[flags.engine.nnodes > 1]
    target = {"apiVersion": api, "kind": kind, "name": _name(options)}
    metric = f"{flags.serving.metrics_prefix}:num_requests_waiting"
    if options.autoscale == "hpa":
        goal = {"type": "AverageValue", "averageValue": str(options.queue_target)}
        spec = {
            "scaleTargetRef": target, "minReplicas": options.min_replicas, "maxReplicas": options.max_replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": metric}, "target": goal}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": SCALE_DOWN_SECONDS}},
        }  # fmt: skip
        return _object("autoscaling/v2", "HorizontalPodAutoscaler", _meta(options), spec)
    labels_of_service = {"service": f"{_name(options)}-api", **some(namespace=options.namespace)}
    selector = ",".join(f'{label}="{value}"' for label, value in labels_of_service.items())
    trigger = {
        "serverAddress": options.prometheus_url, "query": f"sum({metric}{{{selector}}})", "threshold": str(options.queue_target)
    }  # fmt: skip
    spec = {
        "scaleTargetRef": target, "minReplicaCount": options.min_replicas, "maxReplicaCount": options.max_replicas,
        "pollingInterval": KEDA_POLLING_SECONDS, "cooldownPeriod": SCALE_DOWN_SECONDS,
        "triggers": [{"type": "prometheus", "metadata": trigger}],
    }  # fmt: skip
    return _object("keda.sh/v1alpha1", "ScaledObject", _meta(options), spec)
