# SPDX-License-Identifier: Apache-2.0
"""What a manifest says beside the server's own options: `K8sOptions` and `ComposeOptions`. Frozen; an unknown name is an error."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from phalanx.config.options import option_error, refuse_unknown
from phalanx.errors import OptionError
from phalanx.version import __version__

LONGEST_NAME = 40
"""Names of pods add a group, a number and a hash to it, and a label holds 63 characters."""

_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
_QUALIFIED = r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
_UNITS = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "Ki": Decimal(1 << 10), "Mi": Decimal(1 << 20), "Gi": Decimal(1 << 30), "Ti": Decimal(1 << 40),
}  # fmt: skip
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.S)


def quantity(text: str) -> Decimal:
    """The number that a Kubernetes quantity stands for, as 2147483648 for "2Gi". Raises ValueError."""
    number = _QUANTITY.fullmatch(text)
    if number is None:
        raise ValueError("it must be a quantity, as 8, 500m or 64Gi")
    value = Decimal(number[1]) * _UNITS[number[2] or ""]
    if value <= 0:
        raise ValueError("it must be above 0")
    return value


def _quantity(text: str) -> str:
    quantity(text)
    return text


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _variable(text: str) -> str:
    name = text.partition("=")[0]
    if not _VARIABLE.fullmatch(text):
        raise ValueError("it must be NAME=VALUE")
    if name.startswith("PHALANX_"):
        raise ValueError(f"{name} is an option of the server: give it as a flag")
    if name in ("HOME", "HF_HOME", "HF_TOKEN") or name.startswith("LWS_"):
        raise ValueError(f"{name} is set by the manifest")
    return text


def _selector(text: str) -> str:
    name, sign, value = text.partition("=")
    if (
        not sign
        or not re.fullmatch(_QUALIFIED[1:-1], name)
        or (value and not re.fullmatch(_QUALIFIED[1:-1], value))
        or "/" in value
    ):
        raise ValueError("it must be LABEL=VALUE")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/") or ":" in text:
        raise ValueError("it must be an absolute path without '..' and ':'")
    return text


Label = Annotated[str, Field(pattern=_LABEL, max_length=LONGEST_NAME)]
Subdomain = Annotated[str, Field(pattern=_SUBDOMAIN, max_length=253)]
Quantity = Annotated[str, AfterValidator(_quantity)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]


def require_once(name: str, values: tuple[str, ...]) -> None:
    """Raise OptionError if two of the NAME=VALUE texts of an option have one name."""
    names = [each.partition("=")[0] for each in values]
    if repeated := next((each for each in names if names.count(each) > 1), None):
        raise OptionError(f"{name} has {repeated} twice", next="give it once")


Variables = Annotated[tuple[Annotated[str, AfterValidator(_variable)], ...], BeforeValidator(_listed)]
Selectors = Annotated[tuple[Annotated[str, AfterValidator(_selector)], ...], BeforeValidator(_listed)]

Own = TypeVar("Own", bound="_ManifestOptions")


class _ManifestOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    @classmethod
    def of(cls: type[Own], **values: Any) -> Own:
        """Build the options. Raises UnknownOption naming the nearest known name, or OptionError for a bad value."""
        refuse_unknown(values, cls.model_fields, what="option of a manifest")
        try:
            return cls(**values)
        except ValidationError as error:
            if error.errors()[0]["type"] == "missing":
                name = str(error.errors()[0]["loc"][0])
                advice = f"give --{name}: {cls.model_fields[name].description}"
                raise OptionError(f"option {name} is missing", why="it has no default", next=advice) from None
            problem = option_error(error)
            raise OptionError(problem.failure.replace("with_=", "with="), why=problem.why) from None


class K8sOptions(_ManifestOptions):
    """Of `phalanx deploy k8s`. Times in seconds; quantities as Kubernetes writes them."""

    name: Label | None = Field(None, description="Name of the objects. None: from the model's name.")
    namespace: Annotated[str, Field(pattern=_LABEL, max_length=63)] | None = Field(
        None, description="Namespace of the objects. None: that of `kubectl apply`."
    )
    image: str = Field(pattern=r"^\S+$", description="Container image that the nodes can pull; the Dockerfile makes it.")
    image_pull_secret: Subdomain | None = Field(None, description="Secret with the credentials of the image's registry.")
    with_: Literal["none", "ray"] = Field(
        "none", description="none: pods of a Deployment, or of a LeaderWorkerSet for nnodes > 1. ray: a RayService of KubeRay."
    )
    pod_replicas: int | None = Field(
        None, ge=1, description="Number of servers, each of nnodes pods. None: 1, or what autoscale says."
    )
    max_surge: int = Field(1, ge=0, description="Servers beyond these during an update. 0: one stops before its successor starts.")
    gpu_resource: Annotated[str, Field(pattern=_QUALIFIED)] = Field("nvidia.com/gpu", description="Name of the GPU resource.")
    dra: bool = Field(False, description="Claim GPUs by dynamic resource allocation (Kubernetes 1.34) instead of gpu_resource.")
    device_class: Subdomain = Field("gpu.nvidia.com", description="Device class of those claims.")
    cpu: Quantity | None = Field(None, description="Cores that each pod requests. None: no request.")
    memory: Quantity | None = Field(
        None, description="Memory of each pod, request and limit; shm_size and --kv_host_memory count towards it. None: no limit."
    )
    shm_size: Quantity | None = Field(None, description="Size of /dev/shm in memory. None: what the ranks of a pod need.")
    node_selector: Selectors = Field((), description="LABEL=VALUE that nodes must have. Can be repeated.")
    runtime_class: Subdomain | None = Field(None, description="Runtime class of the pods, as nvidia.")
    exclusive_topology: Annotated[str, Field(pattern=_QUALIFIED)] | None = Field(
        None, description="Node label: all pods of a group run where it has one value, and no other group does. For nnodes > 1."
    )
    env: Variables = Field((), description="NAME=VALUE for the containers, as NCCL_DEBUG=INFO. Can be repeated.")

    model_claim: Subdomain | None = Field(None, description="PersistentVolumeClaim with checkpoints; MODEL is a folder in it.")
    model_host_path: AbsolutePath | None = Field(None, description="Folder of each node with checkpoints; MODEL is a folder in it.")
    cache_claim: Subdomain | None = Field(
        None, description="PersistentVolumeClaim for compiled kernels and downloads. None: they last as long as the pod."
    )
    cache_host_path: AbsolutePath | None = Field(
        None, description="Folder of each node for them, writable by user 65534; made where missing."
    )
    hub_token_secret: Subdomain | None = Field(None, description="Secret whose key `hub-token` is a token of the Hugging Face Hub.")
    api_key_secret: Subdomain | None = Field(None, description="Secret whose key `api-key` is the key that requests must carry.")
    cluster_token_secret: Subdomain | None = Field(
        None, description="Secret whose key `cluster-token` all pods of a group share. None: NAME-cluster-token for nnodes > 1."
    )

    startup_seconds: int | None = Field(
        None, ge=10, description="Time for a start, a multiple of 10. None: three times the predicted one, at least 600."
    )
    disruption_budget: bool = Field(True, description="PodDisruptionBudget: one pod at a time is evicted.")
    network_policy: bool = Field(True, description="NetworkPolicy: others reach the API only, pods of a group each other.")
    service_monitor: bool = Field(False, description="ServiceMonitor of the Prometheus operator.")
    autoscale: Literal["none", "hpa", "keda"] = Field(
        "none", description="Scale on waiting requests, by a HorizontalPodAutoscaler (needs a metrics adapter) or by KEDA."
    )
    min_replicas: int = Field(1, ge=1, description="Fewest servers of autoscale.")
    max_replicas: int = Field(4, ge=1, description="Most servers of autoscale.")
    queue_target: int = Field(5, ge=1, description="Waiting requests of each server beyond which autoscale adds one.")
    prometheus_url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = Field(None, description="Prometheus that KEDA asks.")
    endpoint_picker: Subdomain | None = Field(
        None, description="Service of the endpoint picker: an InferencePool names it. Needs metrics_prefix vllm."
    )
    endpoint_picker_port: int = Field(9002, ge=1, le=65535, description="Port of that Service.")


class ComposeOptions(_ManifestOptions):
    """Of `phalanx deploy compose`: one server on one host."""

    name: Label | None = Field(None, description="Name of the project and its service. None: from the model's name.")
    image: str = Field(
        f"phalanx:{__version__}", pattern=r"^\S+$", description="Container image of the host; the Dockerfile makes it."
    )
    publish: str = Field(
        "127.0.0.1",
        pattern=r"^[0-9A-Fa-f.:\[\]]+$",
        description="Address of the host at which the port is published. 0.0.0.0: every one.",
    )
    model_path: AbsolutePath | None = Field(None, description="Folder of the host with checkpoints; MODEL is a folder in it.")
    cache_path: AbsolutePath | None = Field(
        None,
        description="Folder of the host for compiled kernels and downloads, which user 65534 can write. None: a volume.",
    )
    hub_token: bool = Field(False, description="Pass HF_TOKEN on from the environment of `docker compose`.")
    key_file: str | None = Field(None, min_length=1, description="File of the host with the key that requests must carry.")
    memory: Quantity | None = Field(None, description="Memory limit of the container, as 64Gi. None: no limit.")
    shm_size: Quantity | None = Field(None, description="Size of /dev/shm. None: what the ranks need.")
    startup_seconds: int | None = Field(
        None, ge=10, description="Time for a start. None: three times the predicted one, at least 600."
    )
    env: Variables = Field((), description="NAME=VALUE for the container. Can be repeated.")
