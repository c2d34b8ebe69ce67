# SPDX-License-Identifier: Apache-2.0
"""The objects of Kubernetes that a manifest has, with the fields that we write and no others. Names are those of the API, in
snake_case here and in camelCase in YAML.

Sources: the API reference of Kubernetes 1.30 to 1.37, and the custom resources LeaderWorkerSet v1, InferencePool v1, ServiceMonitor
v1, ScaledObject v1alpha1 and RayService v1.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from phalanx.errors import OptionError


class Fields(BaseModel):
    """Fields of an object; those that are None are left out."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, strict=True, protected_namespaces=()
    )


Strings = dict[str, str]


class Meta(Fields):
    name: str | None = None
    namespace: str | None = None
    labels: Strings | None = None
    annotations: Strings | None = None


class LabelSelector(Fields):
    match_labels: Strings


# ---- containers and pods ---------------------------------------------------------------------------------------------------


class SecretKey(Fields):
    name: str
    key: str


class ValueFrom(Fields):
    secret_key_ref: SecretKey


class EnvVar(Fields):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class HttpGet(Fields):
    path: str
    port: str


class Probe(Fields):
    http_get: HttpGet
    period_seconds: int
    timeout_seconds: int
    failure_threshold: int


class Sleep(Fields):
    seconds: int


class Handler(Fields):
    sleep: Sleep


class Lifecycle(Fields):
    pre_stop: Handler


class ContainerPort(Fields):
    name: str
    container_port: int


class ClaimName(Fields):
    name: str


class Resources(Fields):
    limits: Strings | None = None
    requests: Strings | None = None
    claims: list[ClaimName] | None = None


class Capabilities(Fields):
    drop: list[str]


class ContainerSecurity(Fields):
    allow_privilege_escalation: bool = False
    read_only_root_filesystem: bool = True
    capabilities: Capabilities = Capabilities(drop=["ALL"])


class Mount(Fields):
    name: str
    mount_path: str
    read_only: bool | None = None


class Container(Fields):
    name: str
    image: str
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[EnvVar] | None = None
    ports: list[ContainerPort] | None = None
    resources: Resources | None = None
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    security_context: ContainerSecurity
    volume_mounts: list[Mount]


class EmptyDir(Fields):
    medium: Literal["Memory"] | None = None
    size_limit: str | None = None


class VolumeClaim(Fields):
    claim_name: str
    read_only: bool | None = None


class HostPath(Fields):
    path: str
    type: Literal["Directory", "DirectoryOrCreate"]


class KeyToPath(Fields):
    key: str
    path: str


class SecretVolume(Fields):
    secret_name: str
    items: list[KeyToPath]
    default_mode: int = 0o440


class Volume(Fields):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: VolumeClaim | None = None
    host_path: HostPath | None = None
    secret: SecretVolume | None = None


class Seccomp(Fields):
    type: Literal["RuntimeDefault"] = "RuntimeDefault"


USER = 65534
"""The user `nobody`: of the image, of the pods, and of the files that they write."""


class PodSecurity(Fields):
    run_as_non_root: bool = True
    run_as_user: int = USER
    run_as_group: int = USER
    fs_group: int = USER
    fs_group_change_policy: Literal["OnRootMismatch"] = "OnRootMismatch"
    seccomp_profile: Seccomp = Seccomp()


class Toleration(Fields):
    key: str
    operator: Literal["Exists"] = "Exists"
    effect: Literal["NoSchedule"] = "NoSchedule"


class PodClaim(Fields):
    name: str
    resource_claim_template_name: str


class PodSpec(Fields):
    enable_service_links: bool = False
    automount_service_account_token: bool = False
    termination_grace_period_seconds: int
    image_pull_secrets: list[ClaimName] | None = None
    runtime_class_name: str | None = None
    node_selector: Strings | None = None
    tolerations: list[Toleration] | None = None
    security_context: PodSecurity = PodSecurity()
    containers: list[Container]
    volumes: list[Volume]
    resource_claims: list[PodClaim] | None = None


class PodTemplate(Fields):
    metadata: Meta
    spec: PodSpec


# ---- objects ---------------------------------------------------------------------------------------------------------------


class Object(Fields):
    """An object of the API: apiVersion, kind, metadata and spec. A subclass fixes the first two."""

    api: ClassVar[str]
    metadata: Meta
    spec: Any

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    def document(self) -> dict[str, Any]:
        """What YAML shows, in the order of the fields."""
        body = self.model_dump(by_alias=True, exclude_none=True, mode="json")
        return {"apiVersion": self.api, "kind": self.kind(), **body}


class RollingUpdate(Fields):
    max_surge: int
    max_unavailable: int


class DeploymentStrategy(Fields):
    type: Literal["RollingUpdate"] = "RollingUpdate"
    rolling_update: RollingUpdate


class DeploymentSpec(Fields):
    replicas: int | None = None
    progress_deadline_seconds: int
    strategy: DeploymentStrategy
    selector: LabelSelector
    template: PodTemplate


class Deployment(Object):
    api = "apps/v1"
    spec: DeploymentSpec


class RolloutStrategy(Fields):
    type: Literal["RollingUpdate"] = "RollingUpdate"
    rolling_update_configuration: RollingUpdate


class Group(Fields):
    size: int
    restart_policy: Literal["RecreateGroupOnPodRestart"] = "RecreateGroupOnPodRestart"
    leader_template: PodTemplate
    worker_template: PodTemplate


class LeaderWorkerSetSpec(Fields):
    replicas: int | None = None
    startup_policy: Literal["LeaderCreated"] = "LeaderCreated"
    rollout_strategy: RolloutStrategy
    leader_worker_template: Group


class LeaderWorkerSet(Object):
    api = "leaderworkerset.x-k8s.io/v1"
    spec: LeaderWorkerSetSpec


class ServicePort(Fields):
    name: str
    port: int
    target_port: str
    protocol: Literal["TCP"] = "TCP"


class ServiceSpec(Fields):
    selector: Strings
    ports: list[ServicePort]


class Service(Object):
    api = "v1"
    spec: ServiceSpec


class PodDisruptionBudgetSpec(Fields):
    max_unavailable: int | None = None
    min_available: int | None = None
    selector: LabelSelector


class PodDisruptionBudget(Object):
    api = "policy/v1"
    spec: PodDisruptionBudgetSpec


class PolicyPort(Fields):
    protocol: Literal["TCP"] = "TCP"
    port: str


class AnyNamespace(Fields):
    """A selector without labels, which every namespace has."""


class Peer(Fields):
    namespace_selector: AnyNamespace | None = None
    pod_selector: LabelSelector


class Ingress(Fields):
    from_: list[Peer] | None = Field(None, alias="from")
    ports: list[PolicyPort] | None = None


class NetworkPolicySpec(Fields):
    pod_selector: LabelSelector
    policy_types: list[Literal["Ingress"]] = ["Ingress"]
    ingress: list[Ingress]


class NetworkPolicy(Object):
    api = "networking.k8s.io/v1"
    spec: NetworkPolicySpec


class Endpoint(Fields):
    port: str
    path: str
    interval: str


class ServiceMonitorSpec(Fields):
    job_label: str
    selector: LabelSelector
    endpoints: list[Endpoint]


class ServiceMonitor(Object):
    api = "monitoring.coreos.com/v1"
    spec: ServiceMonitorSpec


class ScaleTarget(Fields):
    api_version: str
    kind: str
    name: str


class MetricName(Fields):
    name: str


class MetricTarget(Fields):
    type: Literal["AverageValue"] = "AverageValue"
    average_value: str


class PodsMetric(Fields):
    metric: MetricName
    target: MetricTarget


class ScalerMetric(Fields):
    type: Literal["Pods"] = "Pods"
    pods: PodsMetric


class ScaleDown(Fields):
    stabilization_window_seconds: int


class Behavior(Fields):
    scale_down: ScaleDown


class HorizontalPodAutoscalerSpec(Fields):
    scale_target_ref: ScaleTarget
    min_replicas: int
    max_replicas: int
    metrics: list[ScalerMetric]
    behavior: Behavior


class HorizontalPodAutoscaler(Object):
    api = "autoscaling/v2"
    spec: HorizontalPodAutoscalerSpec


class TriggerMetadata(Fields):
    server_address: str
    query: str
    threshold: str


class Trigger(Fields):
    type: Literal["prometheus"] = "prometheus"
    metadata: TriggerMetadata


class ScaledObjectSpec(Fields):
    scale_target_ref: ScaleTarget
    min_replica_count: int
    max_replica_count: int
    polling_interval: int
    cooldown_period: int
    triggers: list[Trigger]


class ScaledObject(Object):
    api = "keda.sh/v1alpha1"
    spec: ScaledObjectSpec


class PortNumber(Fields):
    number: int


class PickerRef(Fields):
    name: str
    port: PortNumber
    failure_mode: Literal["FailOpen"] = "FailOpen"


class InferencePoolSpec(Fields):
    selector: LabelSelector
    target_ports: list[PortNumber]
    endpoint_picker_ref: PickerRef


class InferencePool(Object):
    api = "inference.networking.k8s.io/v1"
    spec: InferencePoolSpec


class ExactDevices(Fields):
    device_class_name: str
    count: int


class DeviceRequest(Fields):
    name: str
    exactly: ExactDevices


class Devices(Fields):
    requests: list[DeviceRequest]


class ClaimSpec(Fields):
    devices: Devices


class ResourceClaimTemplateSpec(Fields):
    spec: ClaimSpec


class ResourceClaimTemplate(Object):
    api = "resource.k8s.io/v1"
    spec: ResourceClaimTemplateSpec


class HeadGroup(Fields):
    ray_start_params: Strings
    template: PodTemplate


class WorkerGroup(Fields):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: Strings
    template: PodTemplate


class RayClusterSpec(Fields):
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayServiceSpec(Fields):
    serve_config_v2: str = Field(alias="serveConfigV2")
    ray_cluster_config: RayClusterSpec


class RayService(Object):
    api = "ray.io/v1"
    spec: RayServiceSpec


KINDS: tuple[type[Object], ...] = (
    Deployment, LeaderWorkerSet, Service, PodDisruptionBudget, NetworkPolicy, ServiceMonitor, HorizontalPodAutoscaler, ScaledObject,
    InferencePool, ResourceClaimTemplate, RayService,
)  # fmt: skip

Known = TypeVar("Known", bound=Object)


def read(document: Any) -> Object:
    """The object that a document is. Raises OptionError for another kind, an unknown field and a wrong type, naming it."""
    if not isinstance(document, dict):
        raise OptionError("a document of the manifest is no object", why=f"it is a {type(document).__name__}")
    api, kind = document.get("apiVersion"), document.get("kind")
    known = next((each for each in KINDS if (each.api, each.kind()) == (api, kind)), None)
    if known is None:
        raise OptionError(f"{kind} of {api} is no object of a manifest of ours", next="give the text that phalanx deploy k8s wrote")
    try:
        return known.model_validate({name: value for name, value in document.items() if name not in ("apiVersion", "kind")})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(f"{kind} {_name(document)}: {where} is not understood", why=first["msg"]) from None


def _name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
