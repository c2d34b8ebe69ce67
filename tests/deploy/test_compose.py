# SPDX-License-Identifier: Apache-2.0
"""The Compose file runs the container of a pod on one host; what one host cannot run is an error."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy import compose
from phalanx.deploy.options import ComposeOptions, quantity
from phalanx.deploy.serve_flags import ServeFlags, read_arguments
from phalanx.errors import OptionError
from phalanx.version import __version__
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
    assert {"--host=::", "--port=8080", "--tensor_parallel_size=2"} <= set(service["command"])
    assert service["ports"] == ["127.0.0.1:8080:8080"]
    assert service["user"] == "65534:65534"
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["volumes"] == ["cache:/cache"]
    assert "cache" in document["volumes"]
    assert int(service["shm_size"]) >= 2 * (128 << 20)
    assert int(service["mem_limit"]) == quantity("64Gi")
    assert int(service["stop_grace_period"].removesuffix("s")) > 40 + 16
    command, *arguments = service["healthcheck"]["test"]
    assert (command, arguments[:2]) == ("CMD", ["python3", "-m"])
    assert find_spec(arguments[2]) is not None


def test_places_of_the_host_and_a_key():
    document = written(
        flags(model="70b", device="cpu"), model_path="/data", cache_path="/c", key_file="key", publish="::", hub_token=True
    )
    service = document["services"]["model-70b"]
    assert service["command"][0] == "/models/70b"
    # Docker would make a missing folder for root, whose files the container's user may not write.
    stays = {"create_host_path": False}
    assert service["volumes"] == [
        {"type": "bind", "source": "/c", "target": "/cache", "bind": stays},
        {"type": "bind", "source": "/data", "target": "/models", "bind": stays, "read_only": True},
    ]
    assert service["secrets"] == ["api-key"]
    assert document["secrets"] == {"api-key": {"file": "key"}}
    assert "--api_key_file=/run/secrets/api-key" in service["command"]
    assert service["ports"] == ["[::]:8000:8000"]
    assert service["environment"]["HF_TOKEN"] == "${HF_TOKEN}"
    assert "deploy" not in service
    assert "volumes" not in document


def test_the_file_says_where_the_image_comes_from():
    text = compose.text(flags(), ComposeOptions.of())
    assert f"# image: no registry has it; in a checkout: docker build -t phalanx:{__version__} .\n" in text
    assert "# image" not in compose.text(flags(), ComposeOptions.of(image="registry.example/phalanx:1"))


def test_the_file_says_how_to_make_the_cache():
    text = compose.text(flags(), ComposeOptions.of(cache_path="/my cache"))
    assert "# cache_path must exist: sudo install -d -o 65534 -g 65534 '/my cache'\n" in text
    assert "cache_path" not in compose.text(flags(), ComposeOptions.of())


@pytest.mark.parametrize("text", TEXTS)
def test_compose_replaces_nothing_in_texts(text):
    """`$` would begin a variable."""
    service = written(flags(served_model_name=text), env=(f"A={text}",))["services"]["demo"]
    assert service["environment"]["A"].replace("$$", "") == text.replace("$", "")
    server = read_arguments(service["command"])
    assert server.serving.served_model_name == text


@pytest.mark.parametrize(
    ("server", "options", "problem"),
    [
        ({"pipeline_parallel_size": 2, "nnodes": 2}, {}, "describes one host"),
        ({"model": "./here"}, {}, "--model_path"),
        ({}, {"memory": "1Gi"}, "is not above shm_size"),
        ({"kv_host_memory": 64 << 30}, {"memory": "64Gi"}, "is not above shm_size=.* and kv_host_memory=68,719,476,736 together"),
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
