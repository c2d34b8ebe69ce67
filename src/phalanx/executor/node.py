# SPDX-License-Identifier: Apache-2.0
"""`Node`: the ranks of a further host. It starts them, reports their death to the engine, and ends them when the engine is gone.

Node and engine notice a cut link by the silence of the other: no reset comes through it. A killed engine is noticed at once, by the
reset of the connection.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.config.cluster_token import SECRET_OPTIONS, read_cluster_token
from phalanx.config.host_facts import host_facts
from phalanx.config.locate import locate
from phalanx.config.options import EngineOptions
from phalanx.engine.resolve_options import resolve_options
from phalanx.engine.watch_clock import WatchClock
from phalanx.errors import NodeLost, OptionError, PhalanxError
from phalanx.executor import protocol
from phalanx.executor.heartbeat import NODE_TIMEOUT
from phalanx.executor.late_names import LOG_SECONDS, wait_for_name
from phalanx.executor.launcher import RankHandle, host_ranks, load_launcher
from phalanx.executor.protocol import HEARTBEAT_SECONDS, dealer
from phalanx.executor.rank_executor import SHUTDOWN_GRACE_SECONDS, bracketed
from phalanx.hardware.probe import address_towards
from phalanx.launch import exit_words
from phalanx.log import get_logger

log = get_logger(__name__)

MAX_REFUSALS = 5
"""Failed handshakes after which a node gives up. It tries again several times a second, while the engine may still be starting."""
_MONITORED = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip


def join(options: EngineOptions, *, local_rank: int = 0, joined: Callable[[], None] = lambda: None) -> int:
    """Host this node's ranks for an engine on node 0 (`options.master_addr`) until it ends; returns an exit status, 0 when the
    engine was asked to end.

    The options are those of node 0, except for `node_rank`; "auto" is resolved here as it is there. Raises OptionError,
    LayoutError or ModelError for options that cannot work, before anything starts.

    A master_addr that does not resolve is tried again for master_addr_timeout seconds. `joined` is called when the engine has
    answered.

    For `--node_rank` > 0, and for every torchrun process with RANK > 0. Under torchrun each process counts as a node with one
    rank: nnodes = WORLD_SIZE, node_rank = RANK, `local_rank` = LOCAL_RANK (the first GPU to use), master_addr = MASTER_ADDR, and
    master_port = MASTER_PORT + 1, since torchrun itself listens on MASTER_PORT.
    """
    _, resolved = resolve_options(options)
    wait_for_name(options.master_addr, options.master_addr_timeout)
    return Node(resolved.options, local_rank, joined).run()


def own_address_towards(host: str) -> str:
    """This host's address on the interface that leads to `host`, a name that resolves or an address. Raises OptionError without a
    route."""
    try:
        return address_towards(host)
    except OSError as error:
        raise OptionError(
            f"no route leads to master_addr={host}", why=error.strerror or str(error),
            next=f"check this host's network (`ip route get {host}`), or give an address of host 0 that it reaches",
        ) from None  # fmt: skip


class Node:
    """Hosts the ranks of `options.node_rank`. `local_rank`: which part of the host's GPUs belongs to this process."""

    def __init__(self, options: EngineOptions, local_rank: int = 0, joined: Callable[[], None] = lambda: None) -> None:
        self._options, self._joined = options, joined
        self._ranks = host_ranks(options, options.node_rank, local_rank=local_rank)
        self._launcher = load_launcher(options)
        self._launcher.require_devices(self._ranks)
        self._facts = host_facts(options, locate(options.model, options.revision))
        self._cluster_token = read_cluster_token(options)
        self._engine = f"tcp://{bracketed(options.master_addr)}:{options.master_port}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._refusals = 0
        self._handles: Mapping[int, RankHandle] = {}
        self._socket = dealer(
            self._context,
            self._engine,
            protocol.node_identity(self._ranks.node),
            self._cluster_token,
            max_frame=protocol.MAX_FRAME_TO_NODE,
            events=_MONITORED,
        )
        self._monitor = self._socket.get_monitor_socket()
        self._last_message: float | None = None
        self._watch = WatchClock()
        self._began = self._last_heartbeat = time.monotonic()
        self._next_line = self._began + LOG_SECONDS / 2

    def run(self) -> int:
        """Run until the engine ends. Returns 0 when it was asked to end, 1 when something went wrong (the log says what)."""
        try:
            self.host()
        except PhalanxError as error:
            log.error("node %d ends: %s", self._ranks.node, error)
            return 1
        return 0

    def host(self) -> None:
        """Host the ranks until the engine asks this node to end. Raises the PhalanxError with which it ends otherwise."""
        grace = 0.0
        try:
            address = own_address_towards(self._options.master_addr)
            self._handles = self._launcher.start(self._ranks, {
                "engine": self._engine, "peer": address if 0 in self._ranks.ranks else self._options.master_addr,
                "cluster_token": self._cluster_token,
                "options": self._options.model_dump(mode="json", exclude=SECRET_OPTIONS),
            })  # fmt: skip
            self._send(protocol.NodeHello(self._ranks.node, address, self._facts))
            log.info("node %d: ranks %s for the engine at %s", self._ranks.node, list(self._ranks.ranks), self._engine)
            self._serve()
            grace = SHUTDOWN_GRACE_SECONDS
        finally:
            self._launcher.stop(grace)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=200)
            self._context.term()

    def dump_stacks(self, rank: int) -> None:
        """Make the process of a rank of this node write the stacks of its threads to its log. From any thread."""
        if rank in self._handles:
            self._handles[rank].dump_stacks()

    def _serve(self) -> None:
        """Return when the engine was asked to end. Raise the error that it ends with, or NodeLost when it is gone."""
        poller = zmq.Poller()
        for waitable in (self._socket, self._monitor, self._launcher.fileno()):
            poller.register(waitable, zmq.POLLIN)
        while True:
            poller.poll(500)
            while self._socket.poll(0):
                message = protocol.decode_to_rank(self._socket.recv())
                if self._last_message is None:
                    self._joined()
                self._last_message = self._watch.look()
                if isinstance(message, protocol.Stop):
                    if message.error is not None:
                        raise PhalanxError.from_wire(message.error)
                    return
            self._report()
            self._check_engine()

    def _report(self) -> None:
        """Send the ranks that have ended, and this node's heartbeat when it is due."""
        for ended in self._launcher.ended():
            log.warning("rank %d %s", ended.rank, exit_words(ended.code))
            self._send(protocol.RankExit(self._ranks.node, ended.rank, ended.code))
        if time.monotonic() - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat = time.monotonic()
            self._send(protocol.NodeHeartbeat(self._ranks.node))

    def _check_engine(self) -> None:
        """Raise NodeLost when the engine does not answer."""
        now = time.monotonic()
        where = f"the engine at {self._engine} (node 0)"
        while self._monitor.poll(0):
            self._connection_event(int(recv_monitor_message(self._monitor)["event"]), where)
        if self._last_message is None:
            limit = self._options.start_timeout
            if now >= self._next_line:
                self._next_line = now + LOG_SECONDS
                log.error("%s has not answered for %.0f s: %s", where, now - self._began, self._why_silent())
            if now - self._began > limit:
                raise NodeLost(
                    f"{where} has not answered for {limit:g} s", why="it was not started, or cannot be reached",
                    next="start node 0 with the same options; check master_addr, master_port and the firewall",
                )  # fmt: skip
            return
        silent = self._watch.look() - self._last_message
        if silent > NODE_TIMEOUT:
            raise NodeLost(
                f"{where} has been silent for {silent:.0f} s", held=f"the limit is {NODE_TIMEOUT:g} s",
                why="its process stands still or the link to it is cut",
            )  # fmt: skip

    def _why_silent(self) -> str:
        """Why the engine does not answer, as far as a TCP connection of this host tells. Waits for a second at most."""
        port = self._options.master_port
        try:
            socket.create_connection((self._options.master_addr, port), timeout=1.0).close()
        except ConnectionRefusedError:
            return f"nothing listens at port {port}: node 0 is not started, or has another master_port"
        except TimeoutError:
            return f"no packet comes back from port {port}: a firewall closes it for this host, or host 0 is down"
        except OSError as error:
            return error.strerror or str(error)
        return f"port {port} is open, and what listens there does not speak to this node"

    def _connection_event(self, event: int, where: str) -> None:
        """Raise NodeLost when the engine closed the connection, or refuses it for good."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise NodeLost(
                f"{where} refused this process as node {self._ranks.node}", why="another process is that node already",
                next="give each host its own node_rank; the engine's log names the address of the other process",
            )  # fmt: skip
        if event != zmq.EVENT_DISCONNECTED:
            self._refusals += 1
            if self._refusals >= MAX_REFUSALS:
                raise NodeLost(
                    f"{where} refused this process as node {self._ranks.node}",
                    why="the cluster tokens differ, or what listens there is no engine of this version",
                    next="give every host the same cluster_token; check master_addr and master_port",
                )  # fmt: skip
        elif self._last_message is not None:
            raise NodeLost(f"{where} is gone", why="its process ended or its host reset the connection")

    def _send(self, message: protocol.RankToEngine) -> None:
        # The engine may have refused this node by now: there is no connection then, and to send would block for ever. The monitor
        # reports the refusal.
        with contextlib.suppress(zmq.Again):
            self._socket.send(protocol.encode(message), zmq.DONTWAIT)
