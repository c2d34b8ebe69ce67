# SPDX-License-Identifier: Apache-2.0
"""Every object is valid: by our strict schemas of the fields that we use, and by those of Kubernetes where they are installed."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from phalanx.deploy import k8s
from tests.support import kubernetes_schemas
from tests.support.deploy_options import deployment

SEEDS = range(150)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in C where PyYAML has it: it reads the same, ten times as fast."""
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
DRA_SINCE = "1.34"
OF_CLUSTER = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "ResourceClaimTemplate"}
POD_ORIGINS = {"LeaderWorkerSet leaderTemplate", "LeaderWorkerSet workerTemplate", "RayService head", "RayService worker"}
"""Pods of custom resources: Kubernetes has no schema of the resource, but one of its pods."""


@pytest.fixture(scope="module")
def documents() -> list[tuple[bool, dict[str, Any]]]:
    """(claims devices?, object) of many manifests."""
    result = []
    for seed in SEEDS:
        flags, options = deployment(seed)
        result += [(options.dra, one) for one in yaml.load_all(k8s.text(flags, options), Loader=LOADER)]
    return result


def test_every_object_is_valid_by_the_strict_schemas(documents):
    for _, document in documents:
        assert kubernetes_schemas.problems(document) == []


def test_there_is_a_schema_for_every_kind(documents):
    assert {document["kind"] for _, document in documents} == kubernetes_schemas.kinds()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where mappings with fixed fields are: not labels, limits and the like."""
    free = {"labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests", "rayStartParams"}
    places = []
    if isinstance(value, dict):
        if not path or path[-1] not in free | ({"selector"} if "ports" in str(path) or path == ("spec", "selector") else set()):
            places.append(path)
            for name, inner in value.items():
                places += _places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            places += _places(inner, (*path, index))
    return places


def test_the_schemas_are_strict(documents):
    """A field of another name, anywhere in an object of each kind, is caught; and so is every missing kind."""
    of_kind = {document["kind"]: document for _, document in documents}
    for document in of_kind.values():
        for path in _places(document):
            wrong = copy.deepcopy(document)
            place = wrong
            for step in path:
                place = place[step]
            place["mistyped"] = "x"
            assert kubernetes_schemas.problems(wrong), path


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "selector"), None),  # as the guide's Deployment
        ("Deployment", ("spec", "replicas"), "2"),
        ("Service", ("spec", "ports", 0, "port"), 70000),
        ("LeaderWorkerSet", ("spec", "startupPolicy"), "LeaderSoon"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "size"), -1),
        ("NetworkPolicy", ("metadata", "name"), "Upper"),
        ("InferencePool", ("spec", "targetPorts"), []),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 5),
    ],
)
def test_the_schemas_catch_wrong_values(documents, kind, path, value):
    wrong = copy.deepcopy(next(document for _, document in documents if document["kind"] == kind))
    place: Any = wrong
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    assert kubernetes_schemas.problems(wrong)


def _for_the_schemas(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is from, object of a kind of Kubernetes itself): the object, or the pods of a custom resource as PodTemplates."""
    kind, spec = document["kind"], document["spec"]
    pods = {}
    if kind == "LeaderWorkerSet":
        pods = {name: spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")}
    elif kind == "RayService":
        cluster = spec["rayClusterConfig"]
        pods = {"head": cluster["headGroupSpec"]["template"], "worker": cluster["workerGroupSpecs"][0]["template"]}
    elif kind in OF_CLUSTER:
        yield kind, document
    for name, template in pods.items():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        yield f"{kind} {name}", pod


def _fields(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields of a value, without the indices of lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{path}.{name}"
            yield from _fields(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{path}[]")


@pytest.fixture(scope="module")
def with_each_field(documents) -> list[tuple[str, bool, dict[str, Any]]]:
    """(where it is from, claims devices?, object): of all objects, those with a field that none before has. Objects that claim
    devices come last: for Kubernetes before DRA_SINCE the others have every other field."""
    selected, fields = [], set()
    for dra, document in sorted(documents, key=lambda pair: pair[0]):
        for origin, each in _for_the_schemas(document):
            own = {origin + path for path in _fields(each)}
            if not own <= fields:
                fields |= own
                selected.append((origin, dra, each))
    return selected


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="not run: kubernetes-validate is not installed")
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_by_the_schemas_of_kubernetes(with_each_field, version):
    import kubernetes_validate

    checked = set()
    for origin, dra, document in with_each_field:
        if not dra or VERSIONS.index(version) >= VERSIONS.index(DRA_SINCE):
            kubernetes_validate.validate(document, version, strict=True)
            checked.add(origin)
    since_dra = {"ResourceClaimTemplate"} if VERSIONS.index(version) < VERSIONS.index(DRA_SINCE) else set()
    assert checked == (OF_CLUSTER - since_dra) | POD_ORIGINS
