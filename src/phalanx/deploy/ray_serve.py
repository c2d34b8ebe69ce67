# SPDX-License-Identifier: Apache-2.0
"""`phalanx deploy ray-serve`: replicas of `phalanx serve` behind Ray Serve, which scales and replaces them.

Each replica is an actor that starts the server as its child and hands requests to it: the API, its streams and its refusals are
those of `phalanx serve`. A server on one host uses the GPUs that Ray gives the replica; one on several hosts makes a placement
group of its own (`deploy.ray_launcher`).
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import httpx

from phalanx import launch, log
from phalanx.config.options import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import adopt_variables, variables_to_pass_on
from phalanx.deploy import ray_cluster
from phalanx.deploy.proxy import Proxy, Receive, Send
from phalanx.deploy.server_child import MODULE
from phalanx.errors import EngineError, OptionError
from phalanx.version import install_extra

logger = log.get_logger(__name__)

_LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to connections, and to whoever asks for any (from 32768 on), and those of Kubernetes's NodePorts."""
_PROBE_SECONDS = 5.0
_STOP_MARGIN_SECONDS = 10.0


@dataclass(frozen=True)
class Scaling:
    """How many replicas there are. target: running requests per replica that Ray Serve aims at, between fewest and most."""

    fewest: int = 1
    most: int = 1
    target: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fewest <= self.most or self.most < 1:
            raise OptionError(
                f"min_replicas={self.fewest} and max_replicas={self.most} do not fit", next="use 0 <= min_replicas <= max_replicas"
            )
        if self.target is not None and self.target < 1:
            raise OptionError(f"target_requests={self.target} is not valid", why="it must be at least 1")


def require_deployable(engine: EngineOptions, serving: ServeOptions) -> None:
    """Raise OptionError for options that a replica cannot have: what Ray Serve sets itself, and secrets, which Ray would store."""
    refused = {
        "node_rank": "each replica runs the command of host 0", "master_addr": "each replica finds its own",
        "launcher": "Ray starts the ranks", "cluster_token": "each replica makes its own",
        "cluster_token_file": "each replica makes its own", "api_key": "Ray would store it: give api_key_file, of every host",
    }  # fmt: skip
    for name, why in refused.items():
        options: EngineOptions | ServeOptions = engine if name in EngineOptions.model_fields else serving
        if getattr(options, name) != type(options).model_fields[name].default:
            raise OptionError(f"{name} is not possible with ray-serve", why=why, next="leave it out")


def deployment_options(engine: EngineOptions, serving: ServeOptions, scaling: Scaling, device: str) -> dict[str, Any]:
    """The options of the Ray Serve deployment. device: "cuda" or "cpu". A replica of several hosts reserves nothing itself: its
    placement group does."""
    resource = "num_gpus" if device == "cuda" else "num_cpus"
    actor = {"num_cpus": 0, **({resource: engine.replicas * engine.world_size} if engine.nnodes == 1 else {})}
    queue = serving.max_num_queued_reqs
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        # The server itself has a queue, and refuses what exceeds it: Ray Serve holds nothing back.
        "max_ongoing_requests": engine.max_batch_size + (8 * engine.max_batch_size if queue is None else queue) + 8,
        "graceful_shutdown_timeout_s": serving.shutdown_timeout + _STOP_MARGIN_SECONDS,
        "health_check_period_s": 5.0, "health_check_timeout_s": 15.0,
    }  # fmt: skip
    if scaling.fewest == scaling.most:
        return {**options, "num_replicas": scaling.most}
    return {
        **options,
        "autoscaling_config": {
            "min_replicas": scaling.fewest, "max_replicas": scaling.most, "initial_replicas": max(scaling.fewest, 1),
            "target_ongoing_requests": scaling.target or engine.max_batch_size,
        },
    }  # fmt: skip


class Replica:
    """One replica: the server as a child, and its health. Ray Serve takes the end of the constructor for readiness."""

    proxy: Proxy | None = None  # of this process, which has one replica

    def __init__(self, engine: dict[str, Any], serving: dict[str, Any], variables: dict[str, str]) -> None:
        log.configure("phalanx replica")
        for name, value in adopt_variables(variables).items():
            logger.warning("%s=%s of this host stays; where it was deployed from, it is %s", name, value, variables[name])
        options = EngineOptions(**engine)
        port = free_ports()
        if options.nnodes > 1:
            engine = {**engine, "launcher": "ray", "master_port": free_ports(2)}
        config = {"engine": engine, "serving": {**serving, "host": _LOOPBACK, "port": port}}
        self._url = f"http://{_LOOPBACK}:{port}"
        self._grace = float(serving["shutdown_timeout"]) + _STOP_MARGIN_SECONDS / 2
        self._server = launch.start(MODULE, config, "phalanx server")
        try:
            self._wait_ready(time.monotonic() + options.start_timeout)
        except BaseException:
            launch.stop([self._server], 0)
            raise
        Replica.proxy = Proxy(self._url)

    def _wait_ready(self, deadline: float) -> None:
        while True:
            self._require_alive()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/ready", timeout=_PROBE_SECONDS, trust_env=False).status_code == 200:
                    return
            if time.monotonic() > deadline:
                raise EngineError("the server of this replica is not ready in time", next="raise start_timeout, or see its log")
            time.sleep(0.5)

    def _require_alive(self) -> None:
        if not self._server.alive:
            code = self._server.process.returncode
            raise EngineError(
                f"the server of this replica {launch.exit_words(code)}", next="its log lines are in Ray's log of this replica"
            )

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica when this raises."""
        self._require_alive()
        httpx.get(f"{self._url}/live", timeout=_PROBE_SECONDS, trust_env=False).raise_for_status()

    def __del__(self) -> None:
        """Called by Ray Serve when requests have ended, or their time is up."""
        if hasattr(self, "_server"):
            launch.stop([self._server], self._grace)


async def forward(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """The ASGI application of a replica's process."""
    if Replica.proxy is not None:
        await Replica.proxy(scope, receive, send)


class Forward:
    """`forward` as Ray Serve takes it: it calls a plain function for an application."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await forward(scope, receive, send)


def free_ports(count: int = 1) -> int:
    """The first of `count` consecutive TCP ports of this host that nobody has. Another process may take them before they are used:
    rarely, as they are none that the system gives to connections. Raises EngineError."""
    for _ in range(100):
        port = random.SystemRandom().choice(_PORTS)  # a seed may be what other processes have, too
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.socket()).bind(("", port + number))
            return port
    raise EngineError(f"no {count} consecutive ports of this host were free", why=f"100 of {_PORTS[0]} to {_PORTS[-1]} were tried")


def deploy(engine: EngineOptions, serving: ServeOptions, scaling: Scaling, *, name: str, route_prefix: str) -> str:
    """Deploy the application and wait until it runs; its URL. Raises OptionError, LayoutError, and EngineError when no replica
    starts."""
    require_deployable(engine, serving)
    ray_cluster.connect()
    serve = _ray_serve()
    device = engine.device if engine.device != "auto" else _device()
    need = ray_cluster.need_of_host(device, engine.replicas * engine.world_size // engine.nnodes)
    ray_cluster.wait_for_hosts(engine.nnodes, need, time.monotonic() + ray_cluster.PLACEMENT_SECONDS)
    deployment = serve.deployment(serve.ingress(Forward())(Replica)).options(
        name="server", **deployment_options(engine, serving, scaling, device)
    )  # fmt: skip
    values = engine.model_copy(update={"device": device}).model_dump(mode="json", exclude={"cluster_token", "cluster_token_file"})
    variables = {key: value for key, value in variables_to_pass_on().items() if "TOKEN" not in key}  # Ray stores them
    application = deployment.bind(values, serving.model_dump(mode="json", exclude={"api_key"}), variables)
    serve.start(http_options={"host": serving.host, "port": serving.port})
    try:
        serve.run(application, name=name, route_prefix=route_prefix)
    except RuntimeError as error:
        status = serve.status().applications.get(name)
        why = " ".join((status.message if status is not None else str(error)).split())
        with contextlib.suppress(Exception):
            serve.delete(name)
        raise EngineError(
            f"no replica of {name!r} runs", why=why[-600:], next="the server's own lines are in Ray's log of the replica"
        ) from None
    return f"http://{serving.host}:{serving.port}{route_prefix.rstrip('/')}"


def stop(name: str) -> None:
    """End an application, and its replicas. Raises OptionError for a name that Ray Serve does not know."""
    ray_cluster.connect()
    serve = _ray_serve()
    applications = serve.status().applications
    if name not in applications:
        raise OptionError(f"there is no application {name!r}", held=f"Ray Serve has {', '.join(applications) or 'none'}")
    serve.delete(name)


def _device() -> str:
    return "cuda" if any(host.resources.get("GPU", 0.0) >= 1 for host in ray_cluster.live_hosts()) else "cpu"


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise OptionError("ray-serve needs Ray Serve", why=str(error), next=f"run on every host: {install_extra('ray')}") from None
    return serve
