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


class ObjectFields(BaseModel):
    """Fields of an object; those that are None are left out."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, strict=True, protected_namespaces=()
    )


Strings = dict[str, str]


class Meta(ObjectFields):
    name: str | None = None
    namespace: str | None = None
    labels: Strings | None = None
    annotations: Strings | None = None


class LabelSelector(ObjectFields):
    match_labels: Strings


# ---- containers and pods ---------------------------------------------------------------------------------------------------


class SecretKey(ObjectFields):
    name: str
    key: str


class ValueFrom(ObjectFields):
    secret_key_ref: SecretKey


class EnvVar(ObjectFields):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class HttpGet(ObjectFields):
    path: str
    port: str


class Probe(ObjectFields):
    http_get: HttpGet
    period_seconds: int
    timeout_seconds: int
    failure_threshold: int


class Sleep(ObjectFields):
    seconds: int


class Handler(ObjectFields):
    sleep: Sleep


class ContainerLifecycle(ObjectFields):
    pre_stop: Handler


class ContainerPort(ObjectFields):
    name: str
    container_port: int


class ClaimName(ObjectFields):
    name: str


class Resources(ObjectFields):
    limits: Strings | None = None
    requests: Strings | None = None
    claims: list[ClaimName] | None = None


class Capabilities(ObjectFields):
    drop: list[str]


class ContainerSecurity(ObjectFields):
    allow_privilege_escalation: bool = False
    read_only_root_filesystem: bool = True
    capabilities: Capabilities = Capabilities(drop=["ALL"])


class Mount(ObjectFields):
    name: str
    mount_path: str
    read_only: bool | None = None


class Container(ObjectFields):
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
    lifecycle: ContainerLifecycle | None = None
    security_context: ContainerSecurity
    volume_mounts: list[Mount]


class EmptyDir(ObjectFields):
    medium: Literal["Memory"] | None = None
    size_limit: str | None = None


class VolumeClaim(ObjectFields):
    claim_name: str
    read_only: bool | None = None


class HostPath(ObjectFields):
    path: str
    type: Literal["Directory", "DirectoryOrCreate"]


class KeyToPath(ObjectFields):
    key: str
    path: str


class SecretVolume(ObjectFields):
    secret_name: str
    items: list[KeyToPath]
    default_mode: int = 0o440


class Volume(ObjectFields):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: VolumeClaim | None = None
    host_path: HostPath | None = None
    secret: SecretVolume | None = None


class Seccomp(ObjectFields):
    type: Literal["RuntimeDefault"] = "RuntimeDefault"


USER = 65534
"""The user `nobody`: of the image, of the pods, and of the files that they write."""


class PodSecurity(ObjectFields):
    run_as_non_root: bool = True
    run_as_user: int = USER
    run_as_group: int = USER
    fs_group: int = USER
    fs_group_change_policy: Literal["OnRootMismatch"] = "OnRootMismatch"
    seccomp_profile: Seccomp = Seccomp()


class Toleration(ObjectFields):
    key: str
    operator: Literal["Exists"] = "Exists"
    effect: Literal["NoSchedule"] = "NoSchedule"


class PodClaim(ObjectFields):
    name: str
    resource_claim_template_name: str


class PodSpec(ObjectFields):
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


class PodTemplate(ObjectFields):
    metadata: Meta
    spec: PodSpec


# ---- objects ---------------------------------------------------------------------------------------------------------------


class Object(ObjectFields):
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


class RollingUpdate(ObjectFields):
    max_surge: int
    max_unavailable: int


class DeploymentStrategy(ObjectFields):
    type: Literal["RollingUpdate"] = "RollingUpdate"
    rolling_update: RollingUpdate


class DeploymentSpec(ObjectFields):
    replicas: int | None = None
    progress_deadline_seconds: int
    strategy: DeploymentStrategy
    selector: LabelSelector
    template: PodTemplate


class Deployment(Object):
    api = "apps/v1"
    spec: DeploymentSpec


class RolloutStrategy(ObjectFields):
    type: Literal["RollingUpdate"] = "RollingUpdate"
    rolling_update_configuration: RollingUpdate


class LeaderWorkerTemplate(ObjectFields):
    size: int
    restart_policy: Literal["RecreateGroupOnPodRestart"] = "RecreateGroupOnPodRestart"
    leader_template: PodTemplate
    worker_template: PodTemplate


class LeaderWorkerSetSpec(ObjectFields):
    replicas: int | None = None
    startup_policy: Literal["LeaderCreated"] = "LeaderCreated"
    rollout_strategy: RolloutStrategy
    leader_worker_template: LeaderWorkerTemplate


class LeaderWorkerSet(Object):
    api = "leaderworkerset.x-k8s.io/v1"
    spec: LeaderWorkerSetSpec


class ServicePort(ObjectFields):
    name: str
    port: int
    target_port: str
    protocol: Literal["TCP"] = "TCP"


class ServiceSpec(ObjectFields):
    selector: Strings
    ports: list[ServicePort]


class Service(Object):
    api = "v1"
    spec: ServiceSpec


class PodDisruptionBudgetSpec(ObjectFields):
    max_unavailable: int | None = None
    min_available: int | None = None
    selector: LabelSelector


class PodDisruptionBudget(Object):
    api = "policy/v1"
    spec: PodDisruptionBudgetSpec


class PolicyPort(ObjectFields):
    protocol: Literal["TCP"] = "TCP"
    port: str


class AnyNamespace(ObjectFields):
    """A selector without labels, which every namespace has."""


class Peer(ObjectFields):
    namespace_selector: AnyNamespace | None = None
    pod_selector: LabelSelector


class Ingress(ObjectFields):
    from_: list[Peer] | None = Field(None, alias="from")
    ports: list[PolicyPort] | None = None


class NetworkPolicySpec(ObjectFields):
    pod_selector: LabelSelector
    policy_types: list[Literal["Ingress"]] = ["Ingress"]
    ingress: list[Ingress]


class NetworkPolicy(Object):
    api = "networking.k8s.io/v1"
    spec: NetworkPolicySpec


class Endpoint(ObjectFields):
    port: str
    path: str
    interval: str


class ServiceMonitorSpec(ObjectFields):
    job_label: str
    selector: LabelSelector
    endpoints: list[Endpoint]


class ServiceMonitor(Object):
    api = "monitoring.coreos.com/v1"
    spec: ServiceMonitorSpec


class ScaleTarget(ObjectFields):
    api_version: str
    kind: str
    name: str


class MetricName(ObjectFields):
    name: str


class MetricTarget(ObjectFields):
    type: Literal["AverageValue"] = "AverageValue"
    average_value: str


class PodsMetric(ObjectFields):
    metric: MetricName
    target: MetricTarget


class ScalerMetric(ObjectFields):
    type: Literal["Pods"] = "Pods"
    pods: PodsMetric


class ScaleDown(ObjectFields):
    stabilization_window_seconds: int


class Behavior(ObjectFields):
    scale_down: ScaleDown


class HorizontalPodAutoscalerSpec(ObjectFields):
    scale_target_ref: ScaleTarget
    min_replicas: int
    max_replicas: int
    metrics: list[ScalerMetric]
    behavior: Behavior


class HorizontalPodAutoscaler(Object):
    api = "autoscaling/v2"
    spec: HorizontalPodAutoscalerSpec


class TriggerMetadata(ObjectFields):
    server_address: str
    query: str
    threshold: str


class Trigger(ObjectFields):
    type: Literal["prometheus"] = "prometheus"
    metadata: TriggerMetadata


class ScaledObjectSpec(ObjectFields):
    scale_target_ref: ScaleTarget
    min_replica_count: int
    max_replica_count: int
    polling_interval: int
    cooldown_period: int
    triggers: list[Trigger]


class ScaledObject(Object):
    api = "keda.sh/v1alpha1"
    spec: ScaledObjectSpec


class PortNumber(ObjectFields):
    number: int


class PickerRef(ObjectFields):
    name: str
    port: PortNumber
    failure_mode: Literal["FailOpen"] = "FailOpen"


class InferencePoolSpec(ObjectFields):
    selector: LabelSelector
    target_ports: list[PortNumber]
    endpoint_picker_ref: PickerRef


class InferencePool(Object):
    api = "inference.networking.k8s.io/v1"
    spec: InferencePoolSpec


class ExactDevices(ObjectFields):
    device_class_name: str
    count: int


class DeviceRequest(ObjectFields):
    name: str
    exactly: ExactDevices


class DeviceClaim(ObjectFields):
    requests: list[DeviceRequest]


class ClaimSpec(ObjectFields):
    devices: DeviceClaim


class ResourceClaimTemplateSpec(ObjectFields):
    spec: ClaimSpec


class ResourceClaimTemplate(Object):
    api = "resource.k8s.io/v1"
    spec: ResourceClaimTemplateSpec


class HeadGroup(ObjectFields):
    ray_start_params: Strings
    template: PodTemplate


class WorkerGroup(ObjectFields):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: Strings
    template: PodTemplate


class RayClusterSpec(ObjectFields):
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayServiceSpec(ObjectFields):
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
