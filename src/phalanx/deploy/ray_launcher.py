# SPDX-License-Identifier: Apache-2.0
"""`RayLauncher`: ranks on the hosts of a Ray cluster, from one command.

    phalanx serve MODEL --tp_size 8 --pp_size 2 --num_workers 2

Ray reserves the resources (one bundle per host, so that tensor-parallel ranks share a host) and starts one actor per host. The
actor runs an `executor.node.Node`, as a further host does that was started by hand: ranks, steps, results, heartbeats and the
notice of a lost host go over Phalanx's own authenticated sockets, and Ray carries nothing but the start.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx import log
from phalanx.config.home import ensure_home
from phalanx.config.options import EngineOptions
from phalanx.config.sources import adopt_variables, variables_to_pass_on
from phalanx.deploy import ray_cluster
from phalanx.deploy.ray_cluster import PLACEMENT_SECONDS, RayHost
from phalanx.errors import EngineError, NodeLost, PhalanxError
from phalanx.executor.launcher import EndedRank, HostRanks, host_ranks
from phalanx.executor.node import Node, own_address_towards

logger = log.get_logger(__name__)

_STOP_SECONDS = 1.0
"""How long the hosts' actors may take to end their ranks after the engine has told them, where no grace is given; and how long Ray
may take to end them then. An unreachable host takes all of it."""

_HEAD_SECONDS = 5.0  # between two looks at the head of the cluster
_LEFT_ALONE_SECONDS = 4.0
"""After this time an actor that has ended its ranks ends itself."""


class NodeAgent:
    """The Ray actor of one host: it runs the host's `Node` in the actor's process, which is the parent of the ranks."""

    def __init__(self, node: int) -> None:
        log.configure(f"phalanx node {node}")
        self._node: Node | None = None
        self._number = node

    def run(self, options: dict[str, Any], cluster_token: str | None, variables: dict[str, str]) -> dict[str, str] | None:
        """Host the ranks until the engine asks this node to end. The PhalanxError with which it ends otherwise, as `to_wire`."""
        ensure_home()
        for name, value in adopt_variables(variables).items():
            logger.warning("%s=%s of this host stays; the engine's host has %s", name, value, variables[name])
        try:
            self._node = Node(EngineOptions(**options, node_rank=self._number, cluster_token=cluster_token))
            self._node.host()
        except PhalanxError as error:
            return error.to_wire()
        finally:
            # The engine ends this actor; where it is unreachable, the actor must not keep its part of the placement group.
            threading.Timer(_LEFT_ALONE_SECONDS, os._exit, (0,)).start()
        return None

    def dump_stacks(self, rank: int) -> None:
        """See `executor.launcher.RankHandle`."""
        if self._node is not None:
            self._node.dump_stacks(rank)


@dataclass(frozen=True)
class RayRank:
    """A rank on a host of the cluster. `executor.launcher.RankHandle`; its process id is in the rank's own messages."""

    rank: int
    node: int
    address: str
    agent: Any

    @property
    def where(self) -> str:
        return f"node {self.node} at {self.address}"

    def dump_stacks(self) -> None:
        self.agent.dump_stacks.remote(self.rank)


class RayLauncher:
    """See `executor.launcher.ClusterLauncher`. Hosts are numbered by address; the engine's own leads where it is among them."""

    on_this_host = False

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._need = ray_cluster.need_of_host(options.device, len(host_ranks(options, 0).ranks))
        self._deadline = time.monotonic() + PLACEMENT_SECONDS
        self._group: Any = None
        self._hosts: list[RayHost] = []
        self._agents: list[Any] = []
        self._runs: list[Any] = []  # what each agent's run returns, by node
        self._errors: queue.SimpleQueue[PhalanxError] = queue.SimpleQueue()
        self._read, self._write = -1, -1
        self._stopped = False
        ray_cluster.connect()

    @classmethod
    def gpus_per_host(cls, options: EngineOptions) -> int:
        if options.device == "cpu":
            return 0
        ray_cluster.connect()
        return int(max((host.resources.get("GPU", 0.0) for host in ray_cluster.live_hosts()), default=0.0))

    def engine_address(self) -> str:
        """master_addr where it is given; else this host's address on the way to the cluster's other hosts."""
        if self._options.master_addr != EngineOptions.model_fields["master_addr"].default:
            return self._options.master_addr
        import ray

        own = str(ray.util.get_node_ip_address())
        others = [host.address for host in ray_cluster.in_order(ray_cluster.live_hosts(), own) if host.address != own]
        return own_address_towards(others[0]) if others else own

    def require_devices(self, ranks: HostRanks) -> None:
        ray_cluster.wait_for_hosts(self._options.nnodes, self._need, self._deadline)

    def start(self, ranks: HostRanks, config: Mapping[str, Any]) -> Mapping[int, RayRank]:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        try:
            self._group, placed = ray_cluster.place(self._options.nnodes, self._need, self._deadline)
            self._hosts = [host for host, _ in placed]
            self._agents = [self._agent(node, bundle) for node, (_, bundle) in enumerate(placed)]
            options = {**config["options"], "launcher": "local"}
            options.pop("node_rank")
            variables = variables_to_pass_on()
            self._runs = [agent.run.remote(options, config["cluster_token"], variables) for agent in self._agents]
        except BaseException:
            self.stop(0)
            raise
        threading.Thread(target=self._watch, name="watch of the Ray actors", daemon=True).start()
        handles: dict[int, RayRank] = {}
        for node, (host, agent) in enumerate(zip(self._hosts, self._agents, strict=True)):
            own = host_ranks(self._options, node).ranks
            logger.info("node %d is %s, with ranks %s", node, host.address, list(own))
            handles |= {rank: RayRank(rank, node, host.address, agent) for rank in own}
        return handles

    def _agent(self, node: int, bundle: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = {"num_cpus": self._need.get("CPU", 0.0), "num_gpus": self._need.get("GPU", 0.0)}
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = ray.remote(NodeAgent).options(
            **resources, scheduling_strategy=place, max_concurrency=2, max_restarts=0, max_task_retries=0
        )  # fmt: skip
        return actor.remote(node)

    def _watch(self) -> None:
        """Wait for the end of each actor, and keep the error with which it ended. A lost head is logged: Ray may bring it back, and
        ends this process and its hosts' after a minute where it does not."""
        import ray

        waiting = list(self._runs)
        silent = False
        while waiting and not self._stopped:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=_HEAD_SECONDS)
            why = ray_cluster.head_silent()
            if why is not None and not silent:
                logger.error("the head of the Ray cluster does not answer: %s; Ray ends this engine if it stays away", why)
            silent = why is not None
            for run in ended:
                error = self._end_of(run)
                if error is not None and not self._stopped:
                    self._errors.put(error)
                    with contextlib.suppress(OSError):  # closed
                        os.write(self._write, b".")

    def _end_of(self, run: Any) -> PhalanxError | None:
        import ray

        node = self._runs.index(run)
        name = f"node {node} ({self._hosts[node].address})"
        try:
            wire = ray.get(run)
        except ray.exceptions.RayTaskError as error:
            return EngineError(f"{name} failed", why=_last_line(error), next="its traceback is in Ray's log of that host")
        except ray.exceptions.RayError as error:
            return actor_error(name, " ".join(str(error).split()))
        if wire is None:
            return None
        return PhalanxError.from_wire({**wire, "failure": f"{name}: {wire['failure']}"})

    def ended(self) -> list[EndedRank]:
        with contextlib.suppress(OSError):
            os.read(self._read, 4096)
        with contextlib.suppress(queue.Empty):
            raise self._errors.get_nowait()
        return []

    def fileno(self) -> int:
        return self._read

    def stop(self, grace: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        # Where Ray's head is gone, its calls wait for it: the engine does not.
        ending = threading.Thread(target=self._end, args=(max(grace, _STOP_SECONDS),), name="end of the Ray actors", daemon=True)
        ending.start()
        ending.join(max(grace, _STOP_SECONDS) + _STOP_SECONDS)
        if self._read >= 0:
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1

    def _end(self, seconds: float) -> None:
        """Wait for the actors, which the engine has told to end, and release what is reserved."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=seconds)
        for agent in self._agents:
            with contextlib.suppress(Exception):
                ray.kill(agent)
        with contextlib.suppress(Exception):
            if self._group is not None:
                remove_placement_group(self._group)


def actor_error(name: str, reason: str) -> PhalanxError:
    """The error for an actor that ended without a word; name: "node 1 (10.0.0.2)". reason: what Ray says."""
    imports = re.findall(r"(?:ModuleNotFoundError|ImportError): .*?(?=$| File )", reason)
    if imports:
        return EngineError(
            f"{name} cannot run Phalanx", why=imports[-1],
            next="install the same phalanx for the Python that runs `ray start` there",
        )  # fmt: skip
    return NodeLost(f"{name} is gone", held=f"Ray reports: {reason[:300]}", why="the host, its Ray or the actor was ended")


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]
