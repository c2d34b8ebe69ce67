# SPDX-License-Identifier: Apache-2.0
"""A Compose file of a server on one host, as pure text: the same container as a pod's (user, read-only root, probes, drain)."""

from __future__ import annotations

import shlex
from typing import Any

from phalanx.deploy import yaml_text
from phalanx.deploy.budget import require_memory, shm_quantity, startup
from phalanx.deploy.k8s import name_of
from phalanx.deploy.options import ComposeOptions, quantity, require_once
from phalanx.deploy.pod import CLOSE_SECONDS, USER, drain_seconds, on_gpu, ranks_per_pod
from phalanx.deploy.serve_flags import CACHE, KERNELS, MODELS_MOUNT, ServeFlags, arguments, escaped, require_portable
from phalanx.errors import OptionError

KEY_FILE = "/run/secrets/api-key"
HEALTH_CHECK = ["python3", "-m", "phalanx.health.ready"]


def text(flags: ServeFlags, options: ComposeOptions) -> str:
    """The Compose file. Raises OptionError or LayoutError for options that one host cannot run."""
    require_portable(flags, folder=options.model_path is not None)
    require_once("env", options.env)
    if flags.engine.nnodes > 1:
        raise OptionError(
            f"nnodes={flags.engine.nnodes} cannot be an option of a Compose file", why="it describes one host",
            next="use phalanx deploy k8s, or start phalanx serve on each host",
        )  # fmt: skip
    ranks, gpu = ranks_per_pod(flags), on_gpu(flags)
    shm = options.shm_size or shm_quantity(ranks, gpu=gpu)
    require_memory(options.memory, shm, flags.engine)
    source = "a folder of the node" if options.model_path else "" if flags.engine.model == "demo" else "the Hub"
    budget = startup(flags.engine, source)
    seconds = options.startup_seconds or budget.seconds
    if seconds < flags.engine.start_timeout:
        raise OptionError(f"startup_seconds={seconds} is below start_timeout={flags.engine.start_timeout:g}", next="raise it")
    comments = [f"startup_seconds = {seconds}: {budget.reason}"] if options.startup_seconds is None else []
    if options.image == type(options).model_fields["image"].default:
        comments.append(f"image: no registry has it; in a checkout: docker build -t {options.image} .")
    if options.cache_path is not None:
        comments.append(f"cache_path must exist: sudo install -d -o {USER} -g {USER} {shlex.quote(options.cache_path)}")
    name = options.name or name_of(flags.engine.model)
    service = _service(flags, options, shm=shm, seconds=seconds)
    document: dict[str, Any] = {"name": name, "services": {name: service}}
    if options.cache_path is None:
        document["volumes"] = {"cache": {}}
    if options.key_file is not None:
        document["secrets"] = {"api-key": {"file": escaped(options.key_file)}}
    return yaml_text.dumps([document], comments=comments)


def _service(flags: ServeFlags, options: ComposeOptions, *, shm: str, seconds: int) -> dict[str, Any]:
    port = flags.serving.port
    own = {"host": "::", "kernel_cache_dir": KERNELS, **({"api_key_file": KEY_FILE} if options.key_file else {})}
    environment = {"HOME": "/tmp", "HF_HOME": f"{CACHE}/huggingface", **({"HF_TOKEN": "${HF_TOKEN}"} if options.hub_token else {})}
    environment |= {name: escaped(value) for name, value in (each.split("=", 1) for each in options.env)}
    volumes: list[Any] = [_bind(options.cache_path, CACHE) if options.cache_path else f"cache:{CACHE}"]
    if options.model_path is not None:
        volumes.append({**_bind(options.model_path, MODELS_MOUNT), "read_only": True})
    service: dict[str, Any] = {
        "image": options.image, "entrypoint": ["phalanx", "serve"],
        "command": arguments(flags, folder=options.model_path is not None, own=own), "environment": environment,
        "ports": [f"{_address(options.publish)}:{port}:{port}"], "volumes": volumes, "user": f"{USER}:{USER}", "read_only": True,
        "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "init": True,
        "shm_size": str(int(quantity(shm))), "restart": "unless-stopped",
        "stop_grace_period": f"{drain_seconds(flags) + CLOSE_SECONDS}s",
        "healthcheck": {
            "test": ["CMD", *HEALTH_CHECK], "interval": "10s", "timeout": "10s", "retries": 3,
            "start_period": f"{seconds}s",
        },
    }  # fmt: skip
    if options.memory is not None:
        service["mem_limit"] = str(int(quantity(options.memory)))
    if options.key_file is not None:
        service["secrets"] = ["api-key"]
    if on_gpu(flags):
        devices = [{"driver": "nvidia", "count": ranks_per_pod(flags), "capabilities": ["gpu"]}]
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    return service


def _bind(path: str, target: str) -> dict[str, Any]:
    """A folder of the host, which must exist: Docker would make it for root, and the container's user could not write there."""
    return {"type": "bind", "source": escaped(path), "target": target, "bind": {"create_host_path": False}}


def _address(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
