# SPDX-License-Identifier: Apache-2.0
"""The Compose file runs the container of a pod on one host; what one host cannot run is an error."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy import compose
from phalanx.deploy.options import ComposeOptions, quantity
from phalanx.deploy.serve_flags import ServeFlags, read_arguments
from phalanx.errors import OptionError
from tests.support.deploy_options import TEXTS

# The fields of the Compose specification that a service of ours may have.
FIELDS = {
    "image", "entrypoint", "command", "environment", "ports", "volumes", "user", "read_only", "tmpfs", "cap_drop", "security_opt",
    "init", "shm_size", "restart", "stop_grace_period", "healthcheck", "mem_limit", "secrets", "deploy",
}  # fmt: skip


def flags(**values: Any) -> ServeFlags:
    engine = {name: value for name, value in values.items() if name in EngineOptions.model_fields}
    serving = {name: value for name, value in values.items() if name not in engine}
    return ServeFlags(EngineOptions.of(**{"model": "demo", **engine}), ServeOptions.of(**serving))


def written(server: ServeFlags, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(compose.text(server, ComposeOptions.of(**options)))
    assert set(document) <= {"name", "services", "volumes", "secrets"}
    (service,) = document["services"].values()
    assert set(service) <= FIELDS
    return document


def test_a_server_on_gpus():
    document = written(flags(model="org/Model-8B", tensor_parallel_size=2, port=8080, shutdown_timeout=40.0), memory="64Gi")
    service = document["services"]["model-8b"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert service["command"][0] == "org/Model-8B"
    assert {"--host=0.0.0.0", "--port=8080", "--tensor_parallel_size=2"} <= set(service["command"])
    assert service["ports"] == ["127.0.0.1:8080:8080"]
    assert service["user"] == "65534:65534"
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["volumes"] == ["cache:/cache"]
    assert "cache" in document["volumes"]
    assert int(service["shm_size"]) >= 2 * (128 << 20)
    assert int(service["mem_limit"]) == quantity("64Gi")
    assert int(service["stop_grace_period"].removesuffix("s")) > 40 + 16
    assert ":8080/ready" in service["healthcheck"]["test"][-1]
    compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")


def test_places_of_the_host_and_a_key():
    document = written(
        flags(model="70b", device="cpu"), model_path="/data", cache_path="/c", key_file="key", publish="::", hub_token=True
    )
    service = document["services"]["model-70b"]
    assert service["command"][0] == "/models/70b"
    assert service["volumes"] == ["/c:/cache", "/data:/models:ro"]
    assert service["secrets"] == ["api-key"]
    assert document["secrets"] == {"api-key": {"file": "key"}}
    assert "--api_key_file=/run/secrets/api-key" in service["command"]
    assert service["ports"] == ["[::]:8000:8000"]
    assert service["environment"]["HF_TOKEN"] == "${HF_TOKEN}"
    assert "deploy" not in service
    assert "volumes" not in document


@pytest.mark.parametrize("text", TEXTS)
def test_compose_replaces_nothing_in_texts(text):
    """`$` would begin a variable."""
    service = written(flags(served_model_name=text), env=(f"A={text}",))["services"]["demo"]
    assert service["environment"]["A"].replace("$$", "") == text.replace("$", "")
    server, _ = read_arguments(service["command"], folder=False, own={"host", "kernel_cache_dir"})
    assert server.serving.served_model_name == text


@pytest.mark.parametrize(
    ("server", "options", "problem"),
    [
        ({"pipeline_parallel_size": 2, "nnodes": 2}, {}, "describes one host"),
        ({"model": "./here"}, {}, "--model_path"),
        ({}, {"memory": "1Gi"}, "is not above shm_size"),
        ({}, {"startup_seconds": 10}, "below start_timeout"),
        ({}, {"publish": "a b"}, "publish="),
        ({}, {"env": ("A=1", "A=2")}, "env has A twice"),
        ({"api_key": "secret"}, {}, "api_key cannot"),
        ({}, {"model_path": "relative"}, "absolute path"),
    ],
)
def test_odd_options_are_errors(server, options, problem):
    with pytest.raises(OptionError, match=problem):
        compose.text(flags(**server), ComposeOptions.of(**options))
