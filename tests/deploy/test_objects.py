# SPDX-License-Identifier: Apache-2.0
"""Every object is valid: by our strict schemas of the fields that we use, and by those of Kubernetes where they are installed."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest

from phalanx.deploy import k8s, objects, yaml_text
from tests.support import kubernetes_schemas
from tests.support.deploy_options import deployment

SEEDS = range(150)
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
DRA_SINCE = "1.34"
OF_CLUSTER = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "ResourceClaimTemplate"}


@pytest.fixture(scope="module")
def documents() -> list[tuple[bool, dict[str, Any]]]:
    """(claims devices?, object) of many manifests."""
    result = []
    for seed in SEEDS:
        flags, options = deployment(seed)
        result += [(options.dra, one) for one in yaml_text.loads(k8s.text(flags, options), what="text")]
    return result


def test_every_object_is_valid_by_the_strict_schemas(documents):
    for _, document in documents:
        assert kubernetes_schemas.problems(document) == []


def test_there_is_a_schema_for_every_kind(documents):
    kinds = {each.kind() for each in objects.KINDS}
    assert kubernetes_schemas.kinds() == kinds
    assert {document["kind"] for _, document in documents} == kinds


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


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="not run: kubernetes-validate is not installed")
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_by_the_schemas_of_kubernetes(documents, version):
    import kubernetes_validate

    for dra, document in documents[:60]:
        if dra and VERSIONS.index(version) < VERSIONS.index(DRA_SINCE):
            continue
        if document["kind"] in OF_CLUSTER:
            kubernetes_validate.validate(document, version, strict=True)
        if document["kind"] == "LeaderWorkerSet":
            for name in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
                template = document["spec"]["leaderWorkerTemplate"][name]
                kubernetes_validate.validate({**pod, "template": template}, version, strict=True)


def test_an_unknown_field_is_an_error_with_its_place(documents):
    workload = copy.deepcopy(next(document for _, document in documents if document["kind"] == "Deployment"))
    workload["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(ValueError, match=r"spec\.template\.spec\.containers\.0\.imagePolicy is not understood"):
        objects.read(workload)
