# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster as a place for ranks: the connection to it, its hosts, and a placement group with one bundle per host.

What cannot be placed is an error within `PLACEMENT_SECONDS`, which names the resource and the hosts. Ray itself waits for ever.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.config.sources import ray_address
from phalanx.errors import LayoutError, OptionError
from phalanx.log import get_logger
from phalanx.version import install_extra

logger = get_logger(__name__)

PLACEMENT_SECONDS = 4.0
"""How long hosts may take to appear and to be free: a worker host joins some seconds after `ray start`."""
MAKING_SECONDS = 30.0
"""How much longer Ray may take to make a group that has its resources: hosts under load answer late."""
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 3.0
_REMOVAL_SECONDS = 1.0
_WITHOUT_RESOURCES = {"NO_RESOURCES", "INFEASIBLE"}
"""Ray's words (PlacementGroupStats.SchedulingState) for a group that nobody has room for."""


@dataclass(frozen=True)
class RayHost:
    """A live host of the cluster. resources: in all; free: of these, what nobody has reserved. address: Ray's, of this host."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    free: Mapping[str, float]

    def has(self, need: Mapping[str, float], of: str = "resources") -> bool:
        return all(getattr(self, of).get(name, 0.0) >= amount for name, amount in need.items())


def need_of_host(device: str, ranks: int) -> dict[str, float]:
    """What one host reserves for its ranks: a GPU each, or on CPU a core each."""
    return {"GPU" if device == "cuda" else "CPU": float(ranks)}


def impossible(hosts: Sequence[RayHost], nodes: int, need: Mapping[str, float]) -> LayoutError | None:
    """The error where these hosts cannot hold `nodes` bundles of `need`, each on a host of its own; None where they can now.

    It names the resource and every host with what it has.
    """
    able = [host for host in hosts if host.has(need)]
    free = [host for host in able if host.has(need, "free")]
    if len(free) >= nodes:
        return None
    resources = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
    listed = "; ".join(
        f"{host.address}: "
        + ", ".join(f"{host.resources.get(name, 0.0):g} {name} ({host.free.get(name, 0.0):g} free)" for name in need)
        for host in sorted(hosts, key=lambda host: _sortable(host.address))
    )
    noun = "host" if len(able) == 1 else "hosts"
    if len(able) < nodes:
        why = f"only {len(able)} {noun} of the Ray cluster {'has' if len(able) == 1 else 'have'} {resources}"
        cure = "run `ray start --address=HEAD:6379` on more hosts, or choose a smaller tp_size or another num_workers"
    else:
        why = f"only {len(free)} of the {len(able)} {noun} with {resources} {'has' if len(free) == 1 else 'have'} them free"
        cure = "end what holds them (`ray status` shows it), or add hosts"
    return LayoutError(
        f"no placement group: {nodes} host{'s' * (nodes != 1)} with {resources} each",
        held=listed or "the cluster has no live host", why=why, next=cure,
    )  # fmt: skip


def in_order(hosts: Sequence[RayHost], first: str) -> list[RayHost]:
    """The hosts by address, so that a run repeats; the one at address `first`, where the engine runs, leads if it is among them."""
    return sorted(hosts, key=lambda host: (host.address != first, _sortable(host.address)))


def _sortable(address: str) -> tuple[int, int, str]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, 0, address
    return parsed.version, int(parsed), ""


def connect() -> None:
    """Connect this process to the Ray cluster of this host, unless it is connected.

    Raises OptionError without the package ray, and LayoutError where there is no cluster or its head does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            "launcher='ray' needs the package ray", why=str(error), next=f"run on every host: {install_extra('ray')}"
        ) from None
    if ray.is_initialized():
        return
    address = ray_address()
    if address is None:
        raise LayoutError(
            "this host belongs to no Ray cluster", why="RAY_ADDRESS is not set, and `ray start` has not run here",
            next="run `ray start --head --port=6379` on one host, and `ray start --address=HEAD:6379` on the others",
        )  # fmt: skip
    _require_answer(address)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level="warning", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LayoutError(
            f"this process cannot join the Ray cluster at {address}", why=" ".join(str(error).split()),
            next="run `ray start --address=...` on this host; `ray status` must work here",
        ) from None  # fmt: skip
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # ray.init puts its own in the place of the engine's


def _require_answer(address: str) -> None:
    """Raise LayoutError where nothing listens at the cluster's address: ray.init would try for a minute."""
    if address.startswith("ray://"):
        raise LayoutError(
            f"RAY_ADDRESS={address} is an address of Ray Client", why="ranks connect to this host without Ray",
            next="run this command on a host of the cluster",
        )  # fmt: skip
    why = head_silent(address)
    if why is not None:
        raise LayoutError(
            f"the head of the Ray cluster at {address} does not answer", why=why,
            next="start it (`ray start --head`), or give --launcher local to use no Ray",
        )  # fmt: skip


def head_silent(address: str | None = None) -> str | None:
    """Why the cluster's head does not accept a connection at `address` (None: the one of this process); None where it does."""
    if address is None:
        import ray

        address = str(ray.get_runtime_context().gcs_address)
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def live_hosts() -> list[RayHost]:
    """The live hosts of the cluster that this process is connected to."""
    import ray
    from ray._private import state

    free = state.available_resources_per_node()
    return [
        RayHost(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def wait_for_hosts(nodes: int, need: Mapping[str, float], deadline: float) -> list[RayHost]:
    """The live hosts, once enough of them can hold a bundle of `need`. Raises LayoutError at `deadline` (time.monotonic())."""
    logged = False
    while True:
        hosts = live_hosts()
        error = impossible(hosts, nodes, need)
        if error is None:
            return hosts
        if time.monotonic() >= deadline:
            raise error
        if not logged:
            logger.warning("waiting for hosts of the Ray cluster: %s", error)
            logged = True
        time.sleep(_POLL_SECONDS)


def place(nodes: int, need: Mapping[str, float], deadline: float) -> tuple[Any, list[tuple[RayHost, int]]]:
    """A placement group with one bundle per host, and each node's host and bundle, in the order of the nodes.

    Raises LayoutError at `deadline` (time.monotonic()) where the resources are not free. Where they are, and Ray makes no group,
    that is logged at `deadline`, and the LayoutError comes MAKING_SECONDS later. No group is left behind then.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    hosts = wait_for_hosts(nodes, need, deadline)
    logged = False
    group = placement_group([dict(need) for _ in range(nodes)], strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    while True:
        table = placement_group_table(group)
        if table["state"] == "CREATED":
            break
        state = table["stats"]["scheduling_state"]
        late = time.monotonic() - deadline
        if late >= 0 and not logged and state not in _WITHOUT_RESOURCES:
            logger.warning(
                "Ray has not made the placement group, although its resources are free; it says %s; hosts: %s; waiting for %.0f s",
                state, ", ".join(host.address for host in hosts), MAKING_SECONDS,
            )  # fmt: skip
            logged = True
        if late >= (0.0 if state in _WITHOUT_RESOURCES else MAKING_SECONDS):
            remove_placement_group(group)
            time.sleep(_REMOVAL_SECONDS)  # a group that is being made has its resources already: they are not somebody else's
            raise impossible(live_hosts(), nodes, need) or LayoutError(
                "no placement group was made", held=f"Ray says {state}, {time.monotonic() - deadline:.0f} s after its time",
                why="hosts of the cluster do not answer, or something else took the resources meanwhile",
                next="try again; `ray status` shows who holds them",
            )  # fmt: skip
        time.sleep(_POLL_SECONDS)
    bundles = {node_id: bundle for bundle, node_id in table["bundles_to_node_id"].items()}
    placed = in_order([host for host in hosts if host.node_id in bundles], ray.util.get_node_ip_address())
    return group, [(host, bundles[host.node_id]) for host in placed]
