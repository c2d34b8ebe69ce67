# SPDX-License-Identifier: Apache-2.0
"""A Compose file of a server on one host, as pure text: the same container as a pod's (user, read-only root, probes, drain)."""

from __future__ import annotations

from typing import Any

from phalanx.deploy import yaml_text
from phalanx.deploy.budget import shm_quantity, startup
from phalanx.deploy.k8s import name_of
from phalanx.deploy.objects import USER
from phalanx.deploy.options import ComposeOptions, quantity, require_once
from phalanx.deploy.pod import CLOSE_SECONDS, drain_seconds, on_gpu, ranks_per_pod
from phalanx.deploy.serve_flags import CACHE, KERNELS, MODELS_MOUNT, ServeFlags, arguments, require_portable
from phalanx.errors import OptionError

KEY_FILE = "/run/secrets/api-key"
_READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/ready', timeout=5)"


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
    if options.memory is not None and quantity(options.memory) <= quantity(shm):
        raise OptionError(f"memory={options.memory} is not above shm_size={shm}", why="/dev/shm counts towards it")
    source = "a folder of the node" if options.model_path else "" if flags.engine.model == "demo" else "the Hub"
    budget = startup(flags.engine, source)
    seconds = options.startup_seconds or budget.seconds
    if seconds < flags.engine.start_timeout:
        raise OptionError(f"startup_seconds={seconds} is below start_timeout={flags.engine.start_timeout:g}", next="raise it")
    comments = [f"startup_seconds = {seconds}: {budget.reason}"] if options.startup_seconds is None else []
    name = options.name or name_of(flags.engine.model)
    service = _service(flags, options, shm=shm, seconds=seconds)
    document: dict[str, Any] = {"name": name, "services": {name: service}}
    if options.cache_path is None:
        document["volumes"] = {"cache": {}}
    if options.key_file is not None:
        document["secrets"] = {"api-key": {"file": _escaped(options.key_file)}}
    return yaml_text.dumps([document], comments=comments)


def _service(flags: ServeFlags, options: ComposeOptions, *, shm: str, seconds: int) -> dict[str, Any]:
    port = flags.serving.port
    own = {"host": "0.0.0.0", "kernel_cache_dir": KERNELS, **({"api_key_file": KEY_FILE} if options.key_file else {})}
    environment = {"HOME": "/tmp", "HF_HOME": f"{CACHE}/huggingface", **({"HF_TOKEN": "${HF_TOKEN}"} if options.hub_token else {})}
    environment |= {name: _escaped(value) for name, value in (each.split("=", 1) for each in options.env)}
    volumes = [f"{_escaped(options.cache_path or 'cache')}:{CACHE}"]
    if options.model_path is not None:
        volumes.append(f"{_escaped(options.model_path)}:{MODELS_MOUNT}:ro")
    service: dict[str, Any] = {
        "image": options.image, "entrypoint": ["phalanx", "serve"],
        "command": arguments(flags, folder=options.model_path is not None, own=own), "environment": environment,
        "ports": [f"{_address(options.publish)}:{port}:{port}"], "volumes": volumes, "user": f"{USER}:{USER}", "read_only": True,
        "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "init": True,
        "shm_size": str(int(quantity(shm))), "restart": "unless-stopped",
        "stop_grace_period": f"{drain_seconds(flags) + CLOSE_SECONDS}s",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _READY.format(port=port)], "interval": "10s", "timeout": "10s", "retries": 3,
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


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _address(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
