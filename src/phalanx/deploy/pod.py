# SPDX-License-Identifier: Apache-2.0
"""The pods of a server: one for a single node; a leader and its followers for several."""

from __future__ import annotations

import math
from typing import Any, Literal

from phalanx.deploy.budget import PROBE_SECONDS
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.serve_flags import CACHE, KERNELS, MODELS_MOUNT, ServeFlags, arguments

Role = Literal["single", "leader", "follower"]
Fields = dict[str, Any]
"""Of an object of the API: Kubernetes 1.30 to 1.37, LeaderWorkerSet v1, InferencePool v1, ServiceMonitor v1, ScaledObject v1alpha1,
RayService v1. Tests hold each against its schema."""
USER = 65534
"""The user `nobody`: of the image, of the pods, and of the files that they write."""

SECRETS = "/etc/phalanx"
PRE_STOP_SECONDS = 5
"""Until every load balancer has taken the pod out: only then does the server begin to refuse requests."""
CLOSE_SECONDS = 30
"""For the end of a server after its drain: streams that send their last event, the engine, the ranks (`serve.lifecycle`)."""
SECRET_KEYS = {"api_key_secret": "api-key", "cluster_token_secret": "cluster-token", "hub_token_secret": "hub-token"}
"""Option -> key of the Secret that it names."""
GPU_TAINT = "nvidia.com/gpu"
NODE_VARIABLES = {"node_rank": "$(LWS_WORKER_INDEX)", "master_addr": "$(LWS_LEADER_ADDRESS)"}
"""Options of the pods of a group -> what the controller of LeaderWorkerSets sets in their containers."""


def labels(name: str) -> dict[str, str]:
    """Of every object and pod of a server."""
    return {"app.kubernetes.io/name": "phalanx", "app.kubernetes.io/instance": name}


def ranks_per_pod(flags: ServeFlags) -> int:
    """Of all replicas, which are on one host."""
    return flags.engine.replicas * flags.engine.world_size // flags.engine.nnodes


def on_gpu(flags: ServeFlags) -> bool:
    """Whether pods get GPUs: unless the options ask for the CPU."""
    return flags.engine.device != "cpu"


def drain_seconds(flags: ServeFlags) -> int:
    return math.ceil(flags.serving.shutdown_timeout)


def pre_stop_seconds(flags: ServeFlags, role: Role) -> int:
    """Of the hook before SIGTERM. Followers get theirs when the leader does, and compute until it has drained: their hook lasts as
    long. They end earlier, when the leader tells them to."""
    return PRE_STOP_SECONDS + (drain_seconds(flags) + CLOSE_SECONDS if role == "follower" else 0)


def grace_seconds(flags: ServeFlags, role: Role) -> int:
    """From the begin of the hook to SIGKILL: longer than the hook and the drain, for followers than the hook and their own end."""
    return pre_stop_seconds(flags, role) + (0 if role == "follower" else drain_seconds(flags)) + CLOSE_SECONDS


def some(**fields: Any) -> Fields:
    """The fields that are not None or empty."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def template(flags: ServeFlags, options: K8sOptions, role: Role) -> Fields:
    """The pods of a role. options: with every automatic choice replaced, as by `k8s.resolve`."""
    return pod(options, _container(flags, options, role), grace=grace_seconds(flags, role), gpus=on_gpu(flags))


def pod(options: K8sOptions, container: Fields, *, grace: int, gpus: bool) -> Fields:
    """A pod of one container. grace: from the begin of its end to SIGKILL, in seconds. gpus: it gets those of its ranks."""
    assert options.name is not None
    # Nodes with GPUs are tainted nvidia.com/gpu, whatever the resource is called: a part of a GPU has a name of its own.
    keys = dict.fromkeys((options.gpu_resource, GPU_TAINT)) if gpus else ()
    spec = {
        "enableServiceLinks": False, "automountServiceAccountToken": False, "terminationGracePeriodSeconds": grace,
        **some(
            imagePullSecrets=[{"name": options.image_pull_secret}] if options.image_pull_secret else None,
            runtimeClassName=options.runtime_class, nodeSelector=dict(each.split("=", 1) for each in options.node_selector),
            tolerations=[{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys],
        ),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **some(initContainers=_init_containers(options)), "containers": [container], "volumes": _volumes(options),
    }  # fmt: skip
    if options.dra and gpus:
        spec["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": f"{options.name}-gpus"}]
    return {"metadata": {"labels": labels(options.name)}, "spec": spec}


def security(**capabilities: list[str]) -> Fields:
    """Of a container."""
    return {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], **capabilities}
    }  # fmt: skip


def _init_containers(options: K8sOptions) -> list[Fields]:
    """One that gives a new cache_host_path to the server's user: kubelet makes it for root. Any other folder stays as it is."""
    if options.cache_host_path is None:
        return []
    hand_over = ["find", CACHE, "-maxdepth", "0", "-user", "0", "-empty", "-exec", "chown", f"{USER}:{USER}", "{}", "+"]
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0, **security(add=["CHOWN"])}
    mount = {"name": "cache", "mountPath": CACHE}
    return [{"name": "cache", "image": options.image, "command": hand_over, "securityContext": root, "volumeMounts": [mount]}]


def _container(flags: ServeFlags, options: K8sOptions, role: Role) -> Fields:
    assert options.startup_seconds is not None
    starts = options.startup_seconds // PROBE_SECONDS
    return {
        "name": "phalanx", "image": options.image, "command": ["phalanx", "serve"], "args": _arguments(flags, options, role),
        "env": environment(options), "ports": [{"name": "http", "containerPort": flags.serving.port}],
        **some(resources=resources(flags, options, gpus=on_gpu(flags))),
        "startupProbe": _probe("/ready", PROBE_SECONDS, 5, starts), "livenessProbe": _probe("/live", 10, 5, 3),
        "readinessProbe": _probe("/ready", 2, 2, 2),
        "lifecycle": {"preStop": {"sleep": {"seconds": pre_stop_seconds(flags, role)}}},
        "securityContext": security(), "volumeMounts": mounts(options),
    }  # fmt: skip


def _probe(path: str, period: int, timeout: int, failures: int) -> Fields:
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}


def _arguments(flags: ServeFlags, options: K8sOptions, role: Role) -> list[str]:
    own = {"host": "::", "kernel_cache_dir": KERNELS}
    if options.api_key_secret is not None:
        own["api_key_file"] = f"{SECRETS}/api-key/{SECRET_KEYS['api_key_secret']}"
    if role != "single":
        own |= NODE_VARIABLES
        own["master_addr_timeout"] = f"{flags.engine.start_timeout:g}"  # the leader's name is published after its start
    if options.cluster_token_secret is not None:
        own["cluster_token_file"] = f"{SECRETS}/cluster-token/{SECRET_KEYS['cluster_token_secret']}"
    return arguments(flags, folder=in_folder(options), own=own)


def in_folder(options: K8sOptions) -> bool:
    """Whether MODEL is a folder of a claim or of the node."""
    return options.model_claim is not None or options.model_host_path is not None


def environment(options: K8sOptions) -> list[Fields]:
    # HOME: what libraries write there (the driver's cache of compiled code) must have a place on a read-only root.
    variables: list[Fields] = [{"name": "HOME", "value": "/tmp"}, {"name": "HF_HOME", "value": f"{CACHE}/huggingface"}]
    if options.hub_token_secret is not None:
        key = {"name": options.hub_token_secret, "key": SECRET_KEYS["hub_token_secret"]}
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    pairs = [each.split("=", 1) for each in options.env]
    return [*variables, *({"name": name, "value": value.replace("$", "$$")} for name, value in pairs)]


def resources(flags: ServeFlags, options: K8sOptions, *, gpus: bool) -> Fields:
    limits, memory = {}, some(memory=options.memory)
    if gpus and not options.dra:
        limits[options.gpu_resource] = str(ranks_per_pod(flags))
    claims = [{"name": "gpus"}] if options.dra and gpus else None
    return some(limits=memory | limits, requests=some(cpu=options.cpu) | memory, claims=claims)


def mounts(options: K8sOptions) -> list[Fields]:
    places = {"tmp": "/tmp", "cache": CACHE, "shm": "/dev/shm"}
    names = ("api-key", options.api_key_secret), ("cluster-token", options.cluster_token_secret)
    fixed = {"models": MODELS_MOUNT} if in_folder(options) else {}
    fixed |= {name: f"{SECRETS}/{name}" for name, secret in names if secret}
    return [
        *({"name": name, "mountPath": path} for name, path in places.items()),
        *({"name": name, "mountPath": path, "readOnly": True} for name, path in fixed.items()),
    ]


def _volumes(options: K8sOptions) -> list[Fields]:
    cache: Fields = {"emptyDir": {}}
    if options.cache_claim is not None:
        cache = {"persistentVolumeClaim": {"claimName": options.cache_claim}}
    elif options.cache_host_path is not None:
        cache = {"hostPath": {"path": options.cache_host_path, "type": "DirectoryOrCreate"}}
    volumes: list[Fields] = [
        {"name": "tmp", "emptyDir": {}}, {"name": "cache", **cache},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}},
    ]  # fmt: skip
    if options.model_claim is not None:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": options.model_claim, "readOnly": True}})
    elif options.model_host_path is not None:
        volumes.append({"name": "models", "hostPath": {"path": options.model_host_path, "type": "Directory"}})
    for option, name in (("api_key_secret", "api-key"), ("cluster_token_secret", "cluster-token")):
        if (secret := getattr(options, option)) is not None:
            item = {"key": SECRET_KEYS[option], "path": SECRET_KEYS[option]}
            volumes.append({"name": name, "secret": {"secretName": secret, "items": [item], "defaultMode": 0o440}})
    return volumes


def disruption_budget(metadata: Fields, spec: Fields) -> Fields:
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


def network_policy(metadata: Fields, pods: Fields, ingress: list[Fields]) -> Fields:
    """Who may reach these pods."""
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
