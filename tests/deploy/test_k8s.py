# SPDX-License-Identifier: Apache-2.0
"""Manifests say what a server needs: its probes, its drain, who may reach it, where it may write; odd options are errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy import k8s
from phalanx.deploy.options import K8sOptions, quantity
from phalanx.deploy.serve_flags import ServeFlags, read_arguments
from phalanx.errors import LayoutError, OptionError, PhalanxError, UnknownOption
from phalanx.serve import lifecycle
from tests.support.deploy_options import deployment

ENGINE = set(EngineOptions.model_fields)


def flags(**values: Any) -> ServeFlags:
    engine = {name: value for name, value in values.items() if name in ENGINE}
    serving = {name: value for name, value in values.items() if name not in ENGINE}
    return ServeFlags(EngineOptions.of(**{"model": "demo", **engine}), ServeOptions.of(**serving))


def documents(server: ServeFlags | None = None, **options: Any) -> dict[str, dict[str, Any]]:
    """The objects by kind; several network policies by name, too."""
    text = k8s.text(server or flags(), K8sOptions.of(**{"image": "phalanx:1", **options}))
    objects = list(yaml.safe_load_all(text))
    return {one["kind"]: one for one in objects} | {
        one["metadata"]["name"]: one for one in objects if one["kind"] == "NetworkPolicy"
    }


def container(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"]["template"]["spec"]["containers"][0]


TWO_NODES = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "nnodes": 2}


def test_one_node_is_a_deployment_with_a_service():
    objects = documents(flags(model="meta-llama/Meta-Llama-3-70B", tensor_parallel_size=4, max_batch_size=128, dtype="fp8"))
    deployment = objects["Deployment"]
    assert deployment["metadata"]["name"] == "meta-llama-3-70b"
    assert container(deployment)["command"] == ["phalanx", "serve"]
    arguments = container(deployment)["args"]
    assert arguments[0] == "meta-llama/Meta-Llama-3-70B"
    assert {"--tensor_parallel_size=4", "--max_batch_size=128", "--dtype=fp8", "--host=::"} <= set(arguments)
    assert container(deployment)["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    pods = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pods.items()
    assert objects["Service"]["spec"]["selector"].items() <= pods.items()
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


def test_several_nodes_are_a_leader_worker_set():
    objects = documents(flags(**TWO_NODES), pod_replicas=2)
    workload = objects["LeaderWorkerSet"]["spec"]
    assert workload["startupPolicy"] == "LeaderCreated"
    group = workload["leaderWorkerTemplate"]
    assert group["size"] == 2
    leader, follower = (group[name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
    for pod in (leader, follower):
        arguments = pod["containers"][0]["args"]
        assert {"--nnodes=2", "--node_rank=$(LWS_WORKER_INDEX)", "--master_addr=$(LWS_LEADER_ADDRESS)"} <= set(arguments)
        assert "--master_addr_timeout=600" in arguments  # a cluster publishes the leader's name late
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
        assert "--cluster_token_file=/etc/phalanx/cluster-token/cluster-token" in arguments
        assert {"name": "cluster-token", "mountPath": "/etc/phalanx/cluster-token", "readOnly": True} in pod["containers"][0][
            "volumeMounts"
        ]
        token = next(volume for volume in pod["volumes"] if volume["name"] == "cluster-token")
        assert token["secret"]["secretName"] == "demo-cluster-token"
    for name, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/live")):
        assert [pod["containers"][0][name]["httpGet"]["path"] for pod in (leader, follower)] == [path, path]
    # Requests go to leaders only, and not through the headless service that the controller makes under the set's own name.
    assert objects["Service"]["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert objects["Service"]["metadata"]["name"] != objects["LeaderWorkerSet"]["metadata"]["name"]


def test_ports_of_ranks_are_open_within_a_group_only():
    objects = documents(flags(**TWO_NODES), pod_replicas=2, max_surge=1)
    api = objects["demo-api"]["spec"]
    assert api["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    groups = [objects[f"demo-group-{index}"]["spec"] for index in range(3)]  # two, and one more during an update
    for index, spec in enumerate(groups):
        assert spec["podSelector"]["matchLabels"]["leaderworkerset.sigs.k8s.io/group-index"] == str(index)
        assert spec["ingress"] == [{"from": [{"podSelector": spec["podSelector"]}]}]
    assert "demo-group-3" not in objects
    assert list(documents(network_policy=False)) == ["Deployment", "Service", "PodDisruptionBudget"]
    scaled = documents(flags(**TWO_NODES), autoscale="hpa", max_replicas=3, max_surge=0)
    assert "demo-group-2" in scaled
    assert "demo-group-3" not in scaled


@pytest.mark.parametrize("sizes", [{}, TWO_NODES])
@pytest.mark.parametrize("shutdown_timeout", [0.0, 30.0, 99.5])
def test_pods_outlive_their_drain(sizes, shutdown_timeout):
    """The kubelet counts the grace from the begin of the hook. The server may drain for shutdown_timeout, and then needs what
    `serve.lifecycle` allows itself. Followers compute until the leader is done."""
    objects = documents(flags(**sizes, shutdown_timeout=shutdown_timeout))
    end = 3 * lifecycle.LAST_EVENT_SECONDS + 2 * lifecycle.CLOSE_SECONDS
    if not sizes:
        pods = [objects["Deployment"]["spec"]["template"]["spec"]]
    else:
        group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        pods = [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
    hooks = [pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] for pod in pods]
    graces = [pod["terminationGracePeriodSeconds"] for pod in pods]
    assert hooks[0] >= 5
    assert graces[0] > hooks[0] + shutdown_timeout + end
    if sizes:
        assert hooks[1] > hooks[0] + shutdown_timeout + end
        assert graces[1] > hooks[1] + end


def test_a_container_writes_where_it_may():
    pod = documents(api_key_secret="key")["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"] | {"fsGroupChangePolicy": ""} == {
        "runAsNonRoot": True, "runAsUser": 65534, "runAsGroup": 65534, "fsGroup": 65534, "fsGroupChangePolicy": "",
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    (one,) = pod["containers"]
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert one["securityContext"] == security
    writable = {mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/cache", "/dev/shm"}
    places = {variable["name"]: variable["value"] for variable in one["env"]}
    assert places == {"HOME": "/tmp", "HF_HOME": "/cache/huggingface"}
    assert "--kernel_cache_dir=/cache/kernels" in one["args"]
    # Variables of a Service whose name begins with "phalanx-" would be unknown options.
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False


def test_shared_memory_is_in_memory_and_large_enough():
    def size(server: ServeFlags, **options: Any) -> str:
        volumes = documents(server, **options)["Deployment"]["spec"]["template"]["spec"]["volumes"]
        shm = next(volume for volume in volumes if volume["name"] == "shm")["emptyDir"]
        assert shm["medium"] == "Memory"
        return str(shm["sizeLimit"])

    assert quantity(size(flags(tensor_parallel_size=8))) >= 8 * (128 << 20)
    assert quantity(size(flags(tensor_parallel_size=8, device="cpu"))) >= 8 * (16 << 20)
    assert size(flags(), shm_size="3Gi") == "3Gi"


@pytest.mark.parametrize(
    ("server", "options", "seconds"),
    [
        ({}, {}, 660),  # start_timeout is 600
        ({"start_timeout": 60.0}, {}, 600),
        ({"start_timeout": 1000.0}, {}, 1060),
        ({}, {"startup_seconds": 900}, 900),
        ({"model": "meta-llama/Meta-Llama-3-70B"}, {}, 4420),  # 141.1 GB from the Hub
        ({"model": "llama-3-70b"}, {"model_claim": "c"}, 1880),
        ({"model": "llama-3-70b"}, {"model_host_path": "/data"}, 660),
        ({"model": "org/unknown"}, {}, 3600),
        ({"model": "org/unknown", "load_format": "dummy"}, {}, 660),
    ],
)
def test_time_for_the_start(server, options, seconds):
    deployment = documents(flags(**server), **options)["Deployment"]
    probe = container(deployment)["startupProbe"]
    assert probe["httpGet"] == {"path": "/ready", "port": "http"}
    assert probe["periodSeconds"] * probe["failureThreshold"] == seconds
    assert deployment["spec"]["progressDeadlineSeconds"] > seconds


def test_where_the_model_comes_from():
    claim = documents(flags(model="llama/70b"), model_claim="models", cache_claim="cache")["Deployment"]
    assert container(claim)["args"][0] == "/models/llama/70b"
    volumes = {volume["name"]: volume for volume in claim["spec"]["template"]["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "cache"}
    host = documents(flags(model="70b"), model_host_path="/data")["Deployment"]
    volumes = {volume["name"]: volume for volume in host["spec"]["template"]["spec"]["volumes"]}
    assert volumes["models"]["hostPath"] == {"path": "/data", "type": "Directory"}
    hub = documents(flags(model="org/name"), hub_token_secret="hub")["Deployment"]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "hub-token"}}}
    assert token in container(hub)["env"]


@pytest.mark.parametrize("cache", [{}, {"cache_claim": "c"}, {"cache_host_path": "/c"}, {"cache_host_path": "/c", "with_": "ray"}])
def test_a_new_folder_of_the_node_is_given_to_the_server(cache, tmp_path):
    """kubelet makes a missing one for root. One that holds files, or is not root's, stays as it is."""
    objects = documents(**cache)
    pods = [objects["Deployment"]["spec"]["template"]] if "Deployment" in objects else templates(objects["RayService"])
    for pod in pods:
        if "cache_host_path" not in cache:
            assert "initContainers" not in pod["spec"]
            continue
        (init,) = pod["spec"]["initContainers"]
        assert init["volumeMounts"] == [{"name": "cache", "mountPath": "/cache"}]
        assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        assert (init["securityContext"]["runAsUser"], init["securityContext"]["runAsNonRoot"]) == (0, False)
        new, full = tmp_path / f"new{len(init)}", tmp_path / "full"
        new.mkdir(exist_ok=True)
        (full / "within").mkdir(parents=True, exist_ok=True)
        for folder in (new, full):
            command = [str(folder) if word == "/cache" else "echo" if word == "chown" else word for word in init["command"]]
            command = [
                str(os.getuid()) if word == "0" and command[index - 1] == "-user" else word for index, word in enumerate(command)
            ]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert printed == (f"65534:65534 {folder}\n" if folder == new else "")


def templates(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize(
    ("resource", "keys"),
    [
        ("nvidia.com/gpu", ["nvidia.com/gpu"]),
        ("nvidia.com/mig-3g.40gb", ["nvidia.com/mig-3g.40gb", "nvidia.com/gpu"]),
        ("nvidia.com/gpu.shared", ["nvidia.com/gpu.shared", "nvidia.com/gpu"]),
        ("example.com/h100", ["example.com/h100", "nvidia.com/gpu"]),
    ],
)
def test_nodes_with_gpus_are_tolerated_whatever_the_resource_is_called(resource, keys):
    pod = documents(flags(), gpu_resource=resource)["Deployment"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def test_secrets_are_named_and_never_written():
    text = k8s.text(
        flags(**TWO_NODES), K8sOptions.of(image="phalanx:1", api_key_secret="key", hub_token_secret="hub", namespace="prod")
    )
    for secret, key in (("key", "api-key"), ("hub", "hub-token"), ("demo-cluster-token", "cluster-token")):
        assert f"kubectl -n prod create secret generic {secret} --from-literal={key}=" in text
    assert "kind: Secret" not in text


def test_gpus_by_claims_or_none_on_cpu():
    objects = documents(flags(tensor_parallel_size=4), dra=True)
    request = objects["ResourceClaimTemplate"]["spec"]["spec"]["devices"]["requests"][0]
    assert request == {"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 4}}
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "demo-gpus"}]
    assert pod["containers"][0]["resources"] == {"claims": [{"name": "gpus"}]}
    assert "resources" not in container(documents(flags(device="cpu"))["Deployment"])


def test_scaling_follows_the_queue():
    hpa = documents(autoscale="hpa", max_replicas=8, queue_target=3)
    assert "replicas" not in hpa["Deployment"]["spec"]  # applying the manifest again would undo what the scaler did
    spec = hpa["HorizontalPodAutoscaler"]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo"}
    assert spec["metrics"][0]["pods"]["metric"]["name"] == "phalanx:num_requests_waiting"
    assert spec["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": "3"}
    keda = documents(
        flags(**TWO_NODES, metrics_prefix="vllm"), autoscale="keda", prometheus_url="http://prometheus:9090", namespace="prod"
    )["ScaledObject"]["spec"]
    assert keda["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    assert keda["triggers"][0]["metadata"]["query"] == 'sum(vllm:num_requests_waiting{service="demo-api",namespace="prod"})'


def test_metrics_are_scraped_as_the_job_of_the_alert_rules():
    objects = documents(service_monitor=True)
    monitor = objects["ServiceMonitor"]["spec"]
    service = objects["Service"]["metadata"]["labels"]
    assert service[monitor["jobLabel"]] == "phalanx"
    assert monitor["selector"]["matchLabels"].items() <= service.items()
    assert monitor["endpoints"][0]["path"] == "/metrics"


def test_an_inference_pool_selects_the_servers():
    pool = documents(flags(**TWO_NODES, metrics_prefix="vllm", port=8080), endpoint_picker="picker")["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert pool["targetPorts"] == [{"number": 8080}]
    assert pool["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}


ODD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"api_key": "secret-key"}, {}, "api_key cannot be an option of a manifest; the key would stand in the manifest"),
    ({"api_key_file": "f"}, {}, "api_key_file cannot"),
    ({"cluster_token": "x" * 20}, {}, "create a Secret"),
    ({"cluster_token_file": "f"}, {}, "--cluster_token_secret"),
    ({"host": "1.2.3.4"}, {}, "host cannot"),
    ({"node_rank": 1, "nnodes": 2}, {}, "node_rank cannot"),
    ({"master_addr": "a"}, {}, "master_addr cannot"),
    ({"plan": "auto"}, {}, "run phalanx plan MODEL"),
    ({"kernel_cache_dir": "/k"}, {}, "/cache/kernels"),
    ({"skip_tokenizer_init": True}, {}, "skip_tokenizer_init"),
    ({"port": 0}, {}, "port=0"),
    ({"port": 80}, {}, "does not run as root"),
    ({**TWO_NODES, "port": 29400}, {}, "also the port of the ranks"),
    ({**TWO_NODES, "master_port": 80}, {}, "master_port=80"),
    ({"tensor_parallel_size": 3, "nnodes": 2}, {}, "cannot be spread evenly"),
    ({"shutdown_timeout": float("inf")}, {}, "too long"),
    ({"model": "llama-3-70b", "tensor_parallel_size": 3}, {"model_claim": "c"}, "does not divide num_attention_heads"),
    ({"model": "./here"}, {}, "--model_claim"),
    ({"model": "/here"}, {}, "path of this machine"),
    ({"model": "a/b/c"}, {}, "no Hub id"),
    ({"model": "/x"}, {"model_claim": "c"}, "without a leading"),
    ({"model": "a/../b"}, {"model_claim": "c"}, "no folder below"),
    ({"model": "--x"}, {}, "begins with"),
    ({"tokenizer": "./t"}, {}, "tokenizer='./t' is not in the container"),
    ({"chat_template": "t.jinja"}, {}, "cat FILE"),
    ({"served_model_name": "a\0"}, {}, "NUL"),
    ({}, {"model_claim": "a", "model_host_path": "/b"}, "exclude each other"),
    ({}, {"cache_claim": "a", "cache_host_path": "/b"}, "exclude each other"),
    ({}, {"pod_replicas": 2, "autoscale": "hpa"}, "pod_replicas has no effect"),
    ({}, {"max_replicas": 2}, "max_replicas has no effect"),
    ({}, {"autoscale": "keda"}, "needs prometheus_url"),
    ({}, {"autoscale": "hpa", "prometheus_url": "http://p"}, "no effect"),
    ({}, {"autoscale": "hpa", "min_replicas": 5}, "is above max_replicas=4"),
    ({}, {"pod_replicas": 0}, "pod_replicas=0"),
    ({}, {"endpoint_picker": "p"}, "--metrics_prefix vllm"),
    ({}, {"endpoint_picker_port": 1}, "no effect"),
    ({}, {"service_monitor": True, "api_key_secret": "key"}, "add --open_metrics"),
    ({}, {"autoscale": "hpa", "api_key_secret": "key"}, "autoscale cannot read /metrics"),
    ({"metrics_prefix": "vllm"}, {"endpoint_picker": "p", "api_key_secret": "key"}, "endpoint_picker cannot read /metrics"),
    ({}, {"dra": True, "gpu_resource": "a"}, "gpu_resource has no effect"),
    ({"device": "cpu"}, {"dra": True}, "needs GPUs"),
    ({}, {"device_class": "a"}, "needs dra"),
    ({"device": "cpu"}, {"gpu_resource": "amd.com/gpu"}, "needs GPUs"),
    ({}, {"exclusive_topology": "rack"}, "needs nnodes > 1"),
    ({}, {"cluster_token_secret": "t"}, "needs nnodes > 1"),
    ({**TWO_NODES, "insecure_cluster": True}, {"cluster_token_secret": "t"}, "without insecure_cluster"),
    ({}, {"memory": "1Gi"}, "is not above shm_size=1Gi"),
    ({"kv_host_memory": 64 << 30}, {"memory": "64Gi"}, "is not above shm_size=1Gi and kv_host_memory=68,719,476,736 together"),
    ({}, {"memory": "much"}, "must be a quantity"),
    ({}, {"cpu": "0"}, "above 0"),
    ({}, {"startup_seconds": 905}, "multiple of 10"),
    ({}, {"startup_seconds": 100}, "below start_timeout=600"),
    ({}, {"name": "Upper"}, "name='Upper'"),
    ({}, {"name": "x" * 41}, "name="),
    ({}, {"name": "1a"}, "name="),
    ({}, {"namespace": "a.b"}, "namespace="),
    ({}, {"image": "a b"}, "image="),
    ({**TWO_NODES, "replicas": 2}, {}, "replicas=2 was given with nnodes=2"),
    ({}, {"env": ("A",)}, "NAME=VALUE"),
    ({}, {"env": ("PHALANX_PORT=1",)}, "give it as a flag"),
    ({}, {"env": ("HOME=/",)}, "set by the manifest"),
    ({}, {"env": ("A=1", "A=2")}, "env has A twice"),
    ({}, {"node_selector": ("a=1", "a=2")}, "twice"),
    ({}, {"node_selector": ("a",)}, "LABEL=VALUE"),
    ({}, {"model_host_path": "data"}, "absolute path"),
    ({}, {"cache_host_path": "/a/../b"}, "absolute path"),
    ({}, {"with_": "dask"}, "with='dask'"),
    ({}, {"nmae": "x"}, "did you mean 'name'"),
]


@pytest.mark.parametrize(("server", "options", "problem"), ODD, ids=[problem for *_, problem in ODD])
def test_odd_options_are_errors_with_a_reason(server, options, problem):
    with pytest.raises((OptionError, LayoutError, UnknownOption)) as caught:
        k8s.text(flags(**server), K8sOptions.of(**{"image": "phalanx:1", **options}))
    assert problem in str(caught.value)
    assert isinstance(caught.value, PhalanxError)
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"), ("meta-llama/Meta-Llama-3.1-8B", "meta-llama-3-1-8b"), ("org/70B", "model-70b"), ("a/b_c/", "b-c"),
        ("org/" + "x" * 39 + "-y", "x" * 39), ("org/___", "model"),
    ],
)  # fmt: skip
def test_names_come_from_the_model(model, name):
    assert k8s.name_of(model) == name
    assert K8sOptions.of(image="phalanx:1", name=name).name == name


def test_options_of_the_manifest_have_names_of_their_own():
    """`phalanx deploy k8s` takes the server's flags beside these."""
    assert not set(K8sOptions.model_fields) & (ENGINE | set(ServeOptions.model_fields))


def test_labels_and_names_have_the_length_that_kubernetes_takes():
    long = "x" * 40
    for seed in range(30):
        server, options = deployment(seed)
        objects = k8s.objects(server, k8s.resolve(server, options.model_copy(update={"name": long})).options)
        assert all(len(one["metadata"]["name"]) <= 63 - len("-0123456789") for one in objects)


def test_another_process_writes_the_same_bytes():
    imports = "from phalanx.deploy import k8s; from tests.support.deploy_options import deployment"
    code = f"{imports}; print(k8s.text(*deployment(7)), end='')"
    for seed in ("1", "2"):
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        )  # fmt: skip
        assert completed.stdout == k8s.text(*deployment(7))


@pytest.mark.parametrize("seed", range(60))
def test_the_arguments_are_the_options(seed):
    """Whatever the options are: what the container's command reads is what the manifest was made of, but for what the manifest
    sets itself."""
    flags, options = deployment(seed)
    (workload,) = (one for one in yaml.safe_load_all(k8s.text(flags, options)) if one["kind"] in WORKLOADS)
    if workload["kind"] == "RayService":
        (application,) = yaml.safe_load(workload["spec"]["serveConfigV2"])["applications"]
        words = application["args"]["arguments"]
    else:
        spec = workload["spec"].get("leaderWorkerTemplate", {}).get("leaderTemplate") or workload["spec"]["template"]
        words = [word for word in spec["spec"]["containers"][0]["args"] if not word.startswith(("--node_rank=", "--master_addr="))]
    engine, serving = read_arguments(words)
    own = {"kernel_cache_dir", "cluster_token_file", "master_addr_timeout", "start_timeout", "model"}
    assert engine.model_copy(update={name: getattr(flags.engine, name) for name in own}) == flags.engine
    assert engine.model.removeprefix("/models/") == flags.engine.model
    assert serving.model_copy(update={name: getattr(flags.serving, name) for name in ("host", "api_key_file")}) == flags.serving


WORKLOADS = ("Deployment", "LeaderWorkerSet", "RayService")
