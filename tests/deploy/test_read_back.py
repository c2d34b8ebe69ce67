# SPDX-License-Identifier: Apache-2.0
"""Options to a manifest and back: the same options, the same bytes; a manifest that no options make is an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy import k8s
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.read_back import read_manifest
from phalanx.deploy.serve_flags import ServeFlags
from phalanx.errors import OptionError
from tests.support.deploy_options import deployment

SETS = 1000


@pytest.mark.parametrize("tenth", range(10))
def test_options_survive_the_way_there_and_back(tenth):
    """1,000 sets of options; read back, they are the same, and make the same bytes."""
    kinds = set()
    for seed in range(tenth * SETS // 10, (tenth + 1) * SETS // 10):
        flags, options = deployment(seed)
        text = k8s.text(flags, options)
        resolved = k8s.resolve(flags, options).options
        deployed = read_manifest(text)
        assert deployed.flags == flags, seed
        assert deployed.options == resolved, seed
        assert _body(k8s.text(deployed.flags, deployed.options)) == _body(text), seed
        kinds |= {line for line in text.splitlines() if line.startswith("kind: ")}
    assert len(kinds) == 11, kinds  # every kind of object came up


def test_another_process_writes_the_same_bytes():
    imports = "from phalanx.deploy import k8s; from tests.support.deploy_options import deployment"
    code = f"{imports}; print(k8s.text(*deployment(7)), end='')"
    for seed in ("1", "2"):
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        )  # fmt: skip
        assert completed.stdout == k8s.text(*deployment(7))


def _body(text: str) -> list[str]:
    """The lines that are no comment: those give reasons of automatic choices, which read options do not leave open."""
    return [line for line in text.splitlines() if not line.startswith("# ")]


def manifest() -> str:
    engine = EngineOptions.of(model="demo", tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    return k8s.text(ServeFlags(engine, ServeOptions()), K8sOptions.of(memory="8Gi", pod_replicas=2))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("maxUnavailable: 1", "maxUnavailable: 2", "PodDisruptionBudget"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "readOnlyRootFilesystem is False"),
        ("startupPolicy: LeaderCreated", "startupPolicy: LeaderReady", "startupPolicy"),
        ("periodSeconds: 2", "periodSeconds: 3", "periodSeconds is 3, and its options make 2"),
        ("kind: Service", "kind: Servise", "Servise"),
        ("  replicas: 2", "  replica: 2", "spec.replica is not understood"),
        ("  replicas: 2", "  replicas: '2'", "spec.replicas is not understood"),
        ("--tensor_parallel_size=2", "--tensor_parallel_sise=2", "no option of the server"),
        ("--nnodes=2", "--nnodes=3", "cannot be spread evenly"),
        ("memory: \"8Gi\"", "memory: \"8Go\"", "memory"),
        ("apiVersion: policy/v1", "apiVersion: policy/v1: x", "not valid YAML"),
        ("kind: LeaderWorkerSet", "kind: Deployment", "leaderworkerset.x-k8s.io"),
    ],
)  # fmt: skip
def test_a_changed_manifest_is_an_error_that_names_the_field(old, new, problem):
    text = manifest()
    assert old in text
    with pytest.raises(OptionError, match=problem):
        read_manifest(text.replace(old, new, 1))


def test_what_is_no_manifest():
    for text in ("", "[]", "a: 1", "- 1"):
        with pytest.raises(OptionError):
            read_manifest(text)
