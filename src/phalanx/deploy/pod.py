# SPDX-License-Identifier: Apache-2.0
"""The pods of a server: one for a single node; a leader and its followers for several."""

from __future__ import annotations

import math
from typing import Literal

from phalanx.deploy import objects as k
from phalanx.deploy.budget import PROBE_SECONDS
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.serve_flags import CACHE, KERNELS, MODELS_MOUNT, ServeFlags, arguments

Role = Literal["single", "leader", "follower"]

SECRETS = "/etc/phalanx"
PRE_STOP_SECONDS = 5
"""Until every load balancer has taken the pod out: only then does the server begin to refuse requests."""
CLOSE_SECONDS = 30
"""For the end of a server after its drain: streams that send their last event, the engine, the ranks (`serve.lifecycle`)."""
SECRET_KEYS = {"api_key_secret": "api-key", "cluster_token_secret": "cluster-token", "hub_token_secret": "hub-token"}
"""Option -> key of the Secret that it names."""
NODE_VARIABLES = {"node_rank": "$(LWS_WORKER_INDEX)", "master_addr": "$(LWS_LEADER_ADDRESS)"}
"""Options of the pods of a group -> what the controller of LeaderWorkerSets sets in their containers."""
SET_BY_MANIFEST = {"host", "kernel_cache_dir", "api_key_file", "cluster_token_file", "master_addr_timeout", *NODE_VARIABLES}


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


def template(flags: ServeFlags, options: K8sOptions, role: Role) -> k.PodTemplate:
    """The pods of a role. options: with every automatic choice replaced, as by `k8s.resolve`."""
    return pod(options, _container(flags, options, role), grace=grace_seconds(flags, role), gpus=on_gpu(flags))


def pod(options: K8sOptions, container: k.Container, *, grace: int, gpus: bool) -> k.PodTemplate:
    """A pod of one container. grace: from the begin of its end to SIGKILL, in seconds. gpus: it gets those of its ranks."""
    assert options.name is not None
    tolerations = [k.Toleration(key=options.gpu_resource)] if gpus else None
    claims = [k.PodClaim(name="gpus", resource_claim_template_name=f"{options.name}-gpus")] if options.dra and gpus else None
    spec = k.PodSpec(
        termination_grace_period_seconds=grace,
        image_pull_secrets=[k.ClaimName(name=options.image_pull_secret)] if options.image_pull_secret else None,
        runtime_class_name=options.runtime_class,
        node_selector=dict(each.split("=", 1) for each in options.node_selector) or None,
        tolerations=tolerations, containers=[container], volumes=_volumes(options), resource_claims=claims,
    )  # fmt: skip
    return k.PodTemplate(metadata=k.Meta(labels=labels(options.name)), spec=spec)


def _container(flags: ServeFlags, options: K8sOptions, role: Role) -> k.Container:
    assert options.startup_seconds is not None
    starts = options.startup_seconds // PROBE_SECONDS
    return k.Container(
        name="phalanx", image=options.image, command=["phalanx", "serve"], args=_arguments(flags, options, role),
        env=environment(options), ports=[k.ContainerPort(name="http", container_port=flags.serving.port)],
        resources=resources(flags, options, gpus=on_gpu(flags)),
        startup_probe=_probe("/ready", PROBE_SECONDS, 5, starts), liveness_probe=_probe("/live", 10, 5, 3),
        readiness_probe=_probe("/ready", 2, 2, 2),
        lifecycle=k.ContainerLifecycle(pre_stop=k.Handler(sleep=k.Sleep(seconds=pre_stop_seconds(flags, role)))),
        security_context=k.ContainerSecurity(), volume_mounts=mounts(options),
    )  # fmt: skip


def _probe(path: str, period: int, timeout: int, failures: int) -> k.Probe:
    return k.Probe(
        http_get=k.HttpGet(path=path, port="http"), period_seconds=period, timeout_seconds=timeout, failure_threshold=failures
    )


def _arguments(flags: ServeFlags, options: K8sOptions, role: Role) -> list[str]:
    own = {"host": "0.0.0.0", "kernel_cache_dir": KERNELS}
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


def environment(options: K8sOptions) -> list[k.EnvVar]:
    # HOME: what libraries write there (the driver's cache of compiled code) must have a place on a read-only root.
    variables = [k.EnvVar(name="HOME", value="/tmp"), k.EnvVar(name="HF_HOME", value=f"{CACHE}/huggingface")]
    if options.hub_token_secret is not None:
        key = k.SecretKey(name=options.hub_token_secret, key=SECRET_KEYS["hub_token_secret"])
        variables.append(k.EnvVar(name="HF_TOKEN", value_from=k.ValueFrom(secret_key_ref=key)))
    pairs = [each.split("=", 1) for each in options.env]
    return [*variables, *(k.EnvVar(name=name, value=value.replace("$", "$$")) for name, value in pairs)]


def resources(flags: ServeFlags, options: K8sOptions, *, gpus: bool) -> k.Resources | None:
    limits, requests = {}, {}
    if options.cpu is not None:
        requests["cpu"] = options.cpu
    if options.memory is not None:
        limits["memory"] = requests["memory"] = options.memory
    if gpus and not options.dra:
        limits[options.gpu_resource] = str(ranks_per_pod(flags))
    claims = [k.ClaimName(name="gpus")] if options.dra and gpus else None
    if not (limits or requests or claims):
        return None
    return k.Resources(limits=limits or None, requests=requests or None, claims=claims)


def mounts(options: K8sOptions) -> list[k.Mount]:
    mounts = [
        k.Mount(name="tmp", mount_path="/tmp"), k.Mount(name="cache", mount_path=CACHE), k.Mount(name="shm", mount_path="/dev/shm")
    ]  # fmt: skip
    if in_folder(options):
        mounts.append(k.Mount(name="models", mount_path=MODELS_MOUNT, read_only=True))
    names = ("api-key", options.api_key_secret), ("cluster-token", options.cluster_token_secret)
    return mounts + [k.Mount(name=name, mount_path=f"{SECRETS}/{name}", read_only=True) for name, secret in names if secret]


def _volumes(options: K8sOptions) -> list[k.Volume]:
    cache = k.Volume(name="cache", empty_dir=k.EmptyDir())
    if options.cache_claim is not None:
        cache = k.Volume(name="cache", persistent_volume_claim=k.VolumeClaim(claim_name=options.cache_claim))
    elif options.cache_host_path is not None:
        cache = k.Volume(name="cache", host_path=k.HostPath(path=options.cache_host_path, type="DirectoryOrCreate"))
    volumes = [
        k.Volume(name="tmp", empty_dir=k.EmptyDir()), cache,
        k.Volume(name="shm", empty_dir=k.EmptyDir(medium="Memory", size_limit=options.shm_size)),
    ]  # fmt: skip
    if options.model_claim is not None:
        claim = k.VolumeClaim(claim_name=options.model_claim, read_only=True)
        volumes.append(k.Volume(name="models", persistent_volume_claim=claim))
    elif options.model_host_path is not None:
        volumes.append(k.Volume(name="models", host_path=k.HostPath(path=options.model_host_path, type="Directory")))
    for option, name in (("api_key_secret", "api-key"), ("cluster_token_secret", "cluster-token")):
        if (secret := getattr(options, option)) is not None:
            item = k.KeyToPath(key=SECRET_KEYS[option], path=SECRET_KEYS[option])
            volumes.append(k.Volume(name=name, secret=k.SecretVolume(secret_name=secret, items=[item])))
    return volumes
