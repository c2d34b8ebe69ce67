# SPDX-License-Identifier: Apache-2.0
"""The application of a RayService, as Ray Serve builds it; where there are no replicas for it, `--with ray` is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.deploy import ray_application

MISSING = [name for name in (ray_application.REPLICAS, "ray") if importlib.util.find_spec(name) is None]


def test_without_replicas_the_manifest_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(ray_application, "REPLICAS", "phalanx.deploy.no_such_module")
    assert main(["deploy", "k8s", "demo", "--with", "ray", "--image", "phalanx:1"]) == 2
    assert "with=ray is not possible" in capsys.readouterr().err


@pytest.mark.skipif(bool(MISSING), reason=f"not run: needs {' and '.join(MISSING)}")
@pytest.mark.filterwarnings("ignore")  # of Ray's own imports
def test_build_makes_an_application():
    arguments = ["demo", "--kernel_cache_dir=/cache/kernels", "--start_timeout=900", "--device=cpu", "--tensor_parallel_size=2"]
    application: Any = ray_application.build({"arguments": arguments, "servers": 2})
    deployment = application._bound_deployment
    assert deployment.num_replicas == 2
    assert deployment.ray_actor_options["num_cpus"] == 2
    engine, serving, variables = deployment.init_args
    assert (engine["tensor_parallel_size"], engine["device"], engine["start_timeout"]) == (2, "cpu", 900.0)
    assert serving["port"] == 8000
    assert variables == {}


def test_arguments_that_no_replica_can_have_are_errors():
    if MISSING:
        pytest.skip(f"not run: needs {' and '.join(MISSING)}")
    with pytest.raises(ValueError, match="node_rank"):
        ray_application.build({"arguments": ["demo", "--node_rank=1"], "servers": 1})
